"""The command `bench`: the group of its commands."""

import os
from importlib import import_module

import click

import precache
from precache.errors import SettingError

HELP = """
Does your GPU wait for data, and what would fix it?

\b
bench watch train.py --epochs 3 photos          does my own training, unchanged, wait?
bench recommend photos                          what would converting these pictures bring?
bench loaders photos --backend imagefolder,pytorch --html report.html
"""
COMMANDS = ("hardware", "loaders", "quickstart", "recommend", "report", "watch")
"""Names of the commands, each the `command` of the module of that name in `bench.commands`."""


class _Commands(click.Group):
    """Commands that are imported when they are used: one measures without the code of the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        names = [cmd_name] if cmd_name in COMMANDS else COMMANDS  # of those that it has click suggests one
        for name in names:
            self.add_command(import_module(f"bench.commands.{name}").command)
        return super().get_command(ctx, cmd_name)


@click.group(name="bench", cls=_Commands, help=HELP)
@click.version_option(precache.__version__, prog_name="bench")
def main() -> None:
    """Check that this is the only process of the command; a subcommand runs after it."""
    refuse_several_processes()


def refuse_several_processes() -> None:
    """Raise SettingError in a process that torchrun started beside others.

    Several processes of `bench` would measure one another.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and count != "1":
        raise SettingError(
            f"torchrun started {count} processes of bench, which would measure one another",
            remedy=f"run 'bench loaders --ranks {count}' without torchrun: it starts the ranks itself",
        )
