"""Data-parallel ranks of this machine: torchrun starts them, each measures, and what they measured together.

torchrun runs `python -m bench.measure.ranks FOLDER` as often as there are ranks; the settings lie pickled in
FOLDER/settings. Rank 0 prints `done N of M` after each run; each rank writes what it measured, or
{"error": message}, to FOLDER/<rank>.json.
"""

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.measure import trial
from bench.measure.fresh import in_one_line
from bench.measure.settings import Settings
from bench.measure.trainers import ModelTrainer, Trainer
from bench.report import stats
from bench.report.stats import NEGLIGIBLE_SHARE, Estimate
from loaders.batch import Batch
from precache.engines import available_cpus
from precache.errors import PrecacheError, WorkerError
from precache.imports import child_environment
from precache.reporting import Progress, unseen
from precache.storage.staging import temporary_folder

ONE, OWN, TOGETHER, DATA_WAIT = "one", "own", "together", "data_wait"
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
    """From what each rank measured, see `measure_rank`. Pure."""
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


def launch(settings: Settings, ranks: int, on_progress: Progress = unseen) -> list[dict[str, list[float]]]:
    """Start so many ranks, on the GPU of their number where the device is one; what each measured.

    Raises:
        PrecacheError: what a rank could not go on with.
        WorkerError: a rank died.
    """
    with temporary_folder() as folder, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--log-dir", str(folder / "logs")]  # else it leaves a folder in TMPDIR
        command += ["--nproc-per-node", str(ranks), "-m", "bench.measure.ranks"]
        (folder / "settings").write_bytes(pickle.dumps(settings))
        process = subprocess.Popen(
            [*command, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**child_environment(), "OMP_NUM_THREADS": str(max(1, available_cpus() // ranks))},
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if done := re.fullmatch(r"done (\d+) of (\d+)\n", line):
                    on_progress(int(done[1]), int(done[2]))
            process.wait()
        finally:
            process.terminate()  # a SIGKILL would leave its ranks behind
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
            process.wait()
        files = [folder / f"{rank}.json" for rank in range(ranks)]
        answers: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files if file.exists()]
        for answer in answers:
            if "error" in answer:
                raise PrecacheError(answer["error"])
        if process.returncode != 0 or len(answers) < ranks:
            errors.seek(0)
            raise WorkerError(f"{ranks} ranks: {cause(errors.read())}")
        return answers


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


class InStep:
    """A trainer whose ranks wait for one another after each batch, as those do that average gradients."""

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self.name = trainer.name
        self.dtype = trainer.dtype
        self._trainer = trainer
        self._gradient = torch.zeros(1, device=device)

    def step(self, batch: Batch) -> None:
        """Train, then meet."""
        self._trainer.step(batch)
        dist.all_reduce(self._gradient)


def measure_rank(settings: Settings) -> dict[str, list[float]]:
    """Images/s of this rank, run by run, by kind:

    one: rank 0 alone, without a share: all samples and, unless `workers` says other, all CPUs;
    own: all ranks at the same time, each at its own pace;
    together: all ranks in step;

    and data_wait: the share of its time, 0 to 1, that this rank waits for a batch in the runs in step.
    """
    rank = dist.get_rank()
    shared = replace(settings, last="pad")  # as torch's DistributedSampler: as many batches, all of them full
    one = replace(shared, rank=0, world_size=1, workers=settings.workers_alone)
    trainer = settings.make_trainer()
    in_step = trainer.distributed() if isinstance(trainer, ModelTrainer) else InStep(trainer, settings.device)
    rates: dict[str, list[float]] = {ONE: [], OWN: [], TOGETHER: []}
    waits: list[float] = []
    for _ in range(settings.repeats):
        for kind, found in rates.items():
            alone = kind == ONE
            torch.set_num_threads(max(1, available_cpus() // (1 if alone else dist.get_world_size())))
            if rank == 0 or not alone:
                fed = in_step if kind == TOGETHER else trainer
                run = trial.measure(one if alone else shared, fed)
                found.append(run.images_per_s)
                if kind == TOGETHER:
                    waits.append(run.wait_share)
            dist.all_reduce(torch.zeros(1))  # on the CPU: no GPU is kept busy with waiting
            if rank == 0:
                done = sum(map(len, rates.values()))
                print(f"done {done} of {len(rates) * settings.repeats}", flush=True)
    return {**rates, DATA_WAIT: waits}


def main() -> None:
    """Join the other ranks, measure, write the answer."""
    folder = Path(sys.argv[1])
    settings: Settings = pickle.loads((folder / "settings").read_bytes())
    on_gpu = settings.device.type == "cuda"
    if on_gpu:
        settings = replace(settings, device=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        torch.cuda.set_device(settings.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    file = folder / f"{dist.get_rank()}.json"
    try:
        with in_one_line(settings.batch_size, settings.size):
            file.write_text(json.dumps(measure_rank(settings)), encoding="utf-8")
    except PrecacheError as error:
        file.write_text(json.dumps({"error": str(error)}), encoding="utf-8")
        sys.exit(1)  # torchrun ends the ranks that wait for this one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
