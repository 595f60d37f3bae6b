"""`precache push` and `precache pull`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from precache.console.commandline import Command, ProgressBar, human_bytes, note
from precache.console.notices import counted

if TYPE_CHECKING:
    from precache.sharing.transfer import Transfer


@click.command(name="push", cls=Command)
@click.argument("dst", type=click.Path(path_type=Path))
@click.argument("url")
@click.option("--overwrite", is_flag=True, help="Replace another dataset at URL.")
@click.option("--public", is_flag=True, help="hf://: let everybody read the repository, if it is made.")
def push_command(dst: Path, url: str, overwrite: bool, public: bool) -> None:
    """Copy the converted dataset in DST to URL: s3://, gs://, az://, or hf://datasets/OWNER/NAME.

    Only what differs is sent; if it stops, the same command sends the rest.
    """
    from precache.sharing.transfer import push

    with ProgressBar("push", "B", unit_scale=True, unit_divisor=1024) as bar:
        done = push(dst, url, overwrite=overwrite, public=public, on_progress=bar)
    note(f"{url}: {_moved(done, 'sent')}")


@click.command(name="pull", cls=Command)
@click.argument("url")
@click.argument("dst", type=click.Path(path_type=Path))
def pull_command(url: str, dst: Path) -> None:
    """Copy the converted dataset at URL into the folder DST; every file is compared with its checksum.

    Only what differs is fetched; if it stops, the same command fetches the rest.
    """
    from precache.sharing.transfer import pull

    with ProgressBar("pull", "B", unit_scale=True, unit_divisor=1024) as bar:
        done = pull(url, dst, on_progress=bar)
    note(f"{dst}: {_moved(done, 'fetched')}")


def _moved(done: "Transfer", verb: str) -> str:
    files = f"{counted(done.files, 'file')}, {human_bytes(done.bytes)}"
    if not done.sent_files:
        return f"{files}: all there already; nothing to do"
    return f"{files}; {verb}: {done.sent_files:,}, {human_bytes(done.sent_bytes)}"
