"""The command `bench`: its group, the module of each command, and its entry point."""

import os
import sys

import click

import precache
from precache.cli import commandline
from precache.errors import SettingError

COMMANDS = {
    "loaders": "bench.commands.loaders",
    "recommend": "bench.commands.recommend",
    "quickstart": "bench.commands.quickstart",
    "hardware": "bench.commands.hardware",
    "report": "bench.commands.report",
    "watch": "bench.commands.watch",
}
"""Module of each command; it holds the click command as `command`, and is imported when that is run."""

FIRST = ("watch", "loaders", "recommend", "hardware")
"""Commands that `bench --help` lists first: those that a newcomer needs."""


HELP = """
Does your GPU wait for data, and what would fix it?

\b
bench watch train.py --epochs 3 photos          does my own training, unchanged, wait?
bench recommend photos                          what would converting these pictures bring?
bench loaders photos --backend imagefolder,pytorch --html report.html
"""


@click.group(cls=commandline.Group, name="bench", help=HELP, modules=COMMANDS, first=FIRST)
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


def entry_point() -> None:
    """Run the command line of this process, and exit with its code: the entry point of the script `bench`."""
    sys.exit(commandline.run(main, "bench"))
