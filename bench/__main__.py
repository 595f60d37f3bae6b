"""The command `bench`, also run as `python -m bench`."""

import sys
from pathlib import Path


def entry_point() -> None:
    """Run the console script."""
    from bench import cli
    from precache.cli import commandline

    sys.exit(commandline.run(cli.main, "bench"))


if __name__ == "__main__":
    # `python -m` puts the working folder first in the path, where a user's own loaders.py would be imported
    # instead of the package
    has_working_folder = not getattr(sys.flags, "safe_path", False)
    if has_working_folder and Path(sys.path[0]) != Path(__file__).parent.parent:
        del sys.path[0]
    entry_point()
