"""Command `bench loaders`: compares loaders, alone and feeding a trainer, by workers, batch size or ranks."""

from dataclasses import replace
from pathlib import Path

import click

from bench.commands.options import parse_numbers, price_option, run_options, split_names
from bench.commands.output import Output, output_options
from bench.measure.candidates import CHOICES as BACKENDS
from bench.measure.candidates import choose_candidates
from bench.measure.comparison import Comparison, compare
from bench.measure.settings import Settings
from bench.measure.trainers import EPILOG
from precache.cli.commandline import LOCATION, PATH, debug_option
from precache.engines import available_cpus
from precache.errors import check_range
from precache.storage.urls import Location

DATA = Path("data")


@click.command(
    name="loaders",
    short_help="Does the GPU wait, and with which loader, workers and batch size?",
    epilog=EPILOG,
)
@click.argument("data", type=LOCATION, nargs=-1)
@click.option(
    "--backend",
    default="all",
    show_default=True,
    help=f"Loaders to compare: all, or some of {', '.join(BACKENDS)}.",
)
@click.option("--batch-size", default="64", show_default=True, help="Samples per batch; several as in 32,64.")
@click.option(
    "--workers",
    help="Processes or threads of each loader; several as in 0,1,2,4.  [default: one per CPU]",
)
@run_options(
    *("trainer", "trainer_rate", "launches", "size", "augment", "cold", "repeats", "batches"),
    *("warmup", "device", "amp", "compiled", "cache", "shuffle"),
    repeats={"default": 5},
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Train on so many processes at once, in step, as DistributedDataParallel does.",
)
@click.option(
    "--profile",
    "profile_path",
    type=PATH,
    metavar="FOLDER",
    help="Profile ten steps of one loader instead; write the trace into FOLDER.",
)
@price_option
@output_options
@debug_option
def command(
    data: tuple[Location, ...],
    backend: str,
    batch_size: str,
    workers: str | None,
    settings: Settings,
    ranks: int | None,
    profile_path: Path | None,
    gpu_price: float | None,
    output: Output,
) -> None:
    """Compare loaders over the folders DATA (default: data/raw, data/shards, ...): does the GPU wait?

    \b
    bench loaders photos --backend imagefolder,pytorch
    bench loaders photos data/shards --augment train --html report.html
    bench loaders photos --workers 0,1,2,4 --batch-size 32,64,128
    bench loaders data/shards --ranks 2

    It measures images/s of each loader alone, of the trainer alone on a batch that stays on the device,
    and of both together, each time in a process of its own, and says what the bottleneck is and what
    would fix it. Several --workers or --batch-size: each combination is a row, and the answer names the
    fewest workers and the smallest batch that keep the trainer busy. Runs are kept in --json FILE: the
    same command goes on where it was stopped."""
    batch_sizes = parse_numbers("--batch-size", batch_size)
    counts = parse_numbers("--workers", workers) if workers is not None else (available_cpus(),)
    for size in batch_sizes:
        check_range("batch_size", size, 1)
    for count in counts:
        check_range("workers", count, 0)
    candidates = choose_candidates(data, split_names(backend) or [backend], DATA)
    if profile_path is not None:
        from bench.measure.profile import profile

        profile(candidates, settings, counts[0], batch_sizes[0], profile_path)
        return
    with output.progress("bench", "run") as on_progress:
        if ranks is not None:
            from bench.measure.ranks import compare_ranks

            result = compare_ranks(
                candidates,
                replace(settings, batch_size=batch_sizes[0], workers=None if workers is None else counts[0]),
                ranks,
                output.json_path,
                on_progress,
            )
        else:
            comparison = Comparison(
                candidates=candidates,
                settings=settings,
                workers=counts,
                batch_sizes=batch_sizes,
            )
            result = compare(comparison, output.json_path, on_progress, gpu_price)
    output.finish(result)
