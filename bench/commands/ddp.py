"""`bench ddp`: a data-parallel training step fed on several ranks of this machine."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table

from bench.commands.options import PLACE, option, run_options
from bench.machine import page_cache
from bench.machine.hardware import accelerator_of, describe_machine
from bench.measure.candidates import choose_candidates, folder_of
from bench.measure.ddp_rank import DATA_WAIT, ONE, OWN, TOGETHER, Job
from bench.measure.fresh import environment
from bench.measure.settings import Settings
from bench.measure.trainers import EPILOG, resolve
from bench.report import stats
from bench.report.stats import Estimate
from bench.report.verdict import NEGLIGIBLE_SHARE
from bench.report.words import counted
from loaders import BACKENDS
from loaders.dataset import open_split
from precache.console import commandline
from precache.console.commandline import STDOUT, ProgressBar, check_output, write_json
from precache.console.progress import Progress, unseen
from precache.console.tables import new_console
from precache.errors import PrecacheError, SettingError, WorkerError, check_choice, check_range
from precache.executors import available_cpus
from precache.storage.urls import Location

_WIDTH = 100
_GRACE_S = 40  # torchrun gives its ranks 30 s to end


@dataclass(frozen=True, slots=True)
class Summary:
    """What the ranks measured; images/s, where it says nothing else.

    Attributes:
        one: of one rank alone.
        own: of each rank, at the same time as the others and at its own pace.
        together: of each rank, in step with the others.
        data_wait: the share of its time, 0 to 1, that each rank waits for a batch, in step.
        total: of all ranks in step.
        ratio: total over one, repeat by repeat.
        slowest: the rank of the lowest own pace.
        distinct: whether that is below every other rank's in every repeat, and 2% below the fastest.
    """

    one: Estimate
    own: tuple[Estimate, ...]
    together: tuple[Estimate, ...]
    data_wait: tuple[Estimate, ...]
    total: Estimate
    ratio: Estimate
    slowest: int
    distinct: bool


def summarise(ranks: Sequence[dict[str, list[float]]]) -> Summary:
    """From the rates and waits of each rank, see `bench.measure.ddp_rank.measure`. Pure."""
    totals = [sum(rates) for rates in zip(*(rank[TOGETHER] for rank in ranks), strict=True)]
    own = tuple(stats.estimate(rank[OWN]) for rank in ranks)
    slowest = min(range(len(own)), key=lambda rank: own[rank].median)
    return Summary(
        one=stats.estimate(ranks[0][ONE]),
        own=own,
        together=tuple(stats.estimate(rank[TOGETHER]) for rank in ranks),
        data_wait=tuple(stats.estimate(rank[DATA_WAIT]) for rank in ranks),
        total=stats.estimate(totals),
        ratio=stats.ratio(totals, ranks[0][ONE]),
        slowest=slowest,
        distinct=own[slowest].median <= (1 - NEGLIGIBLE_SHARE) * max(rate.median for rate in own)
        and all(own[slowest].high < rate.low for rank, rate in enumerate(own) if rank != slowest),
    )


def sentences(summary: Summary) -> list[str]:
    """What the summary says."""
    count = len(summary.own)
    lines = [
        f"Together: {summary.total.median:,.0f} images/s, {summary.ratio.median:.2f} times one rank alone "
        f"({summary.one.median:,.0f}); from {summary.ratio.low:.2f} to {summary.ratio.high:.2f}."
    ]
    if count > 1:
        slow, fast = summary.own[summary.slowest], max(summary.own, key=lambda rate: rate.median)
        lines += [
            f"The slowest is rank {summary.slowest}: at its own pace {slow.median:,.0f} images/s, "
            f"the fastest {fast.median:,.0f}"
            f"{'' if summary.distinct else '; that is within noise'}."
        ]
    return lines


def launch(
    job: Job,
    ranks: int,
    on_progress: Progress = unseen,
) -> list[dict[str, list[float]]]:
    """Start `ranks` processes by torchrun and give what each measured, by rank.

    Raises:
        PrecacheError: what a rank could not go on with.
        WorkerError: a rank died.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        asked = json.dumps({"job": job.to_json(), "out": folder})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "bench.measure.ddp_rank", asked]
        threads = str(max(1, available_cpus() // ranks))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environment(), "OMP_NUM_THREADS": threads},
        )
        try:
            _follow(process, on_progress)
        finally:
            _end(process)
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        answers: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files if file.exists()]
        for answer in answers:
            if "error" in answer:
                raise PrecacheError(answer["error"])
        if process.returncode != 0 or len(answers) < ranks:
            errors.seek(0)
            raise WorkerError(f"{ranks} ranks: {cause(errors.read())}")
        return answers


