"""Complete training scripts, a file each, to run or to copy: `python -m loaders.examples.train --help`.

A copied script runs as it is: it imports what `__all__` names here from the installed `loaders`.
"""

__all__ = ["common", "models", "train"]  # modules, which are imported when they are used
