"""Complete training scripts, a file each, to run or to copy: `python -m loaders.examples.train --help`.

A copied script runs as it is: it imports `common` and `models` from the installed `loaders`.
"""
