"""What the rates of loaders mean, in one vocabulary. Pure.

Of one loader: its bottleneck, what the trainer waits for, what would fix it. Of all that one trainer was fed
from: what another loader, and converting, gain over what people have today, torchvision's ImageFolder in a
DataLoader. The first advice is to change that line to `loaders.build`, which takes nothing; the second is to
convert. Rows may be measured or predicted; a sentence names a winner only where the ranges of several runs
lie apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from bench.report.row import (
    ALL_BUSY,
    RAW_TREE,
    SYNTHETIC,
    TODAY_BACKEND,
    BatchTimes,
    Change,
    Result,
    Row,
    Spikes,
    more_workers_can_help,
)
from bench.report.stats import NEGLIGIBLE_SHARE, Estimate, disturbance, exceeds, is_disturbed, other_cpu
from bench.report.words import counted, duration, percent
from precache.cli.commandline import human_bytes

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
TODAY = "ImageFolder and DataLoader"
"""The baseline, in sentences."""
LINE = "`loaders.build`"
"""What replaces it, in sentences."""
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


@dataclass(frozen=True, slots=True)
class Gain:
    """What people have today, and what does better, fed to one trainer or alone.

    Attributes:
        today: ImageFolder in a DataLoader; None where it was not measured.
        line: the fastest loader of ours on the tree as it is; None unless it is faster than today's.
        converted: the fastest on converted data, and those that overlap with it, as far as they are faster
            than today's and than `line`.
    """

    today: Row | None
    line: Row | None
    converted: tuple[Row, ...]

    @property
    def best(self) -> tuple[Row, ...]:
        """What is fastest; empty where nothing can be told to be faster than today's."""
        return self.converted or (() if self.line is None else (self.line,))


def find_gain(rows: Sequence[Row], today: Row | None = None) -> Gain:
    """Of rows with one trainer. Today's loader may be that of `--against`, where all were measured alone.

    `today` stands for it where ImageFolder could not be measured.
    """
    ours = [row for row in rows if row.is_ours]
    alone = all(row.ratio is None for row in ours)
    today = next((row for row in (rows if alone else ours) if row.backend == TODAY_BACKEND), today)
    if today is None:
        return Gain(None, None, ())
    others = sorted((row for row in ours if row is not today), key=lambda row: -row.rate.median)
    line = next((row for row in others if row.data == RAW_TREE and exceeds(row.rate, today.rate)), None)
    converted = [row for row in others if row.data != RAW_TREE]
    alike = tuple(
        row
        for row in converted
        if row.rate.high >= converted[0].rate.low and exceeds(row.rate, (line or today).rate)
    )
    return Gain(today, line, alike)


def saved_share(row: Row, today: Row) -> float | None:
    """Share, 0 to 1, of today's time of training that `row` saves; None where within noise."""
    return 1 - today.rate.median / row.rate.median if row.rate.low > today.rate.high else None


def best_rows(result: Result) -> list[Row]:
    """Of each trainer what is faster than today's loader by most; beside other busy processes none is."""
    if is_disturbed(other_cpu(result.settings)):
        return []
    names = dict.fromkeys(row.trainer_name for row in result.rows if row.is_ours)
    by_trainer = ([row for row in result.rows if row.trainer_name == name] for name in names)
    return [row for rows in by_trainer for row in find_gain(rows).best]


def sentences(result: Result, gpu_price: float | None = None) -> list[str]:
    """What the result says, a text for each trainer; `gpu_price` as for `answers`."""
    return [" ".join(told) for told in answers(result, gpu_price)]


def answers(result: Result, gpu_price: float | None = None) -> list[list[str]]:
    """What the result says, a few sentences for each trainer.

    Args:
        gpu_price: dollars per hour of the accelerator; None leaves money out.
    """
    names = list(dict.fromkeys(row.trainer_name for row in result.rows if not row.peer))
    said = []
    for name in names:
        rows = [row for row in result.rows if row.trainer_name == name]
        ours = [row for row in rows if row.is_ours]
        if not ours:
            continue
        told = answer(
            rows,
            accelerator=what_is_fed(result, ours[0]),
            images=next((count for row in ours if (count := result.samples(row))), None),
            repeats=result.settings["repeats"],
            others=other_cpu(result.settings),
            gpu_price=gpu_price,
        )
        told[0] = (f"{name}: " if len(names) > 1 else "") + told[0]
        said.append(told)
    return said


