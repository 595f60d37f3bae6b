"""One rank of `bench ddp`: torchrun runs `python -m bench.measure.ddp_rank JSON` as often as there are ranks.

Rank 0 prints a line of JSON, {"done": n, "total": m}, after each run; each rank writes what it measured,
or {"error": message}, to the file `<rank>.json` in the folder that the settings name.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.measure import run as trials
from bench.measure.fresh import in_one_line
from bench.measure.settings import Settings
from bench.measure.trainers import ModelTrainer, Trainer
from loaders.batch import Batch
from precache.errors import PrecacheError
from precache.executors import available_cpus
from precache.storage.urls import Location, locate

ONE, OWN, TOGETHER = "one", "own", "together"
DATA_WAIT = "data_wait"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all ranks are told.

    Attributes:
        data, backend: of the loader.
        classes: of the data.
        settings: of one trainer; rank n takes GPU n where its device is one.
    """

    data: Location
    backend: str
    classes: int
    settings: Settings

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        settings = {**asdict(self.settings), "device": self.settings.device.type}
        return {**asdict(self), "data": str(self.data), "settings": settings}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "Job":
        """From what `to_json` gave."""
        given = told["settings"]
        chosen = {"device": torch.device(given["device"]), "trainers": tuple(given["trainers"])}
        settings = Settings(**{**given, **chosen})
        return cls(
            data=locate(told["data"]), backend=told["backend"], classes=told["classes"], settings=settings
        )


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


def measure(job: Job, device: torch.device) -> dict[str, list[float]]:
    """Images/s of this rank, run by run, by kind:

    one: rank 0 alone, without a share: all samples and, unless `workers` says other, all CPUs;
    own: all ranks at the same time, each at its own pace;
    together: all ranks in step;

    and data_wait: the share of its time, 0 to 1, that this rank waits for a batch in the runs in step.
    """
    rank = dist.get_rank()
    shared, one = _specs(job, device)
    trainer = shared.make_trainer()
    in_step = trainer.distributed() if isinstance(trainer, ModelTrainer) else InStep(trainer, device)
    rates: dict[str, list[float]] = {ONE: [], OWN: [], TOGETHER: []}
    waits: list[float] = []
    for _ in range(job.settings.repeats):
        for kind, found in rates.items():
            alone = kind == ONE
            torch.set_num_threads(max(1, available_cpus() // (1 if alone else dist.get_world_size())))
            if rank == 0 or not alone:
                fed = in_step if kind == TOGETHER else trainer
                trial = trials.measure(one if alone else shared, fed)
                found.append(trial.images_per_s)
                if kind == TOGETHER:
                    waits.append(trial.wait_share)
            dist.all_reduce(torch.zeros(1))  # on the CPU: no GPU is kept busy with waiting
            if rank == 0:
                done = sum(map(len, rates.values()))
                print(json.dumps({"done": done, "total": len(rates) * job.settings.repeats}), flush=True)
    return {**rates, DATA_WAIT: waits}


def _specs(job: Job, device: torch.device) -> tuple[Settings, Settings]:
    """Of a rank among the others, and of one alone, which has all samples and all CPUs."""
    settings = job.settings
    shared = replace(
        settings.trial(backend=job.backend, path=job.data, trainer=settings.trainer, classes=job.classes),
        device=device,
        last="pad",  # as torch's DistributedSampler: all ranks have as many batches, all of them full
    )
    return shared, replace(shared, rank=0, world_size=1, workers=settings.workers_alone)


def main() -> None:
    """Join the other ranks, measure, write the answer."""
    asked = json.loads(sys.argv[1])
    job = Job.from_json(asked["job"])
    on_gpu = job.settings.device.type == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    answer: dict[str, Any]
    try:
        with in_one_line(job.settings.batch_size, job.settings.size):
            answer = measure(job, device)
    except PrecacheError as error:
        answer = {"error": str(error)}
    (Path(asked["out"]) / f"{dist.get_rank()}.json").write_text(json.dumps(answer), encoding="utf-8")
    if "error" in answer:
        sys.exit(1)  # torchrun ends the ranks that wait for this one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
