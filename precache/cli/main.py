"""The group `precache`, with its smaller commands; `convert` and `checks` hold the others.

Modules that only one command needs are imported in it.
"""

import logging
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

import precache
from precache.cli import commandline
from precache.cli.checks import check_command, inspect_command, verify_command
from precache.cli.commandline import PATH, debug_option
from precache.cli.convert import RAW, convert
from precache.cli.terminal import ProgressBar, note
from precache.reporting import human_bytes, quantity

if TYPE_CHECKING:
    from precache.sharing.push_pull import Transfer


@click.group(name="precache")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    help="Show the versions of precache and its decoders, and exit.",
    callback=lambda context, _, is_given: _show_versions(context) if is_given else None,
)
def main() -> None:
    """Convert pictures, once, into datasets that do not keep a GPU waiting.

    \b
    precache check photos
    precache convert photos data/shards --format shards --size 256
    precache verify data/shards
    precache inspect data/shards --html page.html
    """
    logging.basicConfig(format="WARNING: %(message)s")  # shows this level and those above it


def _show_versions(context: click.Context) -> None:
    from precache.pictures import kinds

    versions = kinds.decoder_versions()
    flavour, jpeg = versions.pop("pillow_flavour"), versions.pop("pillow_jpeg")
    decoders = [f"{flavour} {versions.pop('pillow')} with {jpeg}"]
    decoders += [f"{name} {version}" for name, version in versions.items()]
    click.echo(f"precache {precache.__version__}, python {platform.python_version()}, {', '.join(decoders)}")
    unreadable = kinds.kinds_without_decoder()
    readable = ", ".join(kind for kind in kinds.KINDS if kind not in unreadable)
    click.echo(f"reads {readable}{'; not ' if unreadable else ''}{', '.join(unreadable)}")
    context.exit()


@main.command(name="sample", short_help="Generate photographs to try it with.")
@click.argument("dst", type=PATH, default=RAW)
@click.option("--images", default=512, show_default=True, help="Pictures to generate.")
@click.option("--classes", default=16, show_default=True, help="Class folders to spread them over.")
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the pictures; the same seed gives the same bytes."
)
@click.option(
    "--like", default="imagenet", show_default=True, help="Data set that they resemble: imagenet or caltech."
)
@debug_option
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


@main.command(name="push", short_help="Copy a dataset to an object storage.")
@click.argument("dst", type=PATH)
@click.argument("url")
@click.option("--overwrite", is_flag=True, help="Replace another dataset at URL.")
@debug_option
def push_command(dst: Path, url: str, overwrite: bool) -> None:
    """Copy the converted dataset in DST to URL: s3://, gs:// or az://.

    Only what differs is sent; if it stops, the same command sends the rest.
    """
    from precache.sharing.push_pull import push

    with ProgressBar("push", "B", unit_scale=True, unit_divisor=1024) as bar:
        transfer = push(dst, url, overwrite=overwrite, on_progress=bar)
    note(f"{url}: {_transfer_text(transfer, 'sent')}")


@main.command(name="pull", short_help="Copy a dataset from an object storage.")
@click.argument("url")
@click.argument("dst", type=PATH)
@debug_option
def pull_command(url: str, dst: Path) -> None:
    """Copy the converted dataset at URL into the folder DST; every file's checksum is checked.

    Only what differs is fetched; if it stops, the same command fetches the rest.
    """
    from precache.sharing.push_pull import pull

    with ProgressBar("pull", "B", unit_scale=True, unit_divisor=1024) as bar:
        transfer = pull(url, dst, on_progress=bar)
    note(f"{dst}: {_transfer_text(transfer, 'fetched')}")


def _transfer_text(transfer: "Transfer", verb: str) -> str:
    files = f"{quantity(transfer.files, 'file')}, {human_bytes(transfer.bytes)}"
    if not transfer.sent_files:
        return f"{files}: already there; nothing to do"
    return f"{files}; {verb}: {transfer.sent_files:,}, {human_bytes(transfer.sent_bytes)}"


for _command in (convert, verify_command, inspect_command, check_command):
    main.add_command(_command)


def entry_point() -> None:
    """Run the console script."""
    sys.exit(commandline.run(main, "precache"))
