"""What the rates of one loader mean: the bottleneck, what the trainer waits for, what would fix it. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import numpy.typing as npt

from bench.report.row import (
    ALL_BUSY,
    RAW_TREE,
    SYNTHETIC,
    BatchTimes,
    Change,
    Row,
    Spikes,
    more_workers_can_help,
)
from bench.report.stats import NEGLIGIBLE_SHARE, Estimate, exceeds
from bench.report.words import counted, percent

KEEPS_UP = "keeps up"
LOADER_BINDS = "the loader is the bottleneck"
NOT_DISTINGUISHABLE = "not distinguishable"
WITHIN_NOISE = "within noise"
"""How sentences say NOT_DISTINGUISHABLE, which files hold."""
NO_TRAINER = "-"
COLD_FETCH = "cold fetch"
# Stages are timed apart on other pictures than the whole, and in threads: they differ by that much anyway.
_PROBE_ERROR = 0.2
_SHOWN_S = 5e-5  # shorter waits are 0.0 ms
# Of normal noise about one batch in 20,000 exceeds the quicker half's median by this many deviations.
_DEVIATIONS = 8.0
_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, of normal noise
_SHORT_SHARE = 0.1  # of a batch's time: a shorter excess is not worth a word
_FEWEST_BATCHES = 8
_REGULAR_SHARE = 0.75
_STALLS = {"storage": "fetch", "decode": "prep", "collate": "prep", "transfer": "transfer"}
_WORDS = {"decode": "decoding", "collate": "collating", "transfer": "the transfer"}


def judge(ratio: Estimate | None) -> str:
    """Whether the trainer waits for the loader.

    `ratio` is of images/s with the loader over images/s on a batch that stays on the device, repeat
    by repeat; None without a trainer. Where one repeat says that the loader keeps up and the median
    that it does not, the two are not distinguishable.
    """
    if ratio is None:
        return NO_TRAINER
    if 1 - ratio.median < NEGLIGIBLE_SHARE:
        return KEEPS_UP
    if 1 - ratio.high < NEGLIGIBLE_SHARE:
        return NOT_DISTINGUISHABLE
    return LOADER_BINDS


def lost_share(ratio: Estimate) -> float:
    """Share, 0 to 1, of the trainer's own rate that is lost when the loader feeds it."""
    return max(0.0, 1 - ratio.median)


def explained(rows: Sequence[Row], batch_size: int, workers: int, cpus: int) -> list[Row]:
    """Rows of one trainer, each with its stages, stalls, prediction, bottleneck and advice.

    Args:
        rows: all that were measured beside one another.
        workers: of each loader.
        cpus: of this machine.
    """
    found = []
    for row in rows:
        if row.backend == SYNTHETIC:  # noise: nothing to advise
            found.append(replace(row, stages=stage_rates(row), predicted=predicted(row)))
            continue
        changes = known_changes(row, [other for other in rows if other is not row], workers, cpus)
        found.append(
            replace(
                row,
                stages=stage_rates(row),
                stalls=stalls(row, batch_size),
                predicted=predicted(row),
                binds=bottleneck(row),
                advice=advise(row, changes),
                changes=tuple(changes),
            )
        )
    return found


def predicted(row: Row) -> float | None:
    """Images/s of the trainer fed from a warm cache: those of the slowest part."""
    if row.trainer is None:
        return None
    return min(part.median for part in (row.loader, row.trainer, row.transfer) if part is not None)


def supply(row: Row) -> Estimate:
    """Images/s that reach the trainer at most: the loader's, cold where that is slower, or the transfer's."""
    rates = [row.loader, row.cold if row.reads_cold else None, row.transfer]
    return min((rate for rate in rates if rate is not None), key=lambda rate: rate.median)


def stage_seconds(row: Row, *, cold: bool = True) -> dict[str, Estimate]:
    """Seconds per image that each stage adds to the loader's own; what is left over is `Row.rest`.

    `cold`: storage is that of a cold disk, where it makes a difference.
    """
    whole = _seconds(row.loader)
    timed = {"storage": row.read, "decode": row.decode, "transfer": row.transfer}
    parts = {name: _seconds(rate) for name, rate in timed.items() if rate is not None}
    left = Estimate(
        whole.median - sum(part.median for part in parts.values()),
        whole.low - sum(part.high for part in parts.values()),
        whole.high - sum(part.low for part in parts.values()),
    )
    if left.median > 0:
        parts[row.rest] = left
    if cold and row.cold is not None and row.reads_cold:
        slow = _seconds(row.cold)
        parts["storage"] = Estimate(slow.median - whole.median, slow.low - whole.high, slow.high - whole.low)
    return parts


def stage_rates(row: Row) -> dict[str, float]:
    """Images/s that each stage could do alone."""
    rates = {name: 1 / part.median for name, part in stage_seconds(row).items()}
    if row.trainer is not None:
        rates["compute"] = row.trainer.median
    return rates


