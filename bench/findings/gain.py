"""What converting gains, in one sentence that needs no knowledge of loaders. Pure.

The loader that people have today is compared with the fastest one of the same result. A sentence names a
winner only where the ranges of several runs lie apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.findings.result import Result, Row
from bench.findings.stats import Estimate
from bench.findings.trust import disturbance, other_cpu
from bench.findings.verdict import KEEPS_UP, NEGLIGIBLE_SHARE

RAW_TREE = "raw tree"
CONVERSIONS = "conversions"
"""The entry of `Result.settings`: data -> `seconds` and `size_bytes` of converting once, where measured."""
_TODAY = {"imagefolder": "ImageFolder and DataLoader", "pytorch": "`pytorch` on the raw tree"}
_AT_LEAST = "at least "


@dataclass(frozen=True, slots=True)
class Cost:
    """What it takes once to have the data of a row.

    Attributes:
        seconds: of converting; None where not known.
        size_bytes: on disk; None where not known.
        at_least: whether `seconds` are those of decoding alone, not of a conversion that ran.
    """

    seconds: float | None
    size_bytes: float | None
    at_least: bool = False

    @property
    def words(self) -> str:
        """As in '24 s, 0.3 GB'."""
        bound = _AT_LEAST if self.at_least else ""
        time = "time not measured" if self.seconds is None else f"{bound}{_time(self.seconds)}"
        return time if self.size_bytes is None else f"{time}, {_size(self.size_bytes)}"


@dataclass(frozen=True, slots=True)
class Gain:
    """The loader of today and the fastest ones, fed to one trainer or alone.

    Attributes:
        today: None where neither `imagefolder` nor `pytorch` on the raw tree was measured.
        best: those that are fastest, all that overlap with the fastest; the ones that need no conversion
            alone, where one of these is among them.
        told_apart: whether every run of the best was faster than every run of today's.
    """

    today: Row | None
    best: tuple[Row, ...]
    told_apart: bool

    @property
    def speedup(self) -> float | None:
        """Time of training today over that with the best; None where they cannot be told apart."""
        if self.today is None or not self.told_apart:
            return None
        return rate(self.best[0]).median / rate(self.today).median


def rate(row: Row) -> Estimate:
    """Images/s of training: fed to the trainer, or of the loader alone where there was none."""
    return row.together or row.loader


def busy(row: Row) -> Estimate | None:
    """Share of the time, 0 to 1, that the accelerator computes; None where no trainer was fed."""
    if row.ratio is None:
        return None
    return Estimate(*(min(1.0, part) for part in (row.ratio.median, row.ratio.low, row.ratio.high)))


def is_ours(row: Row) -> bool:
    """Whether it is a loader that one could train with here: no other library's, no noise."""
    return not row.peer and row.backend != "synthetic"


def is_limit(row: Row) -> bool:
    """Whether it only copies pictures, as `gather` of `bench.peers.serving`: no loader serves faster."""
    return row.peer and row.backend.startswith("gather")


def saved_share(row: Row, today: Row) -> float | None:
    """Share, 0 to 1, of today's time of training that `row` saves; None where within noise."""
    return 1 - rate(today).median / rate(row).median if rate(row).low > rate(today).high else None


def find_gain(rows: Sequence[Row]) -> Gain | None:
    """Of rows with one trainer; None where there is nothing to train with.

    Today's loader may be that of `--against`, where all were measured alone.
    """
    ours = [row for row in rows if is_ours(row)]
    alone = all(row.ratio is None for row in ours)
    today = next(
        (
            row
            for name in _TODAY
            for row in (rows if alone else ours)
            if row.backend == name and (name != "pytorch" or row.data == RAW_TREE)
        ),
        None,
    )
    others = [row for row in ours if row is not today]
    if not others:
        return None if today is None else Gain(today, (), told_apart=False)
    top = max(others, key=lambda row: rate(row).median)
    alike = sorted(
        (row for row in others if rate(row).high >= rate(top).low), key=lambda row: -rate(row).median
    )
    free = [row for row in alike if row.data == RAW_TREE]
    best = tuple(free or alike)
    apart = today is not None and all(rate(row).low > rate(today).high for row in best)
    return Gain(today, best, apart)


def cost_of(result: Result, row: Row) -> Cost | None:
    """What the data of `row` takes once; None where it is the raw tree."""
    if row.data == RAW_TREE:
        return None
    measured = result.settings.get(CONVERSIONS, {}).get(row.data)
    if measured is not None:
        return Cost(measured["seconds"], measured["size_bytes"])
    size_bytes = None
    pictures = samples_of(result, row)
    if row.image_bytes is not None and pictures is not None:
        size_bytes = row.image_bytes * pictures
    wanted = f"Converting to {row.data}"
    predicted = (
        change.seconds for other in result.rows for change in other.advice.changes if change.what == wanted
    )
    seconds = next((s for s in predicted if s), None)
    return Cost(seconds, size_bytes, at_least=seconds is not None)


def samples_of(result: Result, row: Row) -> int | None:
    """Pictures of an epoch; None where the result does not say."""
    data = result.settings.get("data", {}).get(f"{row.backend} on {row.data}")
    return None if data is None else int(data["samples"])


def pays_from_epoch(result: Result, row: Row, today: Row) -> int | None:
    """The first epoch at whose end converting has saved more time than it took; None where not known."""
    cost, pictures = cost_of(result, row), samples_of(result, row)
    if cost is None or cost.seconds is None or pictures is None:
        return None
    saved_s = pictures / rate(today).median - pictures / rate(row).median
    return max(1, math.ceil(cost.seconds / saved_s)) if saved_s > 0 else None


