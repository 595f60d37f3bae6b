"""The commands that examine a source or a dataset: `precache verify`, `check` and `inspect`."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

import precache
from precache.cli.commandline import LOCATION, PATH, LocationType, check_output, debug_option
from precache.cli.convert import RAW, deeper_line, ignored_lines
from precache.cli.terminal import ProgressBar, new_console, note
from precache.dataset.converted import ConvertedDataset
from precache.dataset.manifest import is_converted
from precache.errors import DatasetError, SettingError, printable, shell_command
from precache.pictures.kinds import kind_without_decoder
from precache.pictures.reading import MAX_PIXELS
from precache.reporting import human_bytes, quantity
from precache.sources.options import option_help
from precache.storage.urls import Location, Url, source_path

_FIRST_CLASSES = 10
_MINUTE_S = 60


@click.command(name="verify", short_help="Compare the files of a dataset with its checksums.")
@click.argument("dst", type=LOCATION)
@click.argument("others", metavar="[SRC | DST ...]", type=LOCATION, nargs=-1)
@click.option(
    "--deep",
    is_flag=True,
    help="Convert the pictures of SRC again, in memory, and compare each with what is stored.",
)
@click.option(
    "--root", help="Folder where the pictures of a table SRC lie now.  [default: as when converted]"
)
@click.option("--workers", type=int, help="Worker processes of --deep.  [default: one per CPU]")
@debug_option
def verify_command(
    dst: Location,
    others: tuple[Location, ...],
    deep: bool,
    root: str | None,
    workers: int | None,
) -> None:
    """Compare every file of the dataset in DST, or of several, with its manifest's checksums."""
    for option, value in (("--root", root), ("--workers", workers)):
        if value is not None and not deep:
            raise SettingError(
                f"{option} {value} is for --deep, which converts the pictures of SRC again",
                remedy="leave it out, or give --deep and SRC, too",
            )
    if deep and len(others) != 1:
        raise SettingError("--deep takes a dataset and its source: precache verify --deep DST SRC")
    if deep:
        _verify_deep(dst, others[0], root, workers)
        return
    for other in others:
        if not isinstance(other, Url) and other.exists() and not is_converted(other):
            command = shell_command("precache verify --deep", dst, other)
            raise SettingError(
                "is no converted dataset",
                path=other,
                remedy=f"to compare {dst} with its source, run: {command}",
            )
    results = [_verify_files(location, "SRC") for location in (dst, *others)]
    if not all(results):
        raise click.exceptions.Exit(1)


def _verify_deep(dst: Location, source: Location, root: str | None, workers: int | None) -> None:
    """Verify the files of the dataset in `dst`, then its pictures against `source`, and print the result."""
    if not _verify_files(dst, source):
        raise click.exceptions.Exit(1)
    with ProgressBar("verify", "image") as bar:
        problems = precache.verify_deep(dst, source, root=root, workers=workers, on_progress=bar)
    count = precache.open_dataset(dst).manifest.samples
    if problems:
        differ = "differs" if len(problems) == 1 else "differ"
        pictures = f"{len(problems):,} of {quantity(count, 'picture')} {differ}"
        command = _convert_command(dst, source)
        problems.append(f"{dst}: {pictures} from what converting {source} gives; rewrite it with: {command}")
    subject = "its picture is" if count == 1 else f"all {count:,} pictures are"
    _print_result(problems, f"{dst}: {subject} exactly what converting {source} gives")


def _verify_files(dst: Location, source: Location | str) -> bool:
    """Print whether all files of the dataset in `dst` are intact, and return it."""
    problems = precache.verify(dst)
    try:
        manifest = precache.open_dataset(dst).manifest
    except DatasetError:  # so the flags that it was converted with are unknown
        return _print_problems([*problems, f"{dst}: is damaged; remove it, then convert it again"], "")
    if problems:
        are = "is" if len(problems) == 1 else "are"
        count = quantity(len(problems), "file")
        problems.append(f"{dst}: {count} {are} damaged; rewrite it with: {_convert_command(dst, source)}")
    size = human_bytes(manifest.stored_bytes)
    return _print_problems(
        problems, f"{dst}: {quantity(len(manifest.shards), 'shard')}, {size}: every byte is as written"
    )


def _convert_command(dst: Location, source: Location | str) -> str:
    """Return the command that writes the dataset in `dst` again."""
    if isinstance(dst, Url):
        return shell_command("precache push --overwrite DIR", dst)
    flags = precache.open_dataset(dst).manifest.to_flags()
    return f"{shell_command('precache convert', source, dst)} {flags} --overwrite"


