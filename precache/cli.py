"""The command `precache`: parsing, messages, exit codes.

What only one command needs is imported there: `convert` should not wait for an HTTP client.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

import precache
from precache.commands.checks import check_command, verify_command
from precache.commands.clean import clean_command
from precache.commands.running import RUNNING_FLAGS, lines_of_nodes
from precache.commands.source_flags import SOURCE_FLAGS, source_options
from precache.commands.transfer import pull_command, push_command
from precache.console import commandline
from precache.console.commandline import (
    Place,
    ProgressBar,
    gathered,
    human_bytes,
    note,
    parse_bytes,
    parse_share,
    printable,
)
from precache.console.notices import counted
from precache.console.progress import Progress
from precache.convert import Conversion
from precache.dataset.left_out import REJECTED_NAME
from precache.errors import SettingError, check_choice, shell_command
from precache.images import FITS, RESAMPLING
from precache.pictures.reading import MAX_PIXELS
from precache.pictures.sizes import parse_size
from precache.recipe import DEFAULT_SIZE, DEFAULT_SPLITS, FORMAT_NAMES, Recipe
from precache.sources import SourceOptions
from precache.storage.urls import Location, Url

DATA = Path("data")
RAW = DATA / "raw"
ELSEWHERE = {"auto": "bench.commands.auto"}
"""Commands that measure, so that they need torch: by name, where they are."""
_ELSEWHERE_HELP = {"auto": "Choose a format, convert to it, and measure what that brings."}
_PATH, _PLACE = click.Path(path_type=Path), Place()
_REJECTS = {
    "max_rejects": click.option(
        "--max-rejects", default="1%", show_default=True, help="How many pictures may be damaged: 1% or 0.01."
    ),
    "strict": click.option("--strict", is_flag=True, help="Allow no damaged picture: --max-rejects 0."),
}


def _most_rejects(max_rejects: str, strict: bool) -> float:
    return 0.0 if strict else parse_share("max_rejects", max_rejects)


@click.group(cls=commandline.Group, name="precache")
@click.version_option(precache.__version__, prog_name="precache")
def main() -> None:
    """Convert raw image trees into datasets that do not keep a GPU waiting."""
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
    train on, so what you measure on them holds. Like Caltech's they are a quarter of that, and some are PNG,
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
    note(f"{dst}: {images:,} pictures; their checksum and number are as published")


@main.command()
@click.argument("src", type=_PLACE, default=RAW)
@click.argument("dst", type=_PLACE, required=False)
@click.option("--format", "format_name", help=f"One of: {', '.join(FORMAT_NAMES)}.")
@click.option(
    "--size",
    default=str(DEFAULT_SIZE),
    show_default=True,
    help="Pixels of the shorter side at most (see --fit); or of a square, or WIDTHxHEIGHT.",
)
@click.option("--quality", default=95, show_default=True, help="JPEG quality (webdataset, dali).")
@click.option("--fit", default="keep", show_default=True, help=f"One of: {', '.join(FITS)}.")
@click.option("--enlarge", is_flag=True, help="With fit keep: make smaller pictures as large as --size, too.")
@click.option("--resample", default="lanczos", show_default=True, help=f"One of: {', '.join(RESAMPLING)}.")
@click.option(
    "--channels", default="rgb", show_default=True, help="rgb, grey, or (shards) rgba, a number of bands."
)
@click.option("--dtype", default="uint8", show_default=True, help="uint8; or uint16: grey, bands (shards).")
@click.option("--background", default="white", show_default=True, help="Colour behind transparent pixels.")
@click.option("--decode", default="full", show_default=True, help="full; or scaled: faster, less exact.")
@click.option(
    "--allow-truncated", is_flag=True, help="Convert JPEGs that break off; the missing part is grey."
)
@click.option(
    "--max-pixels", default=MAX_PIXELS, show_default=True, help="Reject pictures with more pixels than this."
)
@click.option(
    "--splits",
    default=DEFAULT_SPLITS,
    show_default=True,
    help="Shares (train=0.8,val=0.2), or a file with lines path,split.",
)
@click.option("--shard-bytes", default="64MiB", show_default=True, help="Size of a shard, as decoded pixels.")
@click.option("--seed", default=0, show_default=True, help="Of the order on disk and the splits.")
@gathered("running", dict, RUNNING_FLAGS)
@click.option("--overwrite", is_flag=True, help="Convert again, and replace DST when all is done.")
@click.option("--update", is_flag=True, help="Add what SRC got since DST was converted; drop what it lost.")
@gathered("most_rejects", _most_rejects, _REJECTS)
@gathered("options", source_options, SOURCE_FLAGS)
def convert(
    src: Location,
    dst: Location | None,
    format_name: str | None,
    running: dict[str, Any],
    overwrite: bool,
    update: bool,
    most_rejects: float,
    shard_bytes: str,
    splits: str,
    size: str,
    options: SourceOptions,
    **settings: Any,
) -> Conversion:
    """Convert the pictures of SRC (default data/raw) into DST (default data/FORMAT).

    SRC is a tree of class folders, a table of pictures and labels (.csv, .tsv, .jsonl, .parquet), an archive,
    a converted dataset, or hf:FOLDER, which Hugging Face's save_to_disk wrote. Both may be URLs: s3://, gs://,
    az://; SRC https://, too.
    """
    if format_name is None:
        raise SettingError(f"choose a format: --format {', '.join(FORMAT_NAMES)}; 'bench recommend' advises")
    split_list = None if "=" in splits and not Path(splits).is_file() else Path(splits)
    if split_list is not None:
        splits = DEFAULT_SPLITS
    settings |= {"size": parse_size(size), "shard_bytes": parse_bytes(shard_bytes), "splits": splits}
    recipe = Recipe(format=format_name, **settings)
    destination = DATA / format_name if dst is None else dst

    def show_size(predicted: int, free: int) -> None:
        where = (
            f" in {tempfile.gettempdir()}, for shards on their way" if isinstance(destination, Url) else ""
        )
        note(f"{destination}: will take about {human_bytes(predicted)}; {human_bytes(free)} are free{where}")

    with ProgressBar(f"convert to {format_name}", "image") as bar:
        result = precache.convert(
            src,
            destination,
            recipe,
            **running,
            overwrite=overwrite,
            update=update,
            max_rejects=most_rejects,
            split_list=split_list,
            options=options,
            on_start=show_size,
            on_progress=_telling_of_resume(destination, bar),
        )
    _print_conversion(result, destination)
    return result


@main.command()
@click.argument("dst", type=_PLACE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--html", type=_PATH, help="Write a web page: pictures of each class, sizes, rejected files.")
@click.option("--all-classes", is_flag=True, help="List every class, not the first ten.")
def inspect(dst: Location, as_json: bool, html: Path | None, all_classes: bool) -> None:
    """Show what the converted dataset in DST holds: classes, rejected files, and the summary."""
    from precache.checks import inspection

    dataset = precache.open_dataset(dst)
    if html is not None:
        inspection.write_html(dataset, html)
        click.echo(printable(f"{html}: {human_bytes(html.stat().st_size)}"), err=as_json)
    if as_json:
        click.echo(json.dumps(inspection.summary(dataset.manifest), indent=1))
    elif html is None:
        inspection.print_tables(dataset, all_classes=all_classes)


@main.command(name="export")
@click.argument("dst", type=_PLACE)
@click.argument("tree", type=_PATH)
@click.option("--format", "file_format", help="jpeg, or png.  [default: as stored; pixels as png]")
@click.option("--quality", default=95, show_default=True, help="Of JPEGs that are made of pixels.")
@click.option("--workers", type=int, help="Worker processes; 0: work in this one.  [default: one per CPU]")
def export_command(
    dst: Location, tree: Path, file_format: str | None, quality: int, workers: int | None
) -> None:
    """Write the pictures of the converted dataset in DST back as files, into the new folder TREE."""
    from precache.sharing.export import export

    with ProgressBar("export", "image") as bar:
        done = export(dst, tree, file_format=file_format, quality=quality, workers=workers, on_progress=bar)
    again = f"{shell_command('precache convert', done.source)} DST --format FORMAT {done.flags}".rstrip()
    note(f"{tree}: {counted(done.pictures, 'picture')}; to read them back: {again}")


@main.command(name="doctor")
def doctor_command() -> None:
    """Show what this machine has, and which command installs what is missing."""
    from precache.checks import doctor

    findings = doctor.examine()
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.subject:<{width}}  {finding.found}")
        if finding.install:
            click.echo(f"{'':<{width}}  install: {finding.install}")


for _command in (verify_command, check_command, clean_command, push_command, pull_command):
    main.add_command(_command)
for _name, _module in ELSEWHERE.items():
    main.add_command(commandline.Elsewhere(_name, _module, _ELSEWHERE_HELP[_name]))


def _telling_of_resume(destination: Location, on_progress: Progress) -> Progress:
    """`on_progress`, and first a line on what an earlier run has left."""
    begun = False

    def report(done: int, total: int) -> None:
        nonlocal begun
        if done and not begun:
            there = f"{done:,} of {counted(total, 'picture')} {'is' if done == 1 else 'are'} there already"
            note(f"{destination}: {there}; going on from there")
        begun = True
        on_progress(done, total)

    return report


def _print_conversion(result: Conversion, destination: Location) -> None:
    manifest = result.manifest
    if not result.published:
        note(f"{destination}: already converted with these settings; nothing to do")
        return
    if manifest.updates:
        done = manifest.updates[-1]
        note(
            f"{destination}: update {len(manifest.updates):,}: {counted(done.added, 'picture')} added, "
            f"{done.removed:,} removed"
        )
    note(
        f"{destination}: {counted(manifest.samples, 'image')}, {len(manifest.rejected):,} rejected, "
        f"{len(manifest.ignored):,} ignored; {human_bytes(manifest.source_bytes)} in, "
        f"{human_bytes(manifest.stored_bytes)} out; {result.converted / result.elapsed_s:,.0f} images/s "
        f"({result.elapsed_s:.1f} s)"
    )
    for line in lines_of_nodes(result.nodes):
        note(f"  {line}")
    for rejected in manifest.rejected[:10]:
        click.echo(printable(f"  rejected {rejected.path}: {rejected.reason}"), err=True)
    if manifest.rejected:
        listed = destination / REJECTED_NAME
        left_out = (
            f"{counted(len(manifest.rejected), 'picture')} {'is' if len(manifest.rejected) == 1 else 'are'}"
        )
        click.echo(printable(f"  WARNING: {left_out} left out; {listed} says which and why"), err=True)


def entry_point() -> None:
    """Entry point of the console script."""
    sys.exit(commandline.run(main, "precache"))
