"""The command `bench`: which file is which command."""

import os
import sys

import click

import precache
from precache.cli import commandline
from precache.errors import SettingError

COMMANDS = {
    "accuracy": "bench.commands.accuracy",
    "loaders": "bench.commands.loaders",
    "recommend": "bench.commands.recommend",
    "quickstart": "bench.commands.quickstart",
    "convert": "bench.commands.convert",
    "hardware": "bench.commands.hardware",
    "report": "bench.commands.report",
    "watch": "bench.commands.watch",
}
"""Each module holds its click command as `command`, and is imported when that is asked for."""


FIRST = ("watch", "loaders", "recommend", "hardware")
"""Commands that a newcomer needs."""


@click.group(cls=commandline.Group, name="bench", modules=COMMANDS, first=FIRST)
@click.version_option(precache.__version__, prog_name="bench")
def main() -> None:
    """Does your GPU wait for data, and what would fix it?

    \b
    bench watch train.py --epochs 3 photos          does my own training, unchanged, wait?
    bench recommend photos                          what would converting these pictures bring?
    bench loaders photos --backend imagefolder,pytorch --html report.html
    """
    refuse_several_processes()


def refuse_several_processes() -> None:
    """SettingError in a process that torchrun started beside others: they would measure one another."""
    count = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and count != "1":
        raise SettingError(
            f"torchrun started {count} processes of bench, which would measure one another; "
            f"run 'bench loaders --ranks {count}' without torchrun: it starts the ranks itself"
        )


def entry_point() -> None:
    """Entry point of the console script."""
    sys.exit(commandline.run(main, "bench"))
