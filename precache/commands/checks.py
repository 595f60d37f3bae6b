"""`precache verify` and `precache check`."""

from collections.abc import Sequence
from pathlib import Path

import click

import precache
from precache.console.commandline import Command, Place, ProgressBar, human_bytes, printable
from precache.console.notices import counted
from precache.dataset.converted import open_unchecked
from precache.errors import SettingError, shell_command
from precache.manifest import MANIFEST_NAME
from precache.pictures.reading import MAX_PIXELS
from precache.storage.urls import Location


@click.command(name="verify", cls=Command)
@click.argument("dst", type=Place())
@click.argument("others", metavar="[SRC | DST ...]", type=Place(), nargs=-1)
@click.option("--deep", is_flag=True, help="Decode the pictures of SRC again and compare each.")
@click.option("--across", is_flag=True, help="Compare ids, labels and splits of several folders DST.")
@click.option("--root", help="Table SRC: where its pictures lie now.  [default: as when converted]")
@click.option("--workers", type=int, help="Worker processes of --deep.  [default: one per CPU]")
def verify_command(
    dst: Location,
    others: tuple[Location, ...],
    deep: bool,
    across: bool,
    root: str | None,
    workers: int | None,
) -> None:
    """Compare every file of the dataset in DST with its manifest's checksums."""
    if deep and across:
        raise SettingError("--deep and --across cannot be combined; run verify once with each")
    if (deep and len(others) != 1) or (across and not others) or (others and not (deep or across)):
        raise SettingError("verify takes DST; with --deep, DST and SRC; with --across, two folders or more")
    if across:
        same = (
            f"{dst}: {counted(len(others), 'other dataset')} hold{'s' * (len(others) == 1)} the same samples"
        )
        _finish_check(precache.verify_across([dst, *others]), same)
        return
    manifest = open_unchecked(dst)[0].manifest  # if it was edited, `verify` says so
    size = human_bytes(manifest.stored_bytes)
    problems = precache.verify(dst)
    command = shell_command("precache convert", others[0] if deep else "SRC", dst)
    remedy = f"with: {command} {manifest.to_flags()} --overwrite"
    if problems:
        if any(problem.startswith(f"{dst / MANIFEST_NAME}: ") for problem in problems):
            # its settings are not to be trusted
            remedy = f"with the options that it was made with: {command} --overwrite"
        are = "is" if len(problems) == 1 else "are"
        problems.append(f"{dst}: {counted(len(problems), 'file')} {are} damaged; rewrite it {remedy}")
    _finish_check(
        problems, f"{dst}: {counted(len(manifest.shards), 'shard')}, {size}: every byte is as written"
    )
    if deep:
        with ProgressBar("verify", "image") as bar:
            report = precache.verify_deep(dst, others[0], root=root, workers=workers, on_progress=bar)
        sentence = f"{dst}: {report.sentence(others[0])}"
        _finish_check(report.problems and [*report.problems, f"{sentence}; rewrite it {remedy}"], sentence)


@click.command(name="check", cls=Command)
@click.argument("src", type=Place(), default=Path("data/raw"))
@click.option(
    "--list",
    "list_file",
    type=click.Path(path_type=Path),
    help="Write the list here.  [default: SRC.rejected.csv]",
)
@click.option(
    "--max-pixels", default=MAX_PIXELS, show_default=True, help="Reject pictures with more pixels than this."
)
@click.option("--workers", type=int, help="Worker processes; 0: work in this one.  [default: one per CPU]")
def check_command(src: Location, list_file: Path | None, max_pixels: int, workers: int | None) -> None:
    """Decode every picture of the tree SRC (default data/raw), and list the damaged ones.

    Loaders built with on_error="skip" leave out the pictures in the default list.
    """
    with ProgressBar("check", "image") as bar:
        report = precache.check(
            src, list_file=list_file, max_pixels=max_pixels, workers=workers, on_progress=bar
        )
    every = "its picture" if report.pictures == 1 else f"all {report.pictures:,} pictures"
    problems = [f"{src}/{bad.path}: {bad.reason}" for bad in report.rejected]
    if problems:
        counts = f"{len(problems):,} of {counted(report.pictures, 'picture')} cannot be decoded"
        problems.append(f"{src}: {counts}; they are listed in {report.list_file}")
    _finish_check(problems, f"{src}: {every} can be decoded")


def _finish_check(problems: Sequence[str], all_well: str) -> None:
    """Print `all_well`, or the problems and end with exit code 1."""
    for problem in problems:
        click.echo(printable(problem), err=True)
    if problems:
        raise click.exceptions.Exit(1)
    click.echo(printable(all_well))
