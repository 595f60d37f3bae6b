"""The command `precache`, also as `python -m precache`; where PIL cannot be imported, its `doctor` alone."""

import sys
from pathlib import Path

import click

from precache.cli import commandline
from precache.cli.doctor import doctor_command
from precache.packages import check_pillow, pillow_fault


class _DoctorAlone(commandline.Group):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """`doctor`; instead of any other command, what puts Pillow right."""
        if cmd_name != doctor_command.name:
            check_pillow()
        return super().get_command(ctx, cmd_name)


def entry_point() -> None:
    """Entry point of the console script."""
    if pillow_fault():
        main = _DoctorAlone(name="precache", commands=[doctor_command])
        sys.exit(commandline.run(main, "precache"))
    from precache.cli import main as cli

    cli.entry_point()


if __name__ == "__main__":
    # `python -m` puts the working folder in front of the path: a torch.py of its user's is not ours
    in_front = not getattr(sys.flags, "safe_path", False)
    if in_front and Path(sys.path[0]) != Path(__file__).parent.parent:
        del sys.path[0]
    entry_point()
