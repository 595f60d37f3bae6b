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
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

import loaders
from bench.machine import page_cache
from bench.machine.hardware import describe_machine
from bench.measure.candidates import Candidate, folder_of, open_candidates
from bench.measure.fresh import in_one_line
from bench.measure.settings import Settings
from bench.measure.trainers import ModelTrainer, Trainer, resolve
from bench.measure.trial import measure
from bench.measure.trials import Trials
from bench.report.ranks import ALONE, IN_STEP, OWN_PACE, make_result
from bench.report.result import Result, Trial
from loaders.batch import Batch
from precache.engines import available_cpus
from precache.errors import DatasetError, PrecacheError, SettingError, WorkerError
from precache.imports import child_environment
from precache.reporting import Progress, no_progress
from precache.storage.staging import temporary_folder

_WRITTEN = ("size", "warmup", "batches", "repeats", "amp", "augment")
"""Settings that a result says, by the names of their fields."""
Measured: TypeAlias = dict[str, list[dict[str, float]]]
"""Numbers of each repeat of one rank, by what they are of; see `measure_rank`."""
_GRACE_S = 40  # torchrun gives its ranks 30 s to end


def compare_ranks(
    candidates: Sequence[Candidate],
    settings: Settings,
    ranks: int,
    path: Path | None = None,
    on_progress: Progress = no_progress,
) -> Result:
    """Train on several ranks of this machine: one alone, each at its own pace, then all in step.

    Args:
        settings: without `workers`, the CPUs are shared out among the ranks.
        path: file of the result; loaders whose trials it holds are not measured again.

    Raises:
        DatasetError: no loader can run.
        SettingError: there are fewer GPUs.
    """
    device = settings.device
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise SettingError(
            f"ranks {ranks} is more than the {torch.cuda.device_count()} GPUs; use --device cpu"
        )
    opened, skipped = open_candidates(candidates)
    ours = [one for one in opened if one.backend in loaders.BACKENDS]
    for one in opened:
        if one not in ours:
            skipped[one.label] = "it does not share samples out among ranks"
    if not ours:
        raise DatasetError("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    trainer = resolve(settings.trainer, device)
    written = {
        "ranks": ranks,
        "trainers": [trainer],
        "workers": settings.workers,
        "batch_size": settings.batch_size,
        **{name: getattr(settings, name) for name in _WRITTEN},
        "device": device.type,
        "data": {
            str(one.path): {"name": one.described, "samples": len(one.data), "digest": one.data.digest}
            for one in ours
        },
    }
    trials = Trials(path, "loaders", describe_machine(device), written)
    trials.skipped.update(skipped)
    for number, one in enumerate(ours):
        of = {"backend": one.backend, "data": str(one.path), "trainer": trainer, "ranks": ranks}
        last = {"what": IN_STEP, **of, "rank": ranks - 1, "repeat": settings.repeats - 1}
        if trials.find(last) is not None:
            continue
        is_warm = page_cache.warm(folder_of(one.path))
        of_rank = settings.of(one.backend, one.path, len(one.data.classes), trainer=trainer)

        def report(done: int, total: int, number: int = number) -> None:
            on_progress(number * total + done, len(ours) * total)

        for rank, measured in enumerate(launch(of_rank, ranks, report)):
            for what, repeats in measured.items():
                for repeat, numbers in enumerate(repeats):
                    numbers["page_cache_is_warm"] = float(is_warm)
                    trials.add(Trial({"what": what, **of, "rank": rank, "repeat": repeat}, numbers))
    result = make_result(trials.machine, trials.settings, trials.all(), trials.skipped)
    trials.finish(result)
    return result


def launch(settings: Settings, ranks: int, on_progress: Progress = no_progress) -> list[Measured]:
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


def measure_rank(settings: Settings) -> Measured:
    """Measure this rank; `images_per_s` and `wait_share` (0 to 1) of each repeat, by what it is of:

    ALONE: rank 0 without a share: all samples and, unless `workers` says other, all CPUs;
    OWN_PACE: all ranks at the same time, each at its own pace;
    IN_STEP: all ranks in step.
    """
    rank = dist.get_rank()
    shared = replace(settings, last="pad")  # as torch's DistributedSampler: as many batches, all of them full
    one = replace(shared, rank=0, world_size=1, workers=settings.workers_alone)
    trainer = settings.make_trainer()
    in_step = trainer.distributed() if isinstance(trainer, ModelTrainer) else InStep(trainer, settings.device)
    measured: Measured = {ALONE: [], OWN_PACE: [], IN_STEP: []}
    for repeat in range(settings.repeats):
        for number, (what, repeats) in enumerate(measured.items()):
            alone = what == ALONE
            torch.set_num_threads(max(1, available_cpus() // (1 if alone else dist.get_world_size())))
            if rank == 0 or not alone:
                trial = measure(one if alone else shared, in_step if what == IN_STEP else trainer)
                names = ("images_per_s", "wait_share")
                repeats.append({name: trial.numbers[name] for name in names})
            dist.all_reduce(torch.zeros(1))  # on the CPU: no GPU is kept busy with waiting
            if rank == 0:
                done = repeat * len(measured) + number + 1
                print(f"done {done} of {len(measured) * settings.repeats}", flush=True)
    return measured


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
