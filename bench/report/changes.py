"""What one could do about a loader, with what it would bring: measured beside it, else predicted. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.report.stats import Estimate
from bench.report.verdict import Change, Measured
from bench.report.workers import more_can_help

_RAW = "raw"
_RAM_SHARE = 0.5  # of what is free: the rest is the training's


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One loader over one folder, as far as changes depend on it.

    Attributes:
        folder: as it is named in a sentence.
        kind: of the data: `raw`, or the format of a converted folder.
        samples: pictures of an epoch.
        file_bytes: of a converted folder.
        stages: images/s of each stage, and bytes of a picture's pixels, repeat by repeat, where they ran
            apart; see `bench.measure.stages`.
    """

    backend: str
    folder: str
    kind: str
    samples: int
    file_bytes: int
    measured: Measured
    stages: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, slots=True)
class Means:
    """What the machine has.

    Attributes:
        workers: of each loader.
        cpus, free_bytes: CPUs, and bytes of memory that are free.
        cpu_share: of all cores, 0 to 1, busy while this loader fed the trainer; None where not sampled.
    """

    workers: int
    cpus: int
    free_bytes: int
    cpu_share: float | None = None


def known(here: Pipeline, others: Sequence[Pipeline], means: Means) -> list[Change]:
    """The changes that apply to `here`, of all that was measured beside it with the same trainer."""
    measured = here.measured
    found = []
    for other in others:
        if other.backend == "synthetic":
            continue
        there = other.measured
        rate = (there.supply if measured.reads_cold else there.together) or there.loader
        rate = _at_most(rate, there.trainer) if measured.reads_cold else rate
        cold = measured.reads_cold and there.cold is not None
        if other.kind == _RAW or other.folder == here.folder:
            found.append(Change(f"Backend {other.backend} on {other.folder}", rate, True, cold=cold))
        else:
            found.append(Change(f"Converting to {other.kind}", rate, True, other.file_bytes, cold))
    if here.stages:
        has_shards = any(one.backend == "shards" for one in (here, *others))
        found += _without_decoding(here, means.free_bytes, has_shards=has_shards)
        found += _more_workers(measured, means)
    return found


def _without_decoding(here: Pipeline, free_bytes: int, *, has_shards: bool) -> list[Change]:
    """Shards, where none were measured, and a cache: both only copy."""
    rate = _limited(median(repeat["copy"] for repeat in here.stages), here.measured)
    sizes = here.stages[-1]  # the same pictures in each repeat
    found = []
    if not has_shards:
        found.append(Change("Converting to shards", rate, False, round(here.samples * sizes["shards_bytes"])))
    if here.samples * sizes["decoded_bytes"] < free_bytes * _RAM_SHARE:
        found.append(Change("From the second epoch on, cache='ram'", rate, False))
    return found


def _more_workers(here: Measured, means: Means) -> list[Change]:
    if not more_can_help(means.workers, means.cpus, means.cpu_share):
        return []
    rate = _limited(here.loader.median * means.cpus / means.workers, here)
    return [Change(f"{means.cpus} workers, one per CPU,", rate, False)]


def _limited(rate: float, here: Measured) -> Estimate:
    """Of a loader at `rate`, by what follows it."""
    others = [part for part in (here.trainer, here.transfer) if part is not None]
    return min([Estimate(rate, rate, rate), *others], key=lambda part: part.median)


def _at_most(rate: Estimate, trainer: Estimate | None) -> Estimate:
    return rate if trainer is None or rate.median < trainer.median else trainer
