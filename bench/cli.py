"""The command `bench`: the group of its commands."""

import os

import click

import precache
from bench.commands import hardware, loaders, quickstart, recommend, report, watch
from precache.errors import SettingError

HELP = """
Does your GPU wait for data, and what would fix it?

\b
bench watch train.py --epochs 3 photos          does my own training, unchanged, wait?
bench recommend photos                          what would converting these pictures bring?
bench loaders photos --backend imagefolder,pytorch --html report.html
"""


@click.group(name="bench", help=HELP)
@click.version_option(precache.__version__, prog_name="bench")
def main() -> None:
    """Check that this is the only process of the command; a subcommand runs after it."""
    refuse_several_processes()


for _module in (hardware, loaders, quickstart, recommend, report, watch):
    main.add_command(_module.command)


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
