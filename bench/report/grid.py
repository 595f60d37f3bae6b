"""The grid of a sweep: its points, which of them need no measuring, and what to choose. Pure."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.report.stats import Estimate
from bench.report.trust import is_disturbed
from bench.report.verdict import (
    KEEPS_UP,
    NEGLIGIBLE_SHARE,
    NO_TRAINER,
    NOT_DISTINGUISHABLE,
    judge,
    lost_share,
)
from precache.errors import check_range

FALLING_SHARE = 0.9
"""With less of what fewer workers gave, more of them do harm."""
HOPELESS_SHARE = 0.5
"""Settings that reached less of the best at one batch size are not tried at the next."""
_DECODE_ON_DEVICE = ("dali", "nvjpeg")


@dataclass(frozen=True, slots=True)
class Point:
    """Settings of a trial.

    Attributes:
        backend, data: of the loader; its folder.
        batch_size: samples per batch.
        amp: precision of the trainer, `bf16`, `fp16` or `off`; None where it does not compute.
        pin: whether batches cross to the device from pinned memory, ahead of the training, or from
            pageable memory, in its thread; None where that makes no difference.
        workers: of the loader.
    """

    backend: str
    data: str
    batch_size: int
    amp: str | None
    pin: bool | None
    workers: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What the trials of a point gave.

    Attributes:
        together: images/s of the trainer fed by the loader; of the loader where there is no trainer.
        trainer: images/s of the trainer alone, on a batch that stays on the device.
        ratio: together over trainer, trial by trial.
    """

    point: Point
    together: Estimate
    trainer: Estimate | None = None
    ratio: Estimate | None = None


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of each setting, ascending, without repetition."""

    workers: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    amp: tuple[str | None, ...]
    pin: tuple[bool | None, ...]

    def __post_init__(self) -> None:
        for count in self.workers:
            check_range("workers", count, 0)
        for size in self.batch_sizes:
            check_range("batch_size", size, 1)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to choose for one backend over one folder.

    Attributes:
        chosen: the smallest batch within 2% of the best, with the fewest workers that unblock the trainer.
        best: what gave the most images/s.
        verdict: of `bench.report.verdict.judge`, for `chosen`.
    """

    chosen: Measured
    best: Measured
    verdict: str


def drop_axes(axes: Axes, device_type: str, *, computes: bool, cache: str = "none") -> tuple[Axes, list[str]]:
    """`axes` without those that make no difference, and a line for each that had more than one value.

    `computes` is whether the trainer does, `cache` that of the loaders.
    """
    notes = []
    if not computes:
        notes += ["--amp changes nothing for a trainer that does not compute"] if len(axes.amp) > 1 else []
        axes = replace(axes, amp=(None,))
    if device_type != "cuda" or cache == "device":
        why = "without CUDA" if device_type != "cuda" else "with --cache device"
        notes += [f"--pin changes nothing {why}"] if len(axes.pin) > 1 else []
        axes = replace(axes, pin=(None,))
    return axes, [f"{note}: it is left out" for note in notes]


def grid(arms: Iterable[tuple[str, str]], axes: Axes) -> list[Point]:
    """Every combination, in the order of measuring: workers change fastest, then pin, amp, batch size.

    `arms` are pairs of backend and folder. Backends that decode on the device have no axis `pin`: no
    pictures cross to it.
    """
    return [
        Point(backend, data, batch_size, amp, pin, workers)
        for backend, data in arms
        for batch_size, amp, pin, workers in itertools.product(
            axes.batch_sizes,
            axes.amp,
            (None,) if backend in _DECODE_ON_DEVICE else axes.pin,
            axes.workers,
        )
    ]


