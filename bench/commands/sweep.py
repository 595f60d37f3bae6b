"""`bench sweep`: workers and batch sizes, each trial in a process of its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from bench.commands.options import PATH, PLACE, names_of, option, parse_numbers, run_options
from bench.machine.hardware import describe_machine
from bench.measure.candidates import CHOICES as BACKENDS
from bench.measure.candidates import Candidate, choose_candidates, open_candidates
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.sweep import Trials, run
from bench.measure.trainers import EPILOG, resolve
from bench.report import sweep as report
from bench.report.sweep import grid
from bench.report.words import counted, machine_line
from loaders.dataset import RAW, open_split
from loaders.read import choose_backend
from precache.cli import commandline
from precache.cli.commandline import ProgressBar, check_output
from precache.errors import DatasetError, check_range
from precache.page import write as write_page
from precache.reporting import unseen
from precache.storage.urls import Location

_DATA = Path("data")
_WRITTEN = ("trainer", "size", "warmup", "batches", "amp", "compiled", "cache")
"""Settings that a file of trials says: another sweep's trials must not go on after it."""


@click.command(
    name="sweep",
    cls=commandline.Command,
    first=("backend", "trainer", "trainer_rate", "workers", "batch_size", "html_path"),
    short_help="How many workers, which batch size?",
    epilog=EPILOG,
)
@click.argument("data", type=PLACE, nargs=-1)
@click.option("--backend", help=f"Some of: {', '.join(BACKENDS)}.  [default: as DATA needs]")
@run_options(
    *(
        "trainer",
        "trainer_rate",
        "amp",
        "compiled",
        "cache",
        "repeats",
        "size",
        "batches",
        "warmup",
        "device",
    ),
    repeats={"help": "Trials of each setting, taking turns."},
    batches={"help": "Timed batches of each trial."},
)
@click.option("--workers", default="0,1,2,4,8", show_default=True, help="Processes or threads of the loader.")
@option("batch_size", {"default": "32,64,128,256"})
@click.option("--out", type=PATH, default=Path("sweep.jsonl"), show_default=True, help="Finished trials.")
@option("html_path", {"help": "Write a page with charts here."})
@click.option("--quiet", is_flag=True, help="Print nothing but errors; for --out and --html FILE.")
def command(
    data: tuple[Location, ...],
    backend: str | None,
    workers: str,
    batch_size: str,
    out: Path,
    html_path: Path | None,
    quiet: bool,
    settings: Settings,
) -> None:
    """Find the fewest workers and the smallest batch that keep the trainer busy.

    \b
    bench sweep photos --html sweep.html

    DATA are folders, data/raw by default. Every combination of workers and batch sizes is measured, except
    those that cannot help; `bench.report.sweep.prune` has the rules. Each finished trial is a line of --out:
    the same command goes on after those, and other folders add theirs.
    """
    device = settings.device
    settings = replace(settings, trainer=resolve(settings.trainer, device))
    counts, sizes = parse_numbers("--workers", workers), parse_numbers("--batch-size", batch_size)
    for count in counts:
        check_range("workers", count, 0)
    for size in sizes:
        check_range("batch_size", size, 1)
    candidates = _candidates(data, backend)
    for one in candidates:
        check_fills_batch(max(sizes), len(one.data))
    points = grid([(one.backend, str(one.path)) for one in candidates], counts, sizes)
    machine = describe_machine(device)
    written = {**{name: getattr(settings, name) for name in _WRITTEN}, "device": str(device)}
    digests = {str(one.path): one.data.digest for one in candidates}
    check_output(html_path)
    trials = Trials(out, {"machine": machine, "data": digests, "settings": written})
    classes = {str(one.path): len(one.data.classes) for one in candidates}
    if quiet:
        run(points, settings, trials, classes, unseen)
    else:
        with ProgressBar("sweep", "trial") as bar:
            run(points, settings, trials, classes, bar)
    found = trials.found(points)
    if not found.measured:
        failed = {trials.failed[point] for point in points if point in trials.failed}
        raise DatasetError(f"nothing measured: {'; '.join(sorted(failed))}")
    warm = all(trial["page_cache_warm"] for point in found.measured for trial in trials.of[point].values())
    compiled = ", compiled" if settings.compiled else ""
    conditions = (
        f"{machine_line(machine, ('torch',))}; trainer {settings.trainer}{compiled}; "
        f"{settings.size}x{settings.size}, cache {settings.cache}, page cache "
        f"{'warm' if warm else 'not warmed: larger than memory'}; median of "
        f"{counted(settings.repeats, 'trial')} of {settings.batches} batches, taking turns; trials: {out}"
    )
    if not quiet:
        report.show(found, conditions)
    if html_path is not None:
        write_page(html_path, report.html(found, conditions))
        if not quiet:
            click.echo(f"wrote {html_path}")


def _candidates(data: Sequence[Location], backend: str | None) -> list[Candidate]:
    """What to measure; without a choice, each folder by the backend that is made for it."""
    if backend is not None:
        chosen = choose_candidates(data, names_of(backend), _DATA)
    else:
        folders = {path: open_split(path, "train") for path in data or (_DATA / RAW,)}
        chosen = [
            Candidate(choose_backend("auto", split.kind, path), path, split)
            for path, split in folders.items()
        ]
    opened, failed = open_candidates(chosen)
    if failed:
        raise DatasetError("; ".join(dict.fromkeys(failed.values())))
    return opened
