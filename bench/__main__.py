"""`python -m bench` is the command `bench`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # `python -m` puts the working folder first in the path, where a user's own loaders.py would be imported
    # instead of the package
    has_working_folder = not getattr(sys.flags, "safe_path", False)
    if has_working_folder and Path(sys.path[0]) != Path(__file__).parent.parent:
        del sys.path[0]
    from bench.cli import entry_point

    entry_point()