def prune(point: Point, measured: Sequence[Measured], failed: Mapping[Point, str]) -> str | None:
    """Why `point` need not be measured after these were; None if it must.

    A series is all that differs in workers alone. A point is left out where

    1. fewer workers of its series unblock the trainer (it loses less than 2%): more cannot help;
    2. in its series the largest number of workers measured gave less than 90% of what fewer did: more
       do harm;
    3. at the next smaller batch size at which its other settings were measured, they gave less than half
       of the best that the backend reached there: one of them, be it workers, amp or pin, is clearly wrong;
    4. it, or a smaller batch with the same amp, did not fit into memory.
    """
    too_large = [
        other
        for other in failed
        if (other.backend, other.data, other.amp) == (point.backend, point.data, point.amp)
    ]
    if any(other.batch_size <= point.batch_size for other in too_large):
        return f"batch {min(other.batch_size for other in too_large):,} did not fit into memory"
    same = [m for m in measured if (m.point.backend, m.point.data) == (point.backend, point.data)]
    series = [m for m in same if replace(m.point, workers=0) == replace(point, workers=0)]
    fewer = sorted((m for m in series if m.point.workers < point.workers), key=lambda m: m.point.workers)
    for m in fewer:
        if judge(m.ratio) == KEEPS_UP:
            return f"the trainer does not wait with {_workers(m.point.workers)}"
    if len(fewer) > 1:
        most, best = fewer[-1], max(fewer, key=_rate)
        if _rate(most) < FALLING_SHARE * _rate(best):
            return f"{_workers(most.point.workers)} gave less than {best.point.workers}"
    smaller = [
        m
        for m in same
        if m.point.batch_size < point.batch_size and m.point == replace(point, batch_size=m.point.batch_size)
    ]
    if smaller:
        last = max(smaller, key=lambda m: m.point.batch_size)
        best_rate = max(_rate(m) for m in same if m.point.batch_size == last.point.batch_size)
        if _rate(last) < HOPELESS_SHARE * best_rate:
            share = f"{_rate(last) / best_rate:.0%} of the best"
            return f"with batch {last.point.batch_size:,} these settings gave {share}"
    return None


def plateau(series: Sequence[Measured]) -> Measured:
    """The first of a series, ascending in workers or batch size, within 2% of its best."""
    enough = (1 - NEGLIGIBLE_SHARE) * max(map(_rate, series))
    return next(m for m in series if _rate(m) >= enough)


def recommend(measured: Sequence[Measured], other_cpu: float | None = None) -> list[Recommendation]:
    """What to choose, for each backend over each folder; nothing where `other_cpu` is too much.

    First the smallest batch of which any setting is within 2% of the best throughput, with amp and pin
    as they are best there; then, among its numbers of workers, the fewest that unblock the trainer, or
    else of which that is not distinguishable, or else that are within 2% of the most they reach.

    Args:
        other_cpu: what other processes took of the CPUs meanwhile, see `bench.report.trust`.
    """
    if is_disturbed(other_cpu):
        return []
    arms = dict.fromkeys((m.point.backend, m.point.data) for m in measured)
    return [_recommend([m for m in measured if (m.point.backend, m.point.data) == arm]) for arm in arms]


def _recommend(measured: Sequence[Measured]) -> Recommendation:
    best = max(measured, key=_rate)
    enough = [m for m in measured if _rate(m) >= (1 - NEGLIGIBLE_SHARE) * _rate(best)]
    batch_size = min(m.point.batch_size for m in enough)
    top = max((m for m in enough if m.point.batch_size == batch_size), key=_rate)
    series = sorted(
        (m for m in measured if replace(m.point, workers=0) == replace(top.point, workers=0)),
        key=lambda m: m.point.workers,
    )
    for verdict in (KEEPS_UP, NOT_DISTINGUISHABLE):
        for m in series:
            if judge(m.ratio) == verdict:
                return Recommendation(m, best, verdict)
    chosen = plateau(series)
    return Recommendation(chosen, best, judge(chosen.ratio))


def sentence(recommendation: Recommendation) -> str:
    """A recommendation in words."""
    chosen, best = recommendation.chosen, recommendation.best
    point = chosen.point
    text = f"{point.backend} on {point.data}: choose {settings(point)}: {_rate(chosen):,.0f} images/s"
    if point != best.point:
        share = f"{_rate(chosen) / _rate(best):.0%} of the best"
        text += f", {share} ({_rate(best):,.0f} with {settings(best.point)})"
    if recommendation.verdict == NO_TRAINER or chosen.ratio is None:
        return f"{text}."
    if recommendation.verdict == KEEPS_UP:
        return f"{text}; the trainer does not wait."
    if recommendation.verdict == NOT_DISTINGUISHABLE:
        return f"{text}; the trainer may wait: the trials disagree."
    lost = f"it gets {lost_share(chosen.ratio):.0%} fewer images/s than alone"
    return f"{text}; the trainer waits with every number of workers: {lost}."


def settings(point: Point) -> str:
    """`2 workers, batch 64, amp bf16`."""
    return f"{_workers(point.workers)}, batch {point.batch_size:,}{switches(point)}"


def switches(point: Point) -> str:
    """`, amp bf16, pin off`; empty where they make no difference."""
    amp = "" if point.amp is None else f", amp {point.amp}"
    pin = "" if point.pin is None else f", pin {'on' if point.pin else 'off'}"
    return amp + pin


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _rate(measured: Measured) -> float:
    return measured.together.median