@click.command(name="check", short_help="Decode every picture of a tree, and list the damaged ones.")
@click.argument("src", type=LocationType(source_path), default=RAW)
@click.option(
    "--list",
    "list_file",
    type=PATH,
    help="Write the list here.  [default: SRC.rejected.csv]",
)
@click.option(
    "--max-pixels", default=MAX_PIXELS, show_default=True, help="Reject pictures with more pixels than this."
)
@click.option("--class-depth", type=int, help=option_help()["class_depth"])
@click.option("--workers", type=int, help="Worker processes; 0 decodes in this one.  [default: one per CPU]")
@debug_option
def check_command(
    src: Path, list_file: Path | None, max_pixels: int, class_depth: int | None, workers: int | None
) -> None:
    """Decode every picture of the tree SRC (default data/raw), and list the damaged ones.

    It also says how many classes and splits there are, and what converting takes.
    Loaders built with on_error="skip" leave out the pictures in the default list.
    """
    with ProgressBar("check", "image") as bar:
        report = precache.check(
            src,
            list_file=list_file,
            class_depth=class_depth,
            max_pixels=max_pixels,
            workers=workers,
            on_progress=bar,
        )
    if report.deeper:
        note(f"{src}: {deeper_line(report.deeper)}")
    splits = ", ".join(f"{split} {count:,}" for split, count in report.splits.items())
    note(f"{src}: {quantity(report.classes, 'class', 'classes')}; {splits}")
    time = "a few seconds" if report.shards_s < _MINUTE_S else f"{report.shards_s / _MINUTE_S:.1f} minutes"
    note(f"{src}: converted to shards it takes about {human_bytes(report.shards_bytes)}, and at least {time}")
    subject = "its picture" if report.pictures == 1 else f"all {report.pictures:,} pictures"
    problems = [f"{src}/{picture.path}: {picture.reason}" for picture in report.rejected]
    if problems:
        counts = f"{len(problems):,} of {quantity(report.pictures, 'picture')} cannot be decoded"
        lacking = sum(kind_without_decoder(picture.reason) is not None for picture in report.rejected)
        but = f", but for {lacking:,} that only a decoder is missing for" if lacking else ""
        problems.append(f"{src}: {counts}; they are listed in {report.list_file}{but}")
    _print_result(problems, f"{src}: {subject} can be decoded")


@click.command(name="inspect", short_help="Show what a dataset holds, also as JSON or a web page.")
@click.argument("dst", type=LOCATION)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--html",
    type=PATH,
    help="Write a web page: pictures, splits, classes, sizes, what was left out.",
)
@click.option(
    "--duplicates",
    type=PATH,
    help="Write a CSV file of the pictures of equal content: group, split, label, path.",
)
@click.option("--all-classes", is_flag=True, help="Show every class, not the first few.")
@debug_option
def inspect_command(
    dst: Location, as_json: bool, html: Path | None, duplicates: Path | None, all_classes: bool
) -> None:
    """Show what the converted dataset in DST holds, as a table, as JSON or as a web page with pictures."""
    from precache.dataset import inspection

    check_output(html)
    check_output(duplicates)
    dataset = precache.open_dataset(dst)
    if duplicates is not None:
        written = inspection.write_duplicates(dataset, duplicates)
        click.echo(printable(f"{duplicates}: {written}"), err=as_json)
    if html is not None:
        inspection.write_html(dataset, html, all_classes=all_classes)
        click.echo(printable(f"{html}: {human_bytes(html.stat().st_size)}"), err=as_json)
    if as_json:
        equal = dataset.find_duplicates()
        counts = {"pictures": len(equal), "in_splits": equal.in_splits, "in_labels": equal.in_labels}
        click.echo(json.dumps({**inspection.summary(dataset.manifest), "duplicates": counts}, indent=1))
    elif html is None and duplicates is None:
        _print_tables(dataset, inspection.facts(dataset), all_classes)


def _print_tables(dataset: ConvertedDataset, facts: dict[str, str], all_classes: bool) -> None:
    """Print samples per class, the first ten unless `all_classes`, then what was left out, then the facts."""
    from rich.table import Table

    manifest, console = dataset.manifest, new_console()
    shown = len(manifest.classes) if all_classes else _FIRST_CLASSES
    classes = Table(box=None)
    classes.add_column("class")
    for split in manifest.samples_per_class:
        classes.add_column(printable(split), justify="right")
    for label, name in enumerate(manifest.classes[:shown]):
        counts = (f"{per_class[label]:,}" for per_class in manifest.samples_per_class.values())
        classes.add_row(printable(name), *counts)
    if manifest.classes:
        console.print(classes)
    if len(manifest.classes) > shown:
        console.print(f"and {len(manifest.classes) - shown:,} more: --all-classes")
    for rejected in manifest.rejected:
        console.print(printable(f"rejected {rejected.path}: {rejected.reason}"))
    for line in ignored_lines(manifest):
        console.print(printable(line))
    console.print()
    table = Table(box=None, show_header=False)
    command = facts.pop("made with")
    for name, value in facts.items():
        table.add_row(name, printable(value))
    console.print(table)
    console.print(printable(f" made with: {command}"), soft_wrap=True)  # on one line, to paste into a shell


def _print_result(problems: Sequence[str], success: str) -> None:
    """Print `success`; or, if there are problems, print them and end with exit code 1."""
    if not _print_problems(problems, success):
        raise click.exceptions.Exit(1)


def _print_problems(problems: Sequence[str], success: str) -> bool:
    """Print the problems, or `success` if there are none, and return whether there are none."""
    for problem in problems:
        click.echo(printable(problem), err=True)
    if not problems:
        click.echo(printable(success))
    return not problems
