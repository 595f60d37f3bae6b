"""Data-parallel ranks on this machine: what `bench loaders --ranks` measures.

torchrun runs `python -m bench.measure.ranks FOLDER` once per rank; the settings lie pickled in
FOLDER/settings. Rank 0 prints `done N of M` after each run; each rank writes its `RankAnswer` to
FOLDER/<rank>.json.
"""

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
from typing import TypeAlias

import torch
import torch.distributed as dist
from msgspec import Struct

from bench.machine import page_cache
from bench.machine.hardware import describe_machine
from bench.measure.candidates import Candidate, local_folder, open_candidates
from bench.measure.settings import Settings
from bench.measure.trainers import ModelTrainer, Trainer, resolve_trainer
from bench.measure.trial import explain_trial_errors, measure
from bench.measure.trials import Trials
from bench.report.ranks import ALONE, IN_STEP, OWN_PACE, make_result
from bench.report.result import Result, Trial
from loaders.batch import Batch
from loaders.dataset import READS
from precache.engines import available_cpus
from precache.errors import DatasetError, PrecacheError, SettingError, WorkerError
from precache.packages import child_environment
from precache.reporting import Progress, no_progress
from precache.storage.staging import temporary_folder
from precache.storage.stored_json import decode, encode

_SETTINGS_IN_RESULT = ("size", "warmup", "batches", "repeats", "amp", "launches", "augment")
"""Fields of `Settings` that a result's file has under the same names."""
RankMeasurements: TypeAlias = dict[str, list[dict[str, float]]]
"""Measurement of each repeat in one rank, `images_per_s` and `wait_share` (0 to 1), by the kind of run."""
_GRACE_S = 40  # torchrun itself gives its ranks 30 s to end


class RankAnswer(Struct, frozen=True):
    """What a rank writes at its end: its measurements, or the message of its error."""

    measurements: RankMeasurements = {}
    error: str = ""


def compare_ranks(
    candidates: Sequence[Candidate],
    settings: Settings,
    ranks: int,
    path: Path | None = None,
    on_progress: Progress = no_progress,
) -> Result:
    """Train on several ranks of this machine: one alone, each at its own pace, then all in step.

    Args:
        settings: settings of each rank; without `workers`, the CPUs are shared out among the ranks.
        ranks: number of processes that train.
        path: file of the result; loaders whose trials it holds are not measured again.

    Raises:
        DatasetError: no loader can run.
        SettingError: there are fewer GPUs than ranks.
    """
    device = settings.device
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise SettingError(
            f"ranks {ranks} is more than the {torch.cuda.device_count()} GPUs", remedy="use --device cpu"
        )
    opened, skipped = open_candidates(candidates)
    usable = []
    for candidate in opened:
        if candidate.backend in READS:
            usable.append(candidate)
        else:
            skipped[candidate.label] = "it does not share samples out among ranks"
    if not usable:
        raise DatasetError("; ".join(f"{label}: {reason}" for label, reason in skipped.items()))
    trainer = resolve_trainer(settings.trainer, device)
    result_settings = {
        "ranks": ranks,
        "trainers": [trainer],
        "workers": settings.workers,
        "batch_size": settings.batch_size,
        **{name: getattr(settings, name) for name in _SETTINGS_IN_RESULT},
        "device": device.type,
        "data": {
            str(candidate.path): {
                "kind": candidate.data.kind,
                "samples": len(candidate.data),
                "digest": candidate.data.digest,
            }
            for candidate in usable
        },
    }
    trials = Trials(path, "loaders", describe_machine(device), result_settings)
    trials.skipped.update(skipped)
    for position, candidate in enumerate(usable):
        key = {
            "backend": candidate.backend,
            "data": str(candidate.path),
            "trainer": trainer,
            "ranks": ranks,
        }
        last_key = {"kind": IN_STEP, **key, "rank": ranks - 1, "repeat": settings.repeats - 1}
        if trials.find(last_key) is not None:
            continue
        is_warm = page_cache.warm(local_folder(candidate.path))
        rank_settings = settings.for_loader(
            candidate.backend, candidate.path, len(candidate.data.classes), trainer=trainer
        )

        def report(done: int, total: int, position: int = position) -> None:
            on_progress(position * total + done, len(usable) * total)

        for rank, measurements in enumerate(launch_ranks(rank_settings, ranks, report)):
            for kind, repeats in measurements.items():
                for repeat, measurement in enumerate(repeats):
                    measurement["page_cache_is_warm"] = float(is_warm)
                    trials.add(Trial({"kind": kind, **key, "rank": rank, "repeat": repeat}, measurement))
    result = make_result(trials.machine, trials.settings, trials.all(), trials.skipped)
    trials.finish(result)
    return result