def sentences(result: Result, gpu_price: float | None = None) -> list[str]:
    """What the result says, one sentence or a few for each trainer.

    Args:
        gpu_price: dollars per hour of the accelerator; None leaves money out.
    """
    names = list(dict.fromkeys(row.trainer_name for row in result.rows if not row.peer))
    said = []
    for name in names:
        gain = find_gain([row for row in result.rows if row.trainer_name == name])
        if gain is not None:
            prefix = f"{name}: " if len(names) > 1 else ""
            said.append(prefix + " ".join(_say(result, gain, gpu_price)))
    return said


def _say(result: Result, gain: Gain, gpu_price: float | None) -> list[str]:
    today = gain.today
    if today is None:
        best = gain.best[0]
        return [
            f"{_sentence_start(_does(result, [best]))}{'' if best.ratio else ' images/s'}.",
            "What ImageFolder and DataLoader do was not measured: add the raw tree to compare.",
        ]
    now = f"{_TODAY[today.backend]} {_today_does(result, today)}"
    if today.verdict == KEEPS_UP:
        already = now.replace(" keep ", " already keep ").replace(" keeps ", " already keeps ")
        return [f"{already}: converting gains nothing here."]
    if not gain.best:
        return [f"{now}.", "No other loader was measured."]
    return _compare(result, gain, today, now, gpu_price)


def _compare(result: Result, gain: Gain, today: Row, now: str, gpu_price: float | None) -> list[str]:
    """Whether the best is better than today's, and by how much; `now` says what today's does."""
    best = gain.best[0]
    both = f"{now}. {_start(result, [best])}."
    disturbed = disturbance(other_cpu(result.settings))
    if disturbed:
        return [both, disturbed]
    if result.settings["repeats"] < 2:
        return [
            both,
            "One run of each names no winner: use --repeats 2 or more.",
        ]
    if not gain.told_apart or rate(best).median < rate(today).median * (1 + NEGLIGIBLE_SHARE):
        if rate(best).high < rate(today).low:
            converted = any(row.data != RAW_TREE for row in result.rows if is_ours(row))
            return [f"{now}.", f"No other loader here is faster{': converting gains nothing' * converted}."]
        return [
            both,
            f"The ranges of {result.settings['repeats']} runs overlap, so no loader wins.",
        ]
    return [f"{now}.", *_gains(result, gain, today, gpu_price)]


def _gains(result: Result, gain: Gain, today: Row, gpu_price: float | None) -> list[str]:
    best = gain.best[0]
    speedup = rate(best).median / rate(today).median
    cost = cost_of(result, best)
    ends = f": training ends {_sooner(speedup)}" if best.ratio is not None else f": {_times(speedup)} as many"
    said = [f"{_start(result, gain.best)}{ends}."]
    epoch = pays_from_epoch(result, best, today)
    if epoch is not None and best.ratio is not None:
        earliest = " at the earliest" if cost is not None and cost.at_least else ""
        said.append(f"It pays from epoch {epoch:,} on{earliest}.")
    if gpu_price is not None and best.ratio is not None:
        said.append(
            f"At ${gpu_price:,.2f} an hour, what costs $100 today then costs ${100 / speedup:,.0f}: "
            f"${gpu_price * (1 - 1 / speedup):,.2f} saved of every hour."
        )
    return said


def _start(result: Result, rows: Sequence[Row]) -> str:
    """What it takes to have `rows`, and what they do."""
    cost = cost_of(result, rows[0])
    if cost is None:
        return f"With no conversion {_does(result, rows)}"
    if len(rows) == 1:
        return f"After converting once ({cost.words}) {_does(result, rows)}"
    return f"After converting once {_does(result, rows, priced=True)}"


def _today_does(result: Result, row: Row) -> str:
    plural = row.backend == "imagefolder"
    share = busy(row)
    if share is None:
        return f"deliver{'' if plural else 's'} {row.loader.median:,.0f} images/s"
    return f"keep{'' if plural else 's'} {_accelerator(result, row)} busy {percent(share.median)} of the time"


def _does(result: Result, rows: Sequence[Row], *, priced: bool = False) -> str:
    """'`shards` keep it busy 99%', of the first of `rows`; others as fast are named beside it."""
    costs = [cost_of(result, row) if priced else None for row in rows]
    named = " or ".join(
        f"`{row.backend}`" + (f" ({cost.words})" if cost else "")
        for row, cost in zip(rows, costs, strict=True)
    )
    plural = len(rows) == 1 and rows[0].backend == "shards"
    share = busy(rows[0])
    if share is None:
        return f"{named} deliver{'' if plural else 's'} {rows[0].loader.median:,.0f}"
    return f"{named} keep{'' if plural else 's'} it busy {percent(share.median)}"


def _sentence_start(text: str) -> str:
    """As the first words of a paragraph, where 'it' has not been named."""
    return text.replace(" it busy", " the accelerator busy")


def _accelerator(result: Result, row: Row) -> str:
    if row.trainer_name.startswith("emulated") and row.trainer is not None:
        return f"an accelerator of {row.trainer.median:,.0f} images/s"
    on_cpu = str(result.settings.get("device", "cpu")) == "cpu"
    return f"{row.trainer_name} on this CPU" if on_cpu else "this accelerator"


def percent(share: float) -> str:
    """Whole per cent; below 1% one digit more, and 100% only of what is."""
    if 0 < share < 0.01:
        return f"{share:.1%}"
    return f"{share:.0%}" if share >= 0.9995 else f"{min(share, 0.994):.0%}"


def _sooner(speedup: float) -> str:
    return f"{1 - 1 / speedup:.0%} sooner" if speedup < 1.5 else f"{_times(speedup)} sooner"


def _times(speedup: float) -> str:
    return f"{speedup:.1f} times" if speedup < 10 else f"{speedup:.0f} times"


def _time(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:,.0f} MB"
