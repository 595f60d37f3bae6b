"""The command `precache`: which commands it has. What only one command needs is imported there."""

import logging
import sys
from pathlib import Path

import click

import precache
from precache.cli import commandline
from precache.cli.checks import check_command, inspect_command, verify_command
from precache.cli.commandline import ProgressBar, note
from precache.cli.convert import DATA, RAW, convert
from precache.cli.datasets import clean_command, export_command, pull_command, push_command
from precache.cli.doctor import doctor_command
from precache.errors import check_choice
from precache.reporting import counted

__all__ = ["DATA", "FIRST", "OF_BENCH", "RAW", "convert", "entry_point", "main"]

FIRST = ("convert", "auto", "verify", "inspect", "doctor")
"""What a newcomer needs, in this order."""
OF_BENCH = {"auto": "bench.commands.auto"}
"""Commands that measure, so that they need torch: by name, where they are."""
_OF_BENCH_LINES = {"auto": "Choose a format, convert to it, and measure the gain."}
_PATH = click.Path(path_type=Path)


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
@click.option("--images", default=512, show_default=True, help="Pictures in all.")
@click.option("--classes", default=16, show_default=True, help="Class folders.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--like", default="imagenet", show_default=True, help="imagenet, or caltech.")
def sample_command(dst: Path, images: int, classes: int, seed: int, like: str) -> None:
    """Generate photographs in class folders in DST (default data/raw).

    Like ImageNet's, about 470x400 pixels and 110 kB, they take as long to read and decode as what most people
    train on, so measurements on them carry over. Like Caltech's they are a quarter of that, and some are PNG,
    CMYK, grey or rotated by EXIF.
    """
    from precache.example_data import sample_tree

    with ProgressBar("sample", "image") as bar:
        sample_tree.make_sample(dst, images=images, classes=classes, seed=seed, like=like, on_progress=bar)
    note(f"{dst}: {counted(images, 'picture')} in {counted(classes, 'class', 'classes')}")


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
        images = datasets.fetch(dataset, dst, url=url, on_progress=bar)
    note(f"{dst}: {images:,} pictures; checksum and count match the published ones")


for _command in (
    *(convert, verify_command, inspect_command, check_command, doctor_command),
    *(export_command, push_command, pull_command, clean_command),
):
    main.add_command(_command)


def entry_point() -> None:
    """Entry point of the console script."""
    sys.exit(commandline.run(main, "precache"))
