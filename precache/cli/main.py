"""The command `precache`: which commands it has, and those that do not convert, check or inspect.

What only one command needs is imported there.
"""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

import precache
from precache.cli import commandline
from precache.cli.checks import check_command, inspect_command, verify_command
from precache.cli.commandline import LocalPath, PathOrUrl, note
from precache.cli.convert import DATA, RAW, convert
from precache.cli.doctor import doctor_command
from precache.cli.terminal import ProgressBar
from precache.errors import SettingError, check_choice, printable, shell_command
from precache.reporting import human_bytes, quantity
from precache.storage.urls import Location, Url

if TYPE_CHECKING:
    from precache.sharing.push_pull import Transfer

__all__ = ["DATA", "FIRST", "OF_BENCH", "RAW", "convert", "entry_point", "main"]

FIRST = ("convert", "auto", "verify", "inspect", "doctor")
"""What a newcomer needs, in this order."""
OF_BENCH = {"auto": "bench.commands.auto"}
"""Commands that measure, so that they need torch: by name, where they are."""
_OF_BENCH_LINES = {"auto": "Choose a format, convert to it, and measure the gain."}
_PATH = click.Path(path_type=Path)
_SHOWN = 10  # leftovers that are listed


@click.group(cls=commandline.Group, name="precache", modules=OF_BENCH, lines=_OF_BENCH_LINES, first=FIRST)
@click.version_option(precache.__version__, prog_name="precache")
def main() -> None:
    """Convert pictures, once, into datasets that do not keep a GPU waiting.

    \b
    precache convert photos data/shards --format shards --size 256
    precache verify data/shards
    """
    logging.basicConfig(format="WARNING: %(message)s")  # that level and those above it


@main.command(name="sample")
@click.argument("dst", type=_PATH, default=RAW)
@click.option("--images", default=512, show_default=True, help="Pictures to generate.")
@click.option("--classes", default=16, show_default=True, help="Class folders to spread them over.")
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the pictures; the same seed gives the same bytes."
)
@click.option(
    "--like", default="imagenet", show_default=True, help="Data set that they resemble: imagenet or caltech."
)
def sample_command(dst: Path, images: int, classes: int, seed: int, like: str) -> None:
    """Generate photographs in class folders in DST (default data/raw).

    Like ImageNet's, about 470x400 pixels and 110 kB, they take as long to read and decode as what most people
    train on, so measurements on them carry over. Like Caltech's they are a quarter of that, and some are PNG,
    CMYK, grey or rotated by EXIF.
    """
    from precache.example_data import sample_tree

    with ProgressBar("sample", "image") as bar:
        sample_tree.make_sample(dst, images=images, classes=classes, seed=seed, like=like, on_progress=bar)
    note(f"{dst}: {quantity(images, 'picture')} in {quantity(classes, 'class', 'classes')}")


@main.command()
@click.argument("name")
@click.argument("dst", type=_PATH, default=RAW)
@click.option("--url", help="Download the archive from this mirror instead.")
def fetch(name: str, dst: Path, url: str | None) -> None:
    """Download the dataset NAME (caltech256 or caltech101) to DST (default data/raw)."""
    from precache.example_data import datasets

    check_choice("dataset", name, datasets.DATASETS)
    dataset = datasets.DATASETS[name]
    with ProgressBar(dataset.file_name, "B", unit_scale=True, unit_divisor=1024) as bar:
        datasets.fetch(dataset, dst, url=url, on_progress=bar)
    note(f"{dst}: {dataset.images:,} pictures; the archive has the published checksum")


@main.command(name="push")
@click.argument("dst", type=LocalPath())
@click.argument("url")
@click.option("--overwrite", is_flag=True, help="Replace another dataset at URL.")
def push_command(dst: Path, url: str, overwrite: bool) -> None:
    """Copy the converted dataset in DST to URL: s3://, gs:// or az://.

    Only what differs is sent; if it stops, the same command sends the rest.
    """
    from precache.sharing.push_pull import push

    with ProgressBar("push", "B", unit_scale=True, unit_divisor=1024) as bar:
        done = push(dst, url, overwrite=overwrite, on_progress=bar)
    note(f"{url}: {_moved(done, 'sent')}")


@main.command(name="pull")
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
    files = f"{quantity(done.files, 'file')}, {human_bytes(done.bytes)}"
    if not done.sent_files:
        return f"{files}: already there; nothing to do"
    return f"{files}; {verb}: {done.sent_files:,}, {human_bytes(done.sent_bytes)}"


@main.command(name="export")
@click.argument("dst", type=PathOrUrl())
@click.argument("tree", type=LocalPath())
@click.option("--workers", type=int, help="Worker processes; 0 writes in this one.  [default: one per CPU]")
def export_command(dst: Location, tree: Path, workers: int | None) -> None:
    """Write the pictures of the converted dataset in DST as files, and labels.csv, into the new folder TREE.

    They have the stored size and quality, so keep the originals. JPEGs keep their bytes; pixels become PNG.
    """
    from precache.conversion.export import export

    with ProgressBar("export", "image") as bar:
        done = export(dst, tree, workers=workers, on_progress=bar)
    again = f"{shell_command('precache convert', done.source)} DST --format FORMAT {done.flags}".rstrip()
    note(
        f"{tree}: {quantity(done.pictures, 'picture')} as stored, not the originals; to convert them: {again}"
    )


@main.command(name="clean")
@click.argument("url", type=PathOrUrl())
@click.option("--yes", is_flag=True, help="Remove without asking.")
def clean_command(url: Location, yes: bool) -> None:
    """Give up an unfinished conversion into URL: list what it has left there and here, and remove it.

    Only what its journal on this machine names is removed; a finished dataset stays. To continue the
    conversion, run the same 'precache convert' instead.
    """
    from precache.conversion.url import leftovers

    if not isinstance(url, Url):
        raise SettingError(
            f"{url}: is a path, where the same 'precache convert' goes on, and another one with --overwrite "
            f"replaces what is unfinished; to give it up, remove the folder"
        )
    with leftovers(url) as found:
        lines = [*found.objects, *map(str, found.files)]
        if not lines:
            note(f"{url}: no leftovers of killed conversions")
            return
        for line in lines[:_SHOWN]:
            click.echo(printable(f"  {line}"))
        if len(lines) > _SHOWN:
            click.echo(f"  and {len(lines) - _SHOWN:,} more")
        what = "nothing uses them"
        if found.objects:
            what = "an unfinished conversion, which the same 'precache convert' would continue"
        size = human_bytes(found.bytes)
        click.echo(printable(f"{url}: {quantity(len(lines), 'leftover')}, {size}: {what}"))
        if not yes and not sys.stdin.isatty():
            raise SettingError(f"{url}: nothing was removed: no terminal to confirm; pass --yes")
        if not yes and not click.confirm("Remove them?"):
            note("nothing was removed")
            return
        found.remove()
    note(f"{url}: {quantity(len(lines), 'leftover')} removed")


for _command in (convert, verify_command, inspect_command, check_command, doctor_command):
    main.add_command(_command)


def entry_point() -> None:
    """Entry point of the console script."""
    sys.exit(commandline.run(main, "precache"))
