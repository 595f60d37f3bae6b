"""`bench sweep`: workers, batch sizes, amp and pinning, each trial in a process of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from bench.commands.options import PATH, PLACE, option, parse_amp, parse_numbers, parse_switches, run_options
from bench.machine import page_cache
from bench.machine.hardware import accelerator_of, describe_machine
from bench.machine.others import OtherProcesses
from bench.measure import sweep_trial
from bench.measure.candidates import CHOICES as BACKENDS
from bench.measure.candidates import Candidate, choose_candidates, folder_of, open_candidates
from bench.measure.equal_work import find_facts
from bench.measure.fresh import DoesNotFit, run_fresh
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.sweep_trial import at_point
from bench.measure.trainers import EPILOG, MODELS, resolve
from bench.report import sweep_page as page
from bench.report.grid import (
    Axes,
    Point,
    drop_axes,
    grid,
    prune,
)
from bench.report.sweep_file import SweepFile
from bench.report.sweep_table import LEGEND, tables
from bench.report.words import counted
from loaders.dataset import RAW
from precache.console import commandline
from precache.console.commandline import ProgressBar, check_output
from precache.console.progress import Progress, unseen
from precache.console.tables import new_console
from precache.errors import DatasetError, check_choice
from precache.storage.urls import Location, locate

_DATA = Path("data")
_WIDTH = 100


@click.command(name="sweep", cls=commandline.Command, epilog=EPILOG)
@click.argument("data", type=PLACE, nargs=-1)
@click.option("--backend", help=f"Some of: {', '.join(BACKENDS)}.  [default: as DATA needs]")
@run_options(
    *("trainer", "trainer_rate", "compiled", "cache", "repeats", "size", "batches", "warmup", "device"),
    repeats={"help": "Trials of each setting, taking turns."},
    batches={"help": "Timed batches of each trial."},
)
@click.option("--workers", default="0,1,2,4,8", show_default=True, help="Processes or threads of the loader.")
@option("batch_size", {"default": "32,64,128,256"})
@option("amp", {"default": "auto,off"})
@click.option("--pin", default="on,off", show_default=True, help="Copies from pinned memory (CUDA).")
@click.option("--out", type=PATH, default=Path("sweep.jsonl"), show_default=True, help="Finished trials.")
@option("html_path", {"help": "Write a page with charts here."})
@click.option("--quiet", is_flag=True, help="Print nothing but errors; for --out and --html FILE.")
def command(
    data: tuple[Location, ...],
    backend: str | None,
    workers: str,
    batch_size: str,
    amp: str,
    pin: str,
    out: Path,
    html_path: Path | None,
    quiet: bool,
    settings: Settings,
) -> None:
    """Find the fewest workers and the smallest batch that keep the trainer busy.

    DATA are folders, data/raw by default. Every combination of the settings is measured, except those that
    cannot help; `bench.report.grid.prune` has the rules. Each finished trial is a line of --out: the same
    command goes on after those, and other folders add theirs. --amp is left out for a trainer that does not
    compute, and --pin without CUDA: they change nothing there.
    """
    device = settings.device
    settings = replace(settings, trainers=(resolve(settings.trainer, device),))
    axes = _axes(device, workers, batch_size, amp, pin)
    axes, notes = drop_axes(axes, device.type, computes=settings.trainer in MODELS, cache=settings.cache)
    for note in () if quiet else notes:
        click.echo(note)
    arms = _arms(data, backend)
    for arm in arms:
        check_fills_batch(max(axes.batch_sizes), len(arm.data.ids))
        arm.data.served_size(settings.size)
    points = grid([(arm.backend, str(arm.path)) for arm in arms], axes)
    header = {
        "machine": describe_machine(device),
        "data": {str(arm.path): arm.data.digest for arm in arms},
        "settings": _written(settings),
    }
    classes = {str(arm.path): len(arm.data.classes) for arm in arms}
    check_output(html_path)
    file = SweepFile(out, header)
    if quiet:
        run(points, settings, file, classes)
    else:
        with ProgressBar("sweep", "trial") as bar:
            run(points, settings, file, classes, bar)
    if not any(point in file.trials for point in points):
        failed = {file.failed[point] for point in points if point in file.failed}
        raise DatasetError(f"nothing measured: {'; '.join(sorted(failed))}")
    conditions = _conditions(settings, file, points)
    if not quiet:
        _show(points, file, conditions)
    if html_path is not None:
        html_path.parent.mkdir(parents=True, exist_ok=True)
        html_path.write_text(page.html(points, file, conditions), encoding="utf-8")
        if not quiet:
            click.echo(f"wrote {html_path}")


def run(
    points: Sequence[Point],
    settings: Settings,
    file: SweepFile,
    classes: Mapping[str, int],
    on_progress: Progress = unseen,
) -> None:
    """Measure what `file` lacks of `points`, all of them once, then again; prune in the first round.

    Args:
        classes: how many the data of each folder has.

    Raises:
        PrecacheError: a loader cannot be built, which is found out before anything is measured, or a
            trial failed otherwise than for want of memory.
    """
    left_out = {**file.pruned, **file.failed}
    missing = [
        (repeat, point)
        for repeat in range(settings.repeats)
        for point in points
        if point not in left_out and repeat not in file.trials.get(point, {})
    ]
    for point in {(point.backend, point.data): point for _, point in reversed(missing)}.values():
        # raises what its trials would, before hours are spent on others
        probe = replace(point, batch_size=1, workers=0)
        run_fresh(find_facts, at_point(settings, probe, classes[point.data]))
    total = len(points) * settings.repeats
    on_progress(total - len(missing), total)
    for number, (repeat, point) in enumerate(missing, 1):
        if point not in file.pruned and point not in file.failed:
            _measure(point, repeat, settings, file, classes)
        on_progress(total - len(missing) + number, total)


def _measure(
    point: Point, repeat: int, settings: Settings, file: SweepFile, classes: Mapping[str, int]
) -> None:
    # once begun, a point gets all its trials: else chance would choose which have few
    reason = None if point in file.trials else prune(point, file.measured(), file.failed)
    if reason is not None:
        file.add(point, pruned=reason)
        return
    warm = page_cache.warm(folder_of(locate(point.data)))
    others = OtherProcesses()
    try:
        trial = sweep_trial.run(at_point(settings, point, classes[point.data]))
    except DoesNotFit:
        file.add(point, failed=f"batch {point.batch_size:,} does not fit into memory")
    else:
        file.add(point, repeat=repeat, trial={**trial, "page_cache_warm": warm, "other_cpu": others.share()})


def _written(settings: Settings) -> dict[str, Any]:
    """What the header of a sweep says of its settings: another sweep's trials must not go on after it."""
    names = ("size", "warmup", "batches", "compiled", "cache")
    own = {name: getattr(settings, name) for name in names}
    return {"trainer": settings.trainer, "device": str(settings.device), **own}