def _follow(process: "subprocess.Popen[str]", on_progress: Progress) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"done"'):
            report = json.loads(line)
            on_progress(report["done"], report["total"])
    process.wait()


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()  # a SIGKILL would leave its ranks behind
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    process.kill()
    process.wait()


def cause(errors: str) -> str:
    """The first failure in what torchrun and the ranks wrote on stderr. Pure."""
    _, _, first = errors.partition("Root Cause")
    rank = re.search(r"^\s*rank\s*: (\d+)", first, re.MULTILINE)
    code = re.search(r"^\s*exitcode\s*: (-?\d+)", first, re.MULTILINE)
    if rank is None or code is None:
        return "torchrun could not start them"
    raised = re.findall(rf"^\[rank{rank[1]}\]: (\w[\w.]*(?:Error|Exception): .*)$", errors, re.MULTILINE)
    why = f" ({raised[-1]})" if raised else ""
    return f"rank {rank[1]} ended with exit code {code[1]}{why}; try fewer ranks or a smaller batch"


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
    settings = replace(settings, trainers=(resolve(settings.trainer, device),), workers=workers)
    # before the ranks are started, which takes seconds
    opened = (
        open_split(data, "train")
        if backend == "auto"
        else choose_candidates([data], [backend], Path())[0].data
    )
    opened.served_size(settings.size)
    warm = page_cache.warm(folder_of(data))
    job = Job(data=data, backend=backend, classes=len(opened.classes), settings=settings)
    with ProgressBar("ddp", "run") as bar:
        summary = summarise(launch(job, ranks, bar))
    result = {
        "machine": describe_machine(device),
        "settings": {**_written(job), "ranks": ranks, "page_cache_warm": warm},
        **asdict(summary),
    }
    if json_path != STDOUT:
        _print(summary, result)
    if json_path is not None:
        write_json(json_path, result)


def _written(job: Job) -> dict[str, Any]:
    """What a result says of its settings."""
    numbers = ("batch_size", "workers", "size", "warmup", "batches", "repeats")
    return {
        "data": str(job.data),
        "backend": job.backend,
        "trainer": job.settings.trainer,
        **{name: getattr(job.settings, name) for name in numbers},
        "device": job.settings.device.type,
        "amp": job.settings.amp,
    }


def rank_table(summary: Summary) -> Table:
    """A rich table of a row per rank."""
    table = Table(box=None, pad_edge=False)
    for title in ("rank", "own pace", "in step", "waits for data", "waits for others"):
        table.add_column(title, justify="right", no_wrap=True)
    measured = zip(summary.own, summary.together, summary.data_wait, strict=True)
    for rank, (own, together, data_wait) in enumerate(measured):
        waits = max(0.0, 1 - together.median / own.median)
        rates = f"{own.median:,.0f}", f"{together.median:,.0f}"
        table.add_row(str(rank), *rates, f"{data_wait.median:.0%}", f"{waits:.0%}")
    return table


def _print(summary: Summary, result: dict[str, Any]) -> None:
    console = new_console(width=_WIDTH)
    for line in sentences(summary):
        console.print(line)
    console.print()
    console.print(rank_table(summary))
    console.print()
    machine, settings = result["machine"], result["settings"]
    workers = "CPUs shared out" if settings["workers"] is None else f"{settings['workers']} each"
    cache = "warm" if settings["page_cache_warm"] else "not warmed: larger than memory"
    console.print(
        f"images/s; {machine['cpu']}, {machine['memory']}, accelerator: {accelerator_of(machine)}; trainer "
        f"{settings['trainer']}; batch {settings['batch_size']} of {settings['size']}x{settings['size']} "
        f"a rank, workers: {workers}, page cache {cache}; median of "
        f"{counted(settings['repeats'], 'run')} of {settings['batches']} batches, taking turns; "
        f"{machine['date']}"
    )
