"""Limits on the CPUs of a script: twelve that are named, and twelve runs in which none is."""

from collections.abc import Iterable
from typing import Any

import pytest

from bench.report.cages import Cage, ScriptCpus, judge_cpus
from tests.bench.report.test_waiting import training
from tests.bench.report.test_watch import WAITING, result_of, text_of

MACHINE = 64


def script(workers: int = 16, start: Iterable[int] = range(MACHINE), **values: Any) -> ScriptCpus:
    """Return the CPUs of a script whose workers wait for a CPU half of the time."""
    settings: dict[str, Any] = {"own": frozenset(start), "of_workers": frozenset(start), "queued_share": 0.5}
    settings |= {"ranks": 1, "variables": {}, "quota_cpus": None, "throttled_share": None, "machine": MACHINE}
    settings["other_cpu_share"] = 0.1
    return ScriptCpus(workers=workers, start=frozenset(start), **{**settings, **values})


SLURM = {"SLURM_JOB_ID": "7"}
ONE, TWO = frozenset({0}), frozenset({0, 1})
LINE = "in worker_init_fn: os.sched_setaffinity(0, range(0, 64))"
CAGES: dict[str, tuple[ScriptCpus, Cage, str]] = {
    "Slurm": (
        script(start=TWO, variables=SLURM),
        Cage.FEW,
        "Your 16 workers share 2 CPUs: `#SBATCH --cpus-per-task=16`",
    ),
    "Slurm, one CPU": (script(1, start=ONE, variables=SLURM), Cage.FEW, "`#SBATCH --cpus-per-task=2`"),
    "taskset": (script(start=TWO), Cage.FEW, "num_workers=2"),
    "one CPU for training and worker": (
        script(1, start=ONE),
        Cage.FEW,
        "Your 1 worker and the training share 1",
    ),
    "ranks below taskset": (
        script(4, range(8), ranks=8),
        Cage.FEW,
        "Your 32 workers of 8 ranks share 8 CPUs",
    ),
    "a system without schedstat": (script(start=TWO, queued_share=None), Cage.FEW, "share 2 CPUs"),
    "quota without cpu.stat": (script(quota_cpus=4.0), Cage.FEW, "docker run --cpus=16"),
    "quota": (
        script(quota_cpus=2.0, throttled_share=0.4),
        Cage.THROTTLED,
        "throttled for 40% of the time (cpu.stat)",
    ),
    "quota above": (script(throttled_share=0.9), Cage.THROTTLED, "throttled for 90%"),
    "GOMP_CPU_AFFINITY": (
        script(4, own=ONE, of_workers=ONE, variables={"GOMP_CPU_AFFINITY": "0"}),
        Cage.PINNED,
        "The workers are pinned to CPU 0: the OpenMP of numpy or torch did that, because the environment "
        f"has GOMP_CPU_AFFINITY=0. Unset it, or put this line {LINE}",
    ),
    "OMP_PROC_BIND of torchrun": (
        script(4, start=ONE, variables={"OMP_PROC_BIND": "true"}),
        Cage.PINNED,
        "os.sched_setaffinity(0, range(64))",
    ),
    "a library": (
        script(4, own=ONE, of_workers=ONE),
        Cage.PINNED,
        f"a library that it imports. Put this line behind the imports, or {LINE}",
    ),
    "worker_init_fn": (
        script(4, of_workers=TWO),
        Cage.PINNED,
        "pinned to CPUs 0, 1: worker_init_fn did that",
    ),
    "loaders.build": (script(0, own=ONE, of_workers=ONE), Cage.PINNED, "The process is pinned to CPU 0"),
}
FREE = {
    "the whole machine": script(),
    "more workers than the machine has CPUs": script(200),
    "no worker": script(0, start=ONE, of_workers=frozenset()),
    "a CPU for each worker": script(4, of_workers=range(4)),
    "a part of the machine that is enough": script(7, range(8)),
    "few CPUs, and workers that wait for files": script(start=TWO, queued_share=0.01),
    "pinned workers that wait for files": script(of_workers=ONE, queued_share=0.1),
    "one pinned worker with the training elsewhere": script(7, range(8), of_workers=range(1, 8)),
    "workers that wait for files beside other work": script(start=TWO, queued_share=0.4, other_cpu_share=0.9),
    "a quota of all CPUs": script(quota_cpus=64.0, throttled_share=0.0),
    "a quota that is hardly used up": script(quota_cpus=40.0, throttled_share=0.02),
    "ranks that Slurm binds": script(7, range(64), ranks=8, variables=SLURM),
    "OMP_PROC_BIND=false": script(4, start=range(8), variables={"OMP_PROC_BIND": "false"}),
    "a system without masks": script(start=(), machine=8),
}


@pytest.mark.parametrize("name", CAGES)
def test_each_cage_is_named_with_its_remedy(name: str) -> None:
    cpus, kind, words = CAGES[name]
    finding = judge_cpus(cpus, is_waiting=True)
    assert finding is not None
    assert finding.kind is kind
    assert words in finding.sentence
    waits_for_nothing = judge_cpus(cpus, is_waiting=False)
    assert (waits_for_nothing is not None) == (kind is Cage.THROTTLED)


@pytest.mark.parametrize("name", FREE)
def test_no_cage_is_named_in_a_free_run(name: str) -> None:
    assert judge_cpus(FREE[name], is_waiting=True) is None


def test_the_answer_names_a_cage_in_the_place_of_changes() -> None:
    event = {"event": "cpus", "start": [0, 1], "own": [0, 1], "workers": [0, 1], "machine": 64}
    event |= {"queued_share": 0.6, "variables": {}}
    free = training(WAITING, workers=6).events
    caged = [*free, {**event, "stream": 0}]
    assert any(row.key.get("change") for row in result_of([free]).rows)
    result = result_of([caged])
    assert result.summary["cage"] == "few"
    assert "Your 6 workers share 2 CPUs" in text_of(result)
    assert not any(row.key.get("change") for row in result.rows)