def bottleneck(row: Row) -> str | None:
    """The narrowest stage; None where two cannot be told apart, or the parts contradict the whole."""
    if row.trainer is not None:
        fed, given = judge(row.ratio), supply(row)
        if given.low > row.trainer.high:
            return "compute" if fed == KEEPS_UP else None
        if given.high >= row.trainer.low or (fed == KEEPS_UP and not row.reads_cold):
            return None
    parts = stage_seconds(row)
    first, *others = sorted(parts, key=lambda name: -parts[name].median)
    if others and parts[first].low <= parts[others[0]].high * (1 + _PROBE_ERROR):
        return None
    return first


def stalls(row: Row, batch_size: int) -> dict[str, float]:
    """Seconds per batch that the trainer waits for "fetch" (storage), "prep" and "transfer", warm cache.

    The wait is shared out as the loader's stages are, so that these add up to it; it is "fetch or
    prep" where storage cannot be told from the rest. `COLD_FETCH` is what a cold cache would add, and only
    there where that can be told.
    """
    if row.trainer is None or row.together is None:
        return {}
    lost_s = {"fetch": 0.0, "prep": 0.0, "transfer": 0.0}
    trainer = row.trainer.median
    warm_s = max(0.0, batch_size / row.together.median - batch_size / trainer)
    parts = stage_seconds(row, cold=False)
    total = sum(part.median for part in parts.values())
    for name, part in parts.items():
        stall = " or ".join(_STALLS[stage] for stage in name.split(" or "))
        lost_s[stall] = lost_s.get(stall, 0.0) + warm_s * part.median / total
    if row.cold is not None and row.reads_cold:
        cold_s = batch_size / min(trainer, row.cold.median)
        lost_s[COLD_FETCH] = cold_s - batch_size / min(trainer, row.loader.median)
    return lost_s


def known_changes(row: Row, others: Sequence[Row], workers: int, cpus: int) -> list[Change]:
    """What one could do about the loader of `row`: what was measured beside it, and a worker per CPU."""
    found = []
    for other in others:
        if other.backend != SYNTHETIC:
            converts = other.data not in (RAW_TREE, row.data)
            what = f"Converting to {other.data}" if converts else f"Backend {other.backend} on {other.data}"
            found.append(Change(what, reached(other), True))
    cpu_share = row.monitor.mean.get("cpu_share") if row.monitor is not None else None
    if more_workers_can_help(workers, cpus, cpu_share):
        parts = [Estimate(*[row.loader.median * cpus / workers] * 3), row.trainer, row.transfer]
        scaled = min((part for part in parts if part is not None), key=lambda part: part.median)
        found.append(Change(f"{cpus} workers, one per CPU,", scaled, False))
    return found


def reached(row: Row) -> Estimate:
    """Images/s of training, from a cold disk where that is slower."""
    return min(row.rate, supply(row), key=lambda rate: rate.median) if row.reads_cold else row.rate


def advise(row: Row, changes: Sequence[Change]) -> str:
    """The bottleneck, and the change that gains most, by more than is worth nothing and than noise."""
    found, now = bottleneck(row), reached(row)
    if found == "compute":
        return _finding(row, found)
    gaining = [change for change in changes if exceeds(change.images_per_s, now)]
    if not gaining:
        return f"{_finding(row, found)} Nothing known here would be faster."
    best = max(gaining, key=lambda change: (change.images_per_s.median, change.measured))
    said = "gave" if best.measured else "is predicted to give"
    return f"{_finding(row, found)} {best.what} {said} {best.images_per_s.median:,.0f}."


def observations(row: Row) -> list[str]:
    """What else is worth saying of a row, a sentence each: waits, prediction, stalls, spikes, limits."""
    said = []
    if row.data_wait is not None and row.busy is not None:
        said.append(
            f"The trainer waited {percent(row.data_wait.median)} of the time, and the accelerator was busy "
            f"{percent(row.busy.median)}; MLPerf Storage asks for 90%."
        )
    if row.predicted is not None and row.together is not None:
        measured = row.together.median
        off = measured / row.predicted - 1
        said.append(f"Predicted {row.predicted:,.0f} images/s, measured {measured:,.0f} ({off:+.0%}).")
    if row.first_step_s is not None and row.step_s:
        first, usual = _ms(row.first_step_s.median), _ms(median(row.step_s))
        said.append(f"The first step took {first}, the others {usual} (median).")
    waits = [
        f"{name} {_ms(seconds)}"
        for name, seconds in row.stalls.items()
        if name != COLD_FETCH and seconds >= _SHOWN_S
    ]
    if waits and judge(row.ratio) != KEEPS_UP:
        said.append(f"A batch waited for {', '.join(waits)}.")
    if COLD_FETCH in row.stalls:
        said.append(f"From a cold disk each batch would take {_ms(row.stalls[COLD_FETCH])} more.")
    said += row.spikes.explanation if row.spikes is not None else ()
    keeps_up = judge(row.ratio) == KEEPS_UP
    return said + [flag for flag in row.flags if not (keeps_up and flag.startswith(ALL_BUSY))]


