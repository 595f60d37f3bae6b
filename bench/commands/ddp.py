"""`bench ddp`: a data-parallel training step fed on several ranks of this machine."""

from dataclasses import asdict
from pathlib import Path

import click
import torch

from bench.commands.options import PLACE, option, run_options
from bench.machine import page_cache
from bench.machine.hardware import describe_machine
from bench.measure.candidates import folder_of, open_for
from bench.measure.ranks import Summary, launch, summarise
from bench.measure.settings import Settings
from bench.measure.trainers import EPILOG, resolve
from bench.report.words import Table, counted, machine_line, say
from loaders import BACKENDS
from precache.cli import commandline
from precache.cli.commandline import STDOUT, ProgressBar, check_output, write_json
from precache.errors import SettingError, check_choice, check_range
from precache.storage.urls import Location

_SETTINGS = ("backend", "trainer", "batch_size", "workers", "size", "warmup", "batches", "repeats", "amp")
"""What a result says of them."""


@click.command(name="ddp", cls=commandline.Command, epilog=EPILOG)
@click.argument("data", type=PLACE, default=Path("data/raw"))
@click.option("--ranks", default=2, show_default=True, help="Processes; with CUDA each takes a GPU.")
@click.option("--backend", default="auto", show_default=True, help=f"auto, {', '.join(sorted(BACKENDS))}.")
@run_options(
    *("trainer", "trainer_rate", "batch_size", "device", "repeats", "size", "batches", "warmup", "amp"),
    batch_size={"help": "Samples per batch of a rank."},
)
@option("workers", {"help": "Of each rank's loader.  [default: the CPUs, shared out]"})
@option("json_path")
def command(
    data: Location,
    ranks: int,
    backend: str,
    workers: int | None,
    json_path: Path | None,
    settings: Settings,
) -> None:
    """Measure training on several ranks of this machine: is the loader fast enough for all of them?

    Each rank gets its share of DATA, data/raw by default. torchrun starts the ranks (gloo on a CPU, NCCL on
    GPUs). First one rank runs alone, then each at its own pace, then all in step: models by
    DistributedDataParallel, the other trainers by an all-reduce.
    """
    check_range("ranks", ranks, 1)
    check_choice("backend", backend, ["auto", *BACKENDS])
    device = settings.device
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise SettingError(
            f"ranks {ranks} is more than the {torch.cuda.device_count()} GPUs; use --device cpu"
        )
    check_output(json_path)
    opened = open_for(backend, data)  # before the ranks are started, which takes seconds
    warm = page_cache.warm(folder_of(data))
    told = settings.of(
        backend, data, len(opened.classes), trainer=resolve(settings.trainer, device), workers=workers
    )
    with ProgressBar("ddp", "run") as bar:
        summary = summarise(launch(told, ranks, bar))
    machine = describe_machine(device)
    if json_path != STDOUT:
        _show(summary, told, machine, warm=warm)
    if json_path is not None:
        written = {name: getattr(told, name) for name in _SETTINGS}
        written |= {"data": str(data), "device": device.type, "ranks": ranks, "page_cache_warm": warm}
        write_json(json_path, {"machine": machine, "settings": written, **asdict(summary)})


def sentences(summary: Summary) -> list[str]:
    """What the summary says."""
    ratio, own = summary.ratio, [rate.median for rate in summary.own]
    together = (
        f"Together: {summary.total.median:,.0f} images/s, {ratio.median:.2f} times one rank alone "
        f"({summary.one.median:,.0f}); from {ratio.low:.2f} to {ratio.high:.2f}."
    )
    slowest = (
        f"The slowest is rank {summary.slowest}: at its own pace {own[summary.slowest]:,.0f} images/s, "
        f"the fastest {max(own):,.0f}{'' if summary.distinct else '; that is within noise'}."
    )
    return [together, slowest] if len(own) > 1 else [together]


def rank_table(summary: Summary) -> Table:
    """A row per rank."""
    measured = zip(summary.own, summary.together, summary.data_wait, strict=True)
    rows = [
        (
            str(rank),
            f"{own.median:,.0f}",
            f"{together.median:,.0f}",
            f"{data_wait.median:.0%}",
            f"{max(0.0, 1 - together.median / own.median):.0%}",
        )
        for rank, (own, together, data_wait) in enumerate(measured)
    ]
    return Table(("rank", "own pace", "in step", "waits for data", "waits for others"), rows)


def _show(summary: Summary, settings: Settings, machine: dict[str, str], *, warm: bool) -> None:
    for line in sentences(summary):
        say(line)
    click.echo()
    rank_table(summary).show()
    click.echo()
    workers = "CPUs shared out" if settings.workers is None else f"{settings.workers} each"
    cache = "warm" if warm else "not warmed: larger than memory"
    say(
        f"images/s; {machine_line(machine)}; trainer {settings.trainer}; batch {settings.batch_size} of "
        f"{settings.size}x{settings.size} a rank, workers: {workers}, page cache {cache}; median of "
        f"{counted(settings.repeats, 'run')} of {settings.batches} batches, taking turns."
    )
