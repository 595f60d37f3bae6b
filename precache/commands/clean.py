"""`precache clean`."""

import sys

import click

from precache.console.commandline import Command, Place, human_bytes, note, printable
from precache.console.notices import counted
from precache.errors import SettingError
from precache.storage.urls import Location, Url

_SHOWN = 10


@click.command(name="clean", cls=Command)
@click.argument("place", metavar="DST", type=Place())
@click.option("--yes", is_flag=True, help="Remove without asking.")
def clean_command(place: Location, yes: bool) -> None:
    """List what killed conversions have left in DST, a folder or a URL, and remove it.

    That is what our own journals and locks name, nothing else; a finished dataset stays. An unfinished
    conversion is given up: to go on with it, run the same 'precache convert' instead.
    """
    from precache.conversion.clean import leftovers

    with leftovers(place) as found:
        if not found:
            note(f"{place}: nothing is left of killed conversions")
            return
        lines = [*found.shards, *found.others, *(f"unfinished upload of {one.name}" for one in found.uploads)]
        lines += [str(folder) for folder in found.folders]
        for line in lines[:_SHOWN]:
            click.echo(printable(f"  {line}"))
        if len(lines) > _SHOWN:
            click.echo(f"  and {len(lines) - _SHOWN:,} more")
        what = "of no use to anybody"
        if found.shards:
            what = "an unfinished conversion, which the same 'precache convert' would go on with"
        size = human_bytes(found.bytes)
        click.echo(printable(f"{place}: {counted(len(lines), 'leftover')}, {size}: {what}"))
        if not yes and not sys.stdin.isatty():
            raise SettingError(f"{place}: nothing was removed, for nobody can be asked; pass --yes")
        if not yes and not click.confirm("Remove them?"):
            note("nothing was removed")
            return
        found.remove()
    if isinstance(place, Url) and place.scheme in ("gs", "az"):
        note("parts of unfinished uploads are removed by the storage itself, within a week")
    note(f"{place}: {counted(len(lines), 'leftover')} removed")
