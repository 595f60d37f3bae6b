"""`python -m bench` is the command `bench`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # `python -m` puts the working folder in front of the path: a loaders.py of its user's is not ours
    in_front = not getattr(sys.flags, "safe_path", False)
    if in_front and Path(sys.path[0]) != Path(__file__).parent.parent:
        del sys.path[0]
    from bench.cli import entry_point

    entry_point()