def _axes(device: torch.device, workers: str, batch_size: str, amp: str, pin: str) -> Axes:
    """From the options of these names."""
    return Axes(
        parse_numbers("--workers", workers),
        parse_numbers("--batch-size", batch_size),
        parse_amp(amp, device),
        parse_switches("--pin", pin),
    )


def _arms(data: Sequence[Location], backend: str | None) -> list[Candidate]:
    """What to measure; without a choice, each folder by the backend that is made for it."""
    if backend is not None:
        names = [name.strip() for name in backend.split(",")]
        for name in names:
            check_choice("backend", name, BACKENDS)
        return _opened(choose_candidates(data, names, _DATA))
    found = _opened([Candidate("", path) for path in data or (_DATA / RAW,)])
    return [
        replace(arm, backend="pytorch" if arm.data.kind == RAW else arm.data.kind)
        for arm in dict.fromkeys(found)
    ]


def _opened(arms: Sequence[Candidate]) -> list[Candidate]:
    """All of them, or an error."""
    opened, failed = open_candidates(arms)
    if failed:
        raise DatasetError("; ".join(dict.fromkeys(failed.values())))
    return opened


def _conditions(settings: Settings, file: SweepFile, points: Sequence[Point]) -> str:
    machine = describe_machine(settings.device)
    trials = [trial for point in points for trial in file.trials.get(point, {}).values()]
    warm = all(trial["page_cache_warm"] for trial in trials)
    return (
        f"{machine['cpu']}, {machine['memory']}, accelerator: {accelerator_of(machine)}; torch "
        f"{machine['torch']}; trainer {settings.trainer}{', compiled' if settings.compiled else ''}; "
        f"{settings.size}x{settings.size}, cache {settings.cache}, page cache "
        f"{'warm' if warm else 'not warmed: larger than memory'}; median of "
        f"{counted(settings.repeats, 'trial')} of {settings.batches} batches, taking turns; "
        f"{machine['date']}; trials: {file.path}"
    )


def _show(points: Sequence[Point], file: SweepFile, conditions: str) -> None:
    for line in page.answer(points, file):
        click.echo(line)
    click.echo()
    console = new_console(width=_WIDTH)
    for table in tables(points, file):
        console.print(table)
        console.print()
    click.echo(f"{LEGEND}.")
    click.echo(f"{conditions}.")
