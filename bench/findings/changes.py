"""What one could do about a loader, with what it would bring: measured in the same run, else predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from bench.findings.stats import Estimate
from bench.findings.verdict import Change, Measured
from loaders.dataset import RAW, open_split
from precache.executors import available_cpus
from precache.recipe import Recipe

_RAM_SHARE = 0.5  # of what is free: the rest is the training's


@dataclass(frozen=True, slots=True)
class Arm:
    """One thing to measure: a backend over a folder."""

    backend: str
    path: Path


def samples(arm: Arm) -> int:
    """Pictures of an epoch."""
    return len(open_split(arm.path, "train").ids)


def known(
    arm: Arm,
    measured: Mapping[Arm, Measured],
    stages: Mapping[Arm, Sequence[Mapping[str, float]]],
    workers: int,
) -> list[Change]:
    """The changes that apply to `arm`, of all that was `measured` with one trainer.

    Args:
        stages: repeat by repeat, of the arms whose stages ran apart, see `bench.trial.stages`.
        workers: of each loader.
    """
    here = measured[arm]
    raw = next((other for other in stages if open_split(other.path, "train").kind == RAW), None)
    seconds = _conversion_s(stages[raw], samples(raw)) if raw is not None else None
    found = []
    for other, there in measured.items():
        if other == arm or other.backend == "synthetic":
            continue
        rate = (there.supply if here.reads_cold else there.together) or there.loader
        rate = _at_most(rate, there.trainer) if here.reads_cold else rate
        kind = open_split(other.path, "train").kind
        if kind == RAW or other.path == arm.path:
            found.append(Change(f"Backend {other.backend} on {other.path}", rate, True))
        else:
            found.append(Change(f"Converting to {kind}", rate, True, seconds, _file_bytes(other.path)))
    if arm in stages:
        found += _without_decoding(arm, here, stages[arm], seconds, has_shards=_has_shards(measured))
        found += _more_workers(here, workers)
    return found


def _without_decoding(
    arm: Arm,
    here: Measured,
    stages: Sequence[Mapping[str, float]],
    seconds: float | None,
    *,
    has_shards: bool,
) -> list[Change]:
    """Shards, where none were measured, and a cache: both only copy."""
    rate = _limited(median(repeat["copy"] for repeat in stages), here)
    side = Recipe(format="shards").size
    stored = samples(arm) * side * side * 3
    found = []
    if not has_shards:
        found.append(Change("Converting to shards", rate, False, seconds, stored))
    if stored < psutil.virtual_memory().available * _RAM_SHARE:
        found.append(Change("From the second epoch on, cache='ram'", rate, False))
    return found


def _more_workers(here: Measured, workers: int) -> list[Change]:
    cpus = available_cpus()
    if not 0 < workers < cpus:
        return []
    rate = _limited(here.loader.median * cpus / workers, here)
    return [Change(f"{cpus} workers, one per CPU,", rate, False)]


def _limited(rate: float, here: Measured) -> Estimate:
    """Of a loader at `rate`, by what follows it."""
    others = [part for part in (here.trainer, here.transfer) if part is not None]
    return min([Estimate(rate, rate, rate), *others], key=lambda part: part.median)


def _at_most(rate: Estimate, trainer: Estimate | None) -> Estimate:
    return rate if trainer is None or rate.median < trainer.median else trainer


def _conversion_s(stages: Sequence[Mapping[str, float]], pictures: int) -> float:
    """Reading and decoding every picture once, as the loader's stages do: less than converting takes."""
    return pictures * median(1 / repeat["read"] + 1 / repeat["decode"] for repeat in stages)


def _has_shards(measured: Mapping[Arm, Measured]) -> bool:
    return any(arm.backend == "shards" for arm in measured)


def _file_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
