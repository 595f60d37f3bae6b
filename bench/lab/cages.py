"""Check of `bench watch`: which limits on the CPUs it names, in cages that are real, and in runs without any.

    python -m bench.lab.cages
    python -m bench.lab.cages --cases "taskset,two workers"

Each case is a training of two processes or more that decode nothing but keep a CPU busy, or sleep as if they
read files. It takes a machine of at least two CPUs; a cgroup needs root, and cgroups of version 1.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch

from bench.lab import harness
from bench.lab.watch import run_watch
from bench.machine.hardware import describe_machine
from bench.report.cages import Cage
from bench.report.table import Table
from bench.report.words import machine_line
from precache.errors import SettingError, check_choice

_SCRIPT = """
import os, sys, time
workers, work, pin, step_s = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
first, *_, last = cpus = sorted(os.sched_getaffinity(0)) * 2
if pin == "script":
    os.sched_setaffinity(0, {first})
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        if pin == "dataset" and torch.utils.data.get_worker_info():
            os.sched_setaffinity(0, {last})
        until_s = time.process_time() + 0.005
        if work == "sleep":
            time.sleep(0.005)
        while work == "compute" and time.process_time() < until_s:
            pass
        return index

def start_worker(number):
    if pin == "worker_init_fn":
        os.sched_setaffinity(0, {first})
    if pin == "each":
        os.sched_setaffinity(0, {cpus[number]})

torch.set_num_threads(1)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
for batch in DataLoader(Numbers(), 4, num_workers=workers, worker_init_fn=start_worker):
    time.sleep(step_s)
    optimizer.step()
"""
_BATCHES = 24
_CGROUPS = Path("/sys/fs/cgroup")
_FIRST = ("taskset", "-c", str(min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0))
_TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True, kw_only=True, slots=True)
class _CageCase:
    """Training that `bench watch` runs.

    Attributes:
        kind: limit that it is to name; None: none.
        workers, work, pin, step_s: arguments of _SCRIPT.
        launcher: words before `bench watch`.
        command: words before the script.
        quota_cpus: quota of a cgroup that bench and the script are put into; None: none.
        cpuset: whether they are put into a cgroup of one CPU.
        below: folder below that cgroup which they are put into.
        environment: variables that are set.
    """

    kind: Cage | None = None
    workers: int = 2
    work: str = "compute"
    pin: str = "none"
    step_s: float = 0.002
    launcher: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    quota_cpus: float | None = None
    cpuset: bool = False
    below: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


CASES = {
    "taskset around bench": _CageCase(kind=Cage.FEW, launcher=_FIRST),
    "taskset": _CageCase(kind=Cage.FEW, command=(*_FIRST, "python")),
    "taskset with four workers": _CageCase(kind=Cage.FEW, workers=4, command=(*_FIRST, "python")),
    "Slurm": _CageCase(kind=Cage.FEW, launcher=_FIRST, environment={"SLURM_JOB_ID": "1"}),
    "cpuset": _CageCase(kind=Cage.FEW, cpuset=True),
    "torchrun below taskset": _CageCase(kind=Cage.FEW, workers=1, command=(*_FIRST, *_TORCHRUN)),
    "quota": _CageCase(kind=Cage.THROTTLED, quota_cpus=0.5),
    "quota of a cgroup above": _CageCase(kind=Cage.THROTTLED, quota_cpus=0.5, below="inner"),
    "GOMP_CPU_AFFINITY": _CageCase(kind=Cage.PINNED, environment={"GOMP_CPU_AFFINITY": _FIRST[2]}),
    "OMP_PROC_BIND": _CageCase(kind=Cage.PINNED, environment={"OMP_PROC_BIND": "true"}),
    "the script": _CageCase(kind=Cage.PINNED, pin="script"),
    "worker_init_fn": _CageCase(kind=Cage.PINNED, pin="worker_init_fn"),
    "a library in the workers": _CageCase(kind=Cage.PINNED, pin="dataset"),
    "no worker": _CageCase(workers=0),
    "one worker": _CageCase(workers=1),
    "two workers": _CageCase(),
    "four workers": _CageCase(workers=4),
    "a CPU for each worker": _CageCase(pin="each"),
    "no worker below taskset": _CageCase(workers=0, launcher=_FIRST),
    "sleeping workers below taskset": _CageCase(work="sleep", launcher=_FIRST),
    "sleeping workers that are pinned": _CageCase(work="sleep", pin="worker_init_fn"),
    "slow steps below taskset": _CageCase(step_s=0.2, launcher=_FIRST),
    "a quota of more CPUs": _CageCase(quota_cpus=64.0),
    "Slurm without a cage": _CageCase(environment={"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "2"}),
    "OMP_PROC_BIND=false": _CageCase(environment={"OMP_PROC_BIND": "false"}),
    "torchrun": _CageCase(workers=1, command=_TORCHRUN),
}
"""Trainings by name: those with a kind are caged."""


@contextmanager
def _cgroup(case: _CageCase) -> Iterator[tuple[str, ...]]:
    """Make the cgroup of a case; the value are words that begin a command in it."""
    if case.quota_cpus is None and not case.cpuset:
        yield ()
        return
    folder = _CGROUPS / ("cpuset" if case.cpuset else "cpu") / f"bench-cages-{os.getpid()}"
    inner = folder / case.below
    try:
        inner.mkdir(parents=True)
        if case.cpuset:
            (folder / "cpuset.mems").write_text((folder.parent / "cpuset.mems").read_text())
            (folder / "cpuset.cpus").write_text(_FIRST[2])
        else:
            period_us = int((folder / "cpu.cfs_period_us").read_text())
            (folder / "cpu.cfs_quota_us").write_text(str(int((case.quota_cpus or 1) * period_us)))
    except OSError as error:
        reason = f"no cgroup can be made ({error.strerror})"
        raise SettingError(reason, path=folder, remedy="leave its case out of --cases") from error
    try:
        yield ("sh", "-c", f'echo $$ > {inner}/cgroup.procs; exec "$@"', "sh")
    finally:
        for made in dict.fromkeys((inner, folder)):
            made.rmdir()


def find_cage(name: str, folder: Path) -> tuple[str, str]:
    """Watch the training of a case; return the kind of limit that was named, or '', and the whole answer."""
    case = CASES[name]
    script = folder / "train.py"
    script.write_text(_SCRIPT)
    words = (*case.command, script, case.workers, case.work, case.pin, case.step_s)
    with _cgroup(case) as launcher:
        result = run_watch(
            *("--batches", _BATCHES, *words),
            launcher=(*launcher, *case.launcher),
            environment={"OMP_NUM_THREADS": "1", **case.environment},
        )
    return result.summary["cage"], " ".join(sentence for part in result.answer for sentence in part)


@click.command()
@click.option("--cases", help="Cases to run, by name.  [default: all]")
def command(cases: str | None) -> None:
    """Print what `bench watch` named beside the limit that was put in."""
    names = cases.split(",") if cases else list(CASES)
    rows, right = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            check_choice("case", name, CASES)
            kind = CASES[name].kind
            expected = "" if kind is None else kind.value
            named, answer = find_cage(name, Path(folder))
            right += named == expected
            rows.append([name, expected or "-", named or "-"])
            click.echo(f"{name}: {answer}\n", err=True)
    table = Table(("training", "put in", "named"), [*rows, [f"{right} of {len(names)} right", "", ""]])
    click.echo(table.markdown())
    click.echo(f"\n{machine_line(describe_machine(torch.device('cpu')), ('python', 'torch'))}")


if __name__ == "__main__":
    harness.main(command, "cages")