def answer(
    rows: Sequence[Row],
    *,
    accelerator: str,
    images: int | None,
    repeats: int,
    others: float | None,
    gpu_price: float | None = None,
    today: Row | None = None,
) -> list[str]:
    """What to do, of rows with one trainer: what today's loader does, the other line, converting.

    Args:
        accelerator: what is fed, in words.
        images: of an epoch; None where not known.
        repeats: of which the ranges are.
        others: what other processes took of the CPUs, see `bench.report.stats`.
        gpu_price: dollars per hour of the accelerator; None leaves money out.
        today: see `find_gain`.
    """
    gain, ours = find_gain(rows, today), [row for row in rows if row.is_ours]
    today = gain.today
    if today is None:
        best = max(ours, key=lambda row: row.rate.median)
        share = best.busy
        fed = "" if share is None else f" and keeps the accelerator busy {percent(share.median)} of the time"
        return [
            f"Backend `{best.backend}` delivers {best.loader.median:,.0f} images/s{fed}.",
            f"What {TODAY} do was not measured: add the raw tree and backend imagefolder to compare.",
        ]
    if judge(today.ratio) == KEEPS_UP:  # noise can only lower that
        already = does(today, accelerator, already=True)
        return [f"{already}: neither another loader nor converting gains anything."]
    why_none = _no_winner(gain, today, [row for row in ours if row is not today], repeats, others)
    if why_none:
        return [f"{does(today, accelerator)}.", why_none]
    said = [f"{does(today, accelerator)}.", *what_to_do(gain, images)]
    if not gain.converted and any(row.data != RAW_TREE for row in ours):
        said.append("Converting gains no more.")
    if gpu_price is not None and today.busy is not None:
        speedup = gain.best[0].rate.median / today.rate.median
        said.append(
            f"At ${gpu_price:,.2f} an hour, what costs $100 today then costs ${100 / speedup:,.0f}: "
            f"${gpu_price * (1 - 1 / speedup):,.2f} saved of every hour."
        )
    return said


def _no_winner(gain: Gain, today: Row, other: Sequence[Row], repeats: int, others: float | None) -> str:
    """Why nothing is said to be faster than today's; empty where something is."""
    disturbed = disturbance(others)
    if disturbed or not other:
        return disturbed or "No other loader was measured."
    if repeats < 2:
        return "One run of each names no winner: use --repeats 2 or more."
    if gain.best:
        return ""
    if all(row.rate.high < today.rate.low for row in other):
        return "No other loader here is faster."
    return f"The ranges of {repeats} runs overlap, so no loader wins."


def does(today: Row, accelerator: str, *, already: bool = False) -> str:
    """What the baseline does, without a full stop: the first words of every answer."""
    several = today.backend == TODAY_BACKEND
    name = way(today)
    verb = ("already " if already else "") + ("deliver" if today.busy is None else "keep")
    verb += "" if several else "s"
    if today.busy is None:
        return f"{name} {verb} {today.rate.median:,.0f} images/s"
    return f"{name} {verb} {accelerator} busy {percent(today.busy.median)} of the time"


def what_to_do(gain: Gain, images: int | None) -> list[str]:
    """What to do instead of today's, a sentence for each step: the other line, then converting."""
    today, line = gain.today, gain.line
    assert today is not None
    said = [] if line is None else [f"Change that line to {way(line)}: {_effect(line, today)}."]
    if not gain.converted:
        return said
    best = gain.converted[0]
    names = " or ".join(f"{way(row)} ({cost(row)})" for row in gain.converted)
    said.append(f"Convert to {names}{', too' if line is not None else ''}: {_effect(best, today)}.")
    if best.busy is not None and best.convert_s is not None and images is not None:
        count = epochs_to_pay(best.convert_s, images, today.rate.median, best.rate.median)
        pays = "does not pay" if count is None else f"pays after {counted(count, 'epoch')}"
        said.append(f"Converting {pays}.")
    return said


def way(row: Row) -> str:
    """How one trains from it, as sentences call it."""
    if row.backend == TODAY_BACKEND:
        return TODAY
    if row.data == RAW_TREE:
        return LINE if row.backend == "pytorch" else f"{LINE} with backend {row.backend}"
    return row.data if row.data.startswith(row.backend) else f"{row.data} for backend {row.backend}"


def cost(row: Row) -> str:
    """What converted data takes once, as in '24.2 s, 286 MiB'."""
    time = "time not measured" if row.convert_s is None else duration(row.convert_s)
    return time if row.size_bytes is None else f"{time}, {human_bytes(row.size_bytes)}"


def epochs_to_pay(conversion_s: float, images: int, today: float, then: float) -> int | None:
    """After how many epochs of `images` converting has saved the time that it took; None if never.

    Args:
        today, then: images/s of training with the baseline, and with what was converted.
    """
    saved_s = images * (1 / today - 1 / then)  # an epoch
    return max(1, math.ceil(conversion_s / saved_s)) if saved_s > 0 else None


def times(speedup: float) -> str:
    """'3.5 times', '12 times'."""
    return f"{speedup:.1f} times" if speedup < 10 else f"{speedup:.0f} times"


def _effect(row: Row, today: Row) -> str:
    speedup = row.rate.median / today.rate.median
    if row.busy is None:
        return f"{row.rate.median:,.0f} images/s, {times(speedup)} as many"
    # below 1.5 '1.1 times sooner' is read as more than it is
    sooner = f"{1 - 1 / speedup:.0%}" if speedup < 1.5 else times(speedup)
    return f"it is busy {percent(row.busy.median)}, and training ends {sooner} sooner than today"


def what_is_fed(result: Result, row: Row) -> str:
    """What the row's loader feeds, in words."""
    if row.trainer_name.startswith("emulated") and row.trainer is not None:
        return f"an emulated accelerator of {row.trainer.median:,.0f} images/s"
    on_cpu = str(result.settings.get("device", "cpu")) == "cpu"
    return f"{row.trainer_name} on this CPU" if on_cpu else "this accelerator"
