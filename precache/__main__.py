"""The command `precache`, also run as `python -m precache`."""

import sys
from pathlib import Path


def entry_point() -> None:
    """Run the console script."""
    try:
        from precache.cli import main as cli
    except Exception:  # a package that lacks files may raise anything
        from precache.packages import pillow_fault

        fault = pillow_fault()
        if fault is None:
            raise
        print(f"precache: error: {fault}", file=sys.stderr)
        sys.exit(2)
    cli.entry_point()


if __name__ == "__main__":
    # `python -m` puts the working folder first on the path: a torch.py there must not hide the real torch
    has_working_folder = not getattr(sys.flags, "safe_path", False)
    if has_working_folder and Path(sys.path[0]) != Path(__file__).parent.parent:
        del sys.path[0]
    entry_point()
