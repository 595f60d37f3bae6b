"""Commands on datasets that are there: copy them to a URL and back, write them as files, tidy up."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from precache.cli.commandline import Command, LocalPath, PathOrUrl, ProgressBar, note, printable
from precache.errors import SettingError, shell_command
from precache.reporting import counted, human_bytes
from precache.storage.urls import Location, Url

if TYPE_CHECKING:
    from precache.sharing.push_pull import Transfer

_SHOWN = 10


@click.command(name="push", cls=Command)
@click.argument("dst", type=LocalPath())
@click.argument("url")
@click.option("--overwrite", is_flag=True, help="Replace another dataset at URL.")
@click.option("--public", is_flag=True, help="hf://: make a new repository public.")
def push_command(dst: Path, url: str, overwrite: bool, public: bool) -> None:
    """Copy the converted dataset in DST to URL: s3://, gs://, az://, or hf://datasets/OWNER/NAME.

    Only what differs is sent; if it stops, the same command sends the rest.
    """
    from precache.sharing.push_pull import push

    with ProgressBar("push", "B", unit_scale=True, unit_divisor=1024) as bar:
        done = push(dst, url, overwrite=overwrite, public=public, on_progress=bar)
    note(f"{url}: {_moved(done, 'sent')}")


@click.command(name="pull", cls=Command)
@click.argument("url")
@click.argument("dst", type=LocalPath())
def pull_command(url: str, dst: Path) -> None:
    """Copy the converted dataset at URL into the folder DST; every file's checksum is checked.

    Only what differs is fetched; if it stops, the same command fetches the rest.
    """
    from precache.sharing.push_pull import pull

    with ProgressBar("pull", "B", unit_scale=True, unit_divisor=1024) as bar:
        done = pull(url, dst, on_progress=bar)
    note(f"{dst}: {_moved(done, 'fetched')}")


def _moved(done: "Transfer", verb: str) -> str:
    files = f"{counted(done.files, 'file')}, {human_bytes(done.bytes)}"
    if not done.sent_files:
        return f"{files}: already there; nothing to do"
    return f"{files}; {verb}: {done.sent_files:,}, {human_bytes(done.sent_bytes)}"


@click.command(name="export", cls=Command)
@click.argument("dst", type=PathOrUrl())
@click.argument("tree", type=LocalPath())
@click.option("--format", "file_format", help="jpeg, or png.  [default: as stored; pixels as png]")
@click.option("--quality", default=95, show_default=True, help="JPEG quality, where pixels are stored.")
@click.option("--workers", type=int, help="Worker processes; 0: work in this one.  [default: one per CPU]")
def export_command(
    dst: Location, tree: Path, file_format: str | None, quality: int, workers: int | None
) -> None:
    """Write the pictures of the converted dataset in DST as files, into the new folder TREE.

    They have the stored size and quality, so keep the originals.
    """
    from precache.conversion.export import export

    with ProgressBar("export", "image") as bar:
        done = export(dst, tree, file_format=file_format, quality=quality, workers=workers, on_progress=bar)
    again = f"{shell_command('precache convert', done.source)} DST --format FORMAT {done.flags}".rstrip()
    note(
        f"{tree}: {counted(done.pictures, 'picture')} as stored, not the originals; to convert them: {again}"
    )


@click.command(name="clean", cls=Command)
@click.argument("place", metavar="DST", type=PathOrUrl())
@click.option("--yes", is_flag=True, help="Remove without asking.")
def clean_command(place: Location, yes: bool) -> None:
    """List what killed conversions have left in DST, a folder or a URL, and remove it.

    Only files that precache's own journals and locks name are removed; a finished dataset stays. An
    unfinished conversion is dropped: to continue it, run the same 'precache convert' instead.
    """
    from precache.conversion.clean import leftovers

    with leftovers(place) as found:
        if not found:
            note(f"{place}: no leftovers of killed conversions")
            return
        lines = [
            *found.shards,
            *map(str, found.others),
            *(f"unfinished upload of {one.name}" for one in found.uploads),
        ]
        lines += [str(folder) for folder in found.folders]
        for line in lines[:_SHOWN]:
            click.echo(printable(f"  {line}"))
        if len(lines) > _SHOWN:
            click.echo(f"  and {len(lines) - _SHOWN:,} more")
        what = "nothing uses them"
        if found.shards:
            what = "an unfinished conversion, which the same 'precache convert' would continue"
        size = human_bytes(found.bytes)
        click.echo(printable(f"{place}: {counted(len(lines), 'leftover')}, {size}: {what}"))
        if not yes and not sys.stdin.isatty():
            raise SettingError(f"{place}: nothing was removed: no terminal to confirm; pass --yes")
        if not yes and not click.confirm("Remove them?"):
            note("nothing was removed")
            return
        found.remove()
    if isinstance(place, Url) and place.scheme in ("gs", "az"):
        note("the storage itself removes parts of unfinished uploads within a week")
    note(f"{place}: {counted(len(lines), 'leftover')} removed")