def _finding(row: Row, found: str | None) -> str:
    given = supply(row)
    against = f" against {row.trainer.median:,.0f} of the trainer" if row.trainer else ""
    files = (
        "" if row.cold is None else " from a cold disk" if given is row.cold else " with the files in memory"
    )
    if found is None and row.trainer and given.low > row.trainer.high and judge(row.ratio) == LOADER_BINDS:
        return (
            f"no single stage is the bottleneck{files}: the loader alone reaches {given.median:,.0f} images/s"
            f"{against}, and yet the trainer waits, because batches come unevenly or both share the CPUs."
        )
    if found is None:
        return (
            f"no stage stands out as the bottleneck{files}, {WITHIN_NOISE}: {given.median:,.0f} images/s"
            f"{against}."
        )
    if found == "compute" and row.trainer is not None:
        return (
            f"the trainer itself is the bottleneck: it takes {row.trainer.median:,.0f} images/s and the "
            f"loader could give {given.median:,.0f}{files}. Only a faster step would help."
        )
    slow = "is the bottleneck" if row.trainer else "takes most of the loader's time"
    named = " or ".join(_WORDS.get(stage, stage) for stage in found.split(" or "))
    text = f"{named} {slow}{files}: {given.median:,.0f} images/s{against}"
    if found.startswith("storage or "):
        without = " without --cold" if row.cold is None else ""
        text += f"; the files were not in memory before, so the two cannot be told apart{without}"
    return f"{text}."


def _seconds(rate: Estimate) -> Estimate:
    return Estimate(1 / rate.median, 1 / rate.high, 1 / rate.low)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def analyse(
    wait_s: Sequence[float], step_s: Sequence[float], epoch_starts: Sequence[int], workers: int
) -> BatchTimes:
    """Find spikes, their period, and waits for the first batches of epochs: averages hide them.

    Args:
        wait_s: float [n], how long the trainer waited for each batch, in seconds.
        step_s: float [n], how long its step then took, in seconds.
        epoch_starts: positions of batches that were the first of an epoch.
        workers: of the loader.
    """
    waits, steps = np.asarray(wait_s, dtype=np.float64), np.asarray(step_s, dtype=np.float64)
    starts = sorted(set(epoch_starts))
    typical_s = float(np.median(waits + steps)) if len(waits) else 0.0
    wait_spikes, step_spikes = _spikes(waits, starts, typical_s), _spikes(steps, starts, typical_s)
    said = []
    if wait_spikes.batches:
        mean = _ms(float(waits[list(wait_spikes.batches)].mean()))
        if wait_spikes.period is None:
            said.append(f"{counted(len(wait_spikes.batches), 'batch', 'batches')} waited {mean} on average.")
        else:
            cause = f"not the number of workers ({workers}): look for what happens at that distance"
            if wait_spikes.period == workers:
                cause = "as many as the loader has workers: it cannot keep up"
            said.append(f"Every {wait_spikes.period} batches the trainer waits {mean} on average, {cause}.")
    if step_spikes.batches:
        slow = counted(len(step_spikes.batches), "batch", "batches")
        said.append(
            f"{slow} had a step of more than {_ms(step_spikes.above_s or 0.0)}: not the loader's doing."
        )
    if starts:
        others = np.delete(waits, starts)
        usual_s = float(np.median(others)) if len(others) else 0.0
        more_s = median(max(0.0, float(waits[start]) - usual_s) for start in starts)
        if more_s >= _SHORT_SHARE * typical_s:
            said.append(f"The first batch of an epoch waits {_ms(more_s)} more than others do (median).")
    return BatchTimes(wait_spikes, step_spikes, tuple(said))


def _spikes(series: npt.NDArray[np.float64], starts: list[int], typical_s: float) -> Spikes:
    steady = np.setdiff1d(np.arange(len(series)), starts)
    if len(steady) < _FEWEST_BATCHES:
        return Spikes()
    # Two workers that cannot keep up make every second batch a spike: the median of all would then lie
    # between the spikes and the rest, and their deviation from it would be that of everything.
    quicker = np.sort(series[steady])[: len(steady) // 2]
    base = float(np.median(quicker))
    deviation = _TO_SIGMA * float(np.median(np.abs(quicker - base)))
    # Beside waits of 200 ms that come again and again, one of 20 ms is no spike.
    halfway = (float(np.quantile(series[steady], 0.9)) - base) / 2
    above_s = base + max(_DEVIATIONS * deviation, _SHORT_SHARE * typical_s, halfway)
    batches = [int(batch) for batch in steady if series[batch] > above_s]
    return Spikes(tuple(batches), above_s, _period(batches, starts, len(steady)))


def _period(batches: list[int], starts: list[int], steady: int) -> int | None:
    """The distance that most neighbouring spikes of one epoch have, if it explains the whole series."""
    epochs = np.searchsorted(starts, batches, side="right")
    distances = np.diff(batches)[np.diff(epochs) == 0]
    if len(distances) < 3:
        return None
    period = int(median(distances.tolist()))
    regular = np.mean(distances == period) >= _REGULAR_SHARE
    throughout = len(batches) * period >= _REGULAR_SHARE * steady
    return period if regular and throughout and period > 1 else None
