"""The command `precache`, also run as `python -m precache`."""

import sys
from pathlib import Path

from precache.packages import pillow_fault


def entry_point() -> None:
    """Run the console script."""
    fault = pillow_fault()
    if fault is not None:
        print(f"precache: error: {fault}", file=sys.stderr)
        sys.exit(2)
    from precache.cli import main as cli

    cli.entry_point()


if __name__ == "__main__":
    # `python -m` puts the working folder first on the path: a torch.py there must not hide the real torch
    has_working_folder = not getattr(sys.flags, "safe_path", False)
    if has_working_folder and Path(sys.path[0]) != Path(__file__).parent.parent:
        del sys.path[0]
    entry_point()
