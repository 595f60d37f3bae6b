"""The command `precache`, also run as `python -m precache`; without a working PIL, only its `doctor` runs."""

import sys
from pathlib import Path

import click

from precache.cli import commandline
from precache.cli.doctor import doctor_command
from precache.packages import check_pillow, pillow_fault


class _DoctorOnly(commandline.Group):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return `doctor`; for any other name, raise the error that says how to repair Pillow."""
        if cmd_name != doctor_command.name:
            check_pillow()
        return super().get_command(ctx, cmd_name)


def entry_point() -> None:
    """Run the console script."""
    if pillow_fault():
        main = _DoctorOnly(name="precache", commands=[doctor_command])
        sys.exit(commandline.run(main, "precache"))
    from precache.cli import main as cli

    cli.entry_point()


if __name__ == "__main__":
    # `python -m` puts the working folder first on the path: a torch.py there must not hide the real torch
    has_working_folder = not getattr(sys.flags, "safe_path", False)
    if has_working_folder and Path(sys.path[0]) != Path(__file__).parent.parent:
        del sys.path[0]
    entry_point()