def launch_ranks(
    settings: Settings, ranks: int, on_progress: Progress = no_progress
) -> list[RankMeasurements]:
    """Start that many ranks by torchrun, rank N on GPU N if the device is a GPU; return what each measured.

    Raises:
        PrecacheError: a rank raised one.
        WorkerError: a rank died.
    """
    with temporary_folder() as folder, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--log-dir", str(folder / "logs")]  # without it, torchrun leaves a folder in TMPDIR
        command += ["--nproc-per-node", str(ranks), "-m", "bench.measure.ranks"]
        (folder / "settings").write_bytes(pickle.dumps(settings))
        process = subprocess.Popen(
            [*command, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**child_environment(), "OMP_NUM_THREADS": str(available_cpus(ranks))},
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
        answers = [
            decode(file.read_bytes(), RankAnswer, path=file, error=WorkerError, remedy="run it again")
            for file in files
            if file.exists()
        ]
        for answer in answers:
            if answer.error:
                raise PrecacheError(answer.error)
        if process.returncode != 0 or len(answers) < ranks:
            errors.seek(0)
            cause = find_root_cause(errors.read())
            if cause is None:
                raise WorkerError(f"{ranks} ranks: torchrun could not start them")
            raise WorkerError(f"{ranks} ranks: {cause}", remedy="try fewer ranks or a smaller batch")
        return [answer.measurements for answer in answers]


def find_root_cause(errors: str) -> str | None:
    """Return a clause on the first rank that failed; None where no rank was started.

    Args:
        errors: text that torchrun and the ranks wrote on stderr.
    """
    _, _, root_cause = errors.partition("Root Cause")
    rank = re.search(r"^\s*rank\s*: (\d+)", root_cause, re.MULTILINE)
    code = re.search(r"^\s*exitcode\s*: (-?\d+)", root_cause, re.MULTILINE)
    if rank is None or code is None:
        return None
    exceptions = re.findall(rf"^\[rank{rank[1]}\]: (\w[\w.]*(?:Error|Exception): .*)$", errors, re.MULTILINE)
    exception = f" ({exceptions[-1]})" if exceptions else ""
    return f"rank {rank[1]} ended with exit code {code[1]}{exception}"


class SynchronizedTrainer:
    """Trainer whose ranks wait for one another after each batch, as ranks do that average gradients.

    Attributes:
        name, dtype: those of the trainer that it wraps, see `bench.measure.trainers.Trainer`.
    """

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self.name = trainer.name
        self.dtype = trainer.dtype
        self._trainer = trainer
        self._gradient = torch.zeros(1, device=device)

    def step(self, batch: Batch) -> None:
        """Train on `batch`, then wait until all ranks have trained on theirs."""
        self._trainer.step(batch)
        dist.all_reduce(self._gradient)


def measure_rank(settings: Settings) -> RankMeasurements:
    """Measure the runs of this rank, in the process that torchrun has started for it.

    The kinds of runs are:
        ALONE: rank 0 trains alone on all samples, with all CPUs unless `workers` is set; the other ranks
            wait, and measure nothing;
        OWN_PACE: all ranks train at the same time, each at its own pace;
        IN_STEP: all ranks train in step.
    """
    rank = dist.get_rank()
    # "pad" as torch's DistributedSampler does: every rank has as many batches, and all are full
    shared_settings = replace(settings, last="pad")
    alone_settings = replace(shared_settings, rank=0, world_size=1, workers=settings.workers_alone)
    trainer = settings.make_trainer()
    in_step_trainer: Trainer
    if isinstance(trainer, ModelTrainer):
        in_step_trainer = trainer.distributed()
    else:
        in_step_trainer = SynchronizedTrainer(trainer, settings.device)
    measurements: RankMeasurements = {ALONE: [], OWN_PACE: [], IN_STEP: []}
    runs = settings.repeats * len(measurements)
    done = 0
    for _ in range(settings.repeats):
        for kind, repeats in measurements.items():
            is_alone = kind == ALONE
            torch.set_num_threads(available_cpus(1 if is_alone else None))
            if rank == 0 or not is_alone:
                trial = measure(
                    alone_settings if is_alone else shared_settings,
                    in_step_trainer if kind == IN_STEP else trainer,
                )
                names = ("images_per_s", "wait_share")
                repeats.append({name: trial.numbers[name] for name in names})
            dist.all_reduce(torch.zeros(1))  # on the CPU, so that waiting keeps no GPU busy
            done += 1
            if rank == 0:
                print(f"done {done} of {runs}", flush=True)
    return measurements


def main() -> None:
    """Join the other ranks, measure, and write this rank's measurements or its error."""
    folder = Path(sys.argv[1])
    settings: Settings = pickle.loads((folder / "settings").read_bytes())
    on_gpu = settings.device.type == "cuda"
    if on_gpu:
        settings = replace(settings, device=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        torch.cuda.set_device(settings.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    file = folder / f"{dist.get_rank()}.json"
    try:
        with explain_trial_errors(settings.batch_size, settings.size):
            file.write_bytes(encode(RankAnswer(measure_rank(settings))))
    except PrecacheError as error:
        file.write_bytes(encode(RankAnswer(error=str(error))))
        sys.exit(1)  # torchrun ends the ranks that wait for this one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
