"""Limits on the CPUs of a watched script, where they are what it waits for. Pure.

=========  ====================================================================================
kind       is named where
=========  ====================================================================================
THROTTLED  the kernel stopped a cgroup of the script in a tenth of the periods of its quota
PINNED     all workers together have fewer CPUs than the script began with, and than they are
FEW        the script began with fewer CPUs than the machine has, or has a quota, and its workers,
           or two processes for each rank, are more than these CPUs
=========  ====================================================================================

PINNED and FEW are named only if the script waits for batches, and its workers wait for a CPU for a fifth of
the time, where that is known: workers that wait for files need no CPUs. Half of the share of the CPUs that
other processes take is added to that fifth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bench.report.waiting import Stream, count_ranks, is_waiting
from bench.report.words import percent
from precache.reporting import quantity

_MIN_THROTTLED_SHARE = 0.1
_MIN_QUEUED_SHARE = 0.2
_OPENMP = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")


class Cage(Enum):
    """Kind of a limit on the CPUs."""

    THROTTLED = "throttled"
    PINNED = "pinned"
    FEW = "few"


@dataclass(frozen=True, slots=True)
class CageFinding:
    """Limit that a script waits for.

    Attributes:
        kind: kind of the limit.
        cpus: CPUs that it leaves to the workers; 1 for less than one.
        sentence: sentence that names it, with the remedy.
    """

    kind: Cage
    cpus: int
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptCpus:
    """CPUs of a script, over all of its ranks.

    Attributes:
        ranks: number of processes that train.
        workers: number of workers of a rank.
        start: CPUs that the ranks may use when they start.
        own: CPUs that they may use later.
        of_workers: CPUs of their workers; those of their own threads where `loaders.build` reads.
        queued_share: share of the time, 0 to 1, that workers wait for a CPU; None where not known.
        machine: number of the machine's CPUs.
        variables: variables of the environment that limit CPUs.
        quota_cpus: CPUs of the smallest quota; None without one.
        throttled_share: share of the periods of a quota in which it was used up; None where not known.
        other_cpu_share: share of the CPUs that other processes take; None where not known.
    """

    ranks: int
    workers: int
    start: frozenset[int]
    own: frozenset[int]
    of_workers: frozenset[int]
    queued_share: float | None
    machine: int
    variables: Mapping[str, str]
    quota_cpus: float | None
    throttled_share: float | None
    other_cpu_share: float | None


def find_cage(stream: Stream, streams: Sequence[Stream], settings: Mapping[str, Any]) -> CageFinding | None:
    """Return the limit that a stream waits for, if there is one.

    Args:
        stream: stream that waits.
        streams: all streams, because ranks share the CPUs.
        settings: of the result: `quota_cpus`, `throttled_share` and `other_cpu_share`, as in `ScriptCpus`.
    """
    events = [other.info["cpus"] for other in streams if other.role == stream.role and "cpus" in other.info]
    if not events:
        return None
    of_workers = "workers" if stream.info["kind"] == "DataLoader" else "own"
    shares = [event["queued_share"] for event in events if event["queued_share"] is not None]
    cpus = ScriptCpus(
        ranks=count_ranks(stream, streams),
        workers=stream.workers,
        start=frozenset().union(*(event["start"] for event in events)),
        own=frozenset().union(*(event["own"] for event in events)),
        of_workers=frozenset().union(*(event[of_workers] for event in events)),
        queued_share=max(shares, default=None),
        machine=events[0]["machine"],
        variables=events[0]["variables"],
        quota_cpus=settings["quota_cpus"],
        throttled_share=settings["throttled_share"],
        other_cpu_share=settings["other_cpu_share"],
    )
    return judge_cpus(cpus, is_waiting=is_waiting(stream) and not stream.ahead)


def judge_cpus(cpus: ScriptCpus, *, is_waiting: bool) -> CageFinding | None:
    """Return the limit that a script waits for, by the table above."""
    limit = min(len(cpus.start) or cpus.machine, cpus.quota_cpus or cpus.machine)
    if (cpus.throttled_share or 0.0) >= _MIN_THROTTLED_SHARE:
        return CageFinding(Cage.THROTTLED, max(1, int(limit)), _explain_throttling(cpus))
    least_share = _MIN_QUEUED_SHARE + (cpus.other_cpu_share or 0.0) / 2
    is_queued = cpus.queued_share is None or cpus.queued_share >= least_share
    if not is_waiting or not is_queued or not cpus.start:
        return None
    workers = cpus.workers * cpus.ranks
    pinned_by_start = len(cpus.start) == 1 < cpus.machine and bool(_openmp(cpus))  # torchrun imports torch
    if cpus.of_workers and (pinned_by_start or len(cpus.of_workers) < min(max(workers, 2), len(cpus.start))):
        return CageFinding(Cage.PINNED, len(cpus.of_workers), _explain_pinning(cpus))
    if cpus.workers and limit < cpus.machine and max(workers, 2 * cpus.ranks) > limit:
        return CageFinding(Cage.FEW, max(1, int(limit)), _explain_few(cpus, limit))
    return None


def _openmp(cpus: ScriptCpus) -> str:
    """Return the setting by which OpenMP pins; empty for none."""
    for name in _OPENMP:
        value = cpus.variables.get(name, "")
        if value and value.lower() not in ("false", "none", "disabled"):
            return f"{name}={value}"
    return ""


def _explain_throttling(cpus: ScriptCpus) -> str:
    share = percent(cpus.throttled_share or 0.0)
    limit = "" if cpus.quota_cpus is None else f" of {_cpus(cpus.quota_cpus)}"
    return (
        f"The script is throttled for {share} of the time (cpu.stat): it uses up its cgroup's quota{limit}, "
        f"and stands still until the next period. Raise the quota (docker run --cpus, limits.cpu of "
        f"Kubernetes), or give the script fewer workers and threads."
    )


def _explain_pinning(cpus: ScriptCpus) -> str:
    names = ", ".join(map(str, sorted(cpus.of_workers)))
    subject = "The workers are" if cpus.workers else "The process is"
    pinned = f"{subject} pinned to {'CPU' if len(cpus.of_workers) == 1 else 'CPUs'} {names}"
    if setting := _openmp(cpus):
        return (
            f"{pinned}: the OpenMP of numpy or torch did that, because the environment has {setting}. Unset "
            f"it, or put this line in worker_init_fn: {_free(cpus)}"
        )
    if cpus.own < cpus.start:
        return (
            f"{pinned}: the script did that, or a library that it imports. Put this line behind the imports, "
            f"or in worker_init_fn: {_free(cpus)}"
        )
    return (
        f"{pinned}: worker_init_fn did that, the dataset, or a library that the workers import. Take it out, "
        f"or end worker_init_fn with this line: {_free(cpus)}"
    )


def _free(cpus: ScriptCpus) -> str:
    """Write the line that lets a process use all CPUs that the script began with."""
    first, last = min(cpus.start), max(cpus.start)
    if len(cpus.start) == 1:
        return f"os.sched_setaffinity(0, range({cpus.machine}))"
    if last - first + 1 == len(cpus.start):
        return f"os.sched_setaffinity(0, range({first}, {last + 1}))"
    return f"os.sched_setaffinity(0, {sorted(cpus.start)})"


def _explain_few(cpus: ScriptCpus, limit: float) -> str:
    workers = cpus.workers * cpus.ranks
    of_ranks = f" of {cpus.ranks} ranks" if cpus.ranks > 1 else ""
    and_training = "" if workers > 1 else " and the training"
    few = f"Your {quantity(workers, 'worker')}{of_ranks}{and_training} share {_cpus(limit)}"
    fewer = max(1, int(limit / cpus.ranks))
    rest = f", or give num_workers={fewer}" if fewer < cpus.workers else ""
    if limit < len(cpus.start):
        enough = max(workers, 2 * cpus.ranks)
        return f"{few}: raise the quota (docker run --cpus={enough}, limits.cpu of Kubernetes){rest}."
    if "SLURM_JOB_ID" in cpus.variables:
        wanted = f"--cpus-per-task={max(2, cpus.workers)}"
        return f"{few}: `#SBATCH {wanted}`, and the same for srun{rest}."
    return (
        f"{few} of the machine's {cpus.machine}: taskset, numactl or docker run --cpuset-cpus allow no "
        f"others. Allow more{rest}."
    )


def _cpus(count: float) -> str:
    return f"{count:g} CPU" if count == 1 else f"{count:g} CPUs"
