"""What a result says that was measured: what another loader, and converting, gain over today's. Pure.

A sentence names a winner only where the ranges of several runs lie apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.payback import LINE, TODAY, Cost, Way, advice, does
from bench.report.row import Result, Row
from bench.report.stats import Estimate
from bench.report.trust import disturbance, other_cpu
from bench.report.verdict import KEEPS_UP, NEGLIGIBLE_SHARE
from bench.report.words import percent

RAW_TREE = "raw tree"
CONVERSIONS = "conversions"
"""The entry of `Result.settings`: data -> `seconds` and `size_bytes` of converting once, where measured."""


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


def find_gain(rows: Sequence[Row]) -> Gain:
    """Of rows with one trainer. Today's loader may be that of `--against`, where all were measured alone."""
    ours = [row for row in rows if is_ours(row)]
    alone = all(row.ratio is None for row in ours)
    today = next((row for row in (rows if alone else ours) if row.backend == "imagefolder"), None)
    if today is None:
        return Gain(None, None, ())
    others = sorted((row for row in ours if row is not today), key=lambda row: -rate(row).median)
    line = next((row for row in others if row.data == RAW_TREE and _is_faster(row, today)), None)
    converted = [row for row in others if row.data != RAW_TREE]
    alike = tuple(
        row
        for row in converted
        if rate(row).high >= rate(converted[0]).low and _is_faster(row, today if line is None else line)
    )
    return Gain(today, line, alike)


def _is_faster(row: Row, than: Row) -> bool:
    """In every run, and by more than is worth nothing."""
    enough = rate(row).median >= rate(than).median * (1 + NEGLIGIBLE_SHARE)
    return enough and rate(row).low > rate(than).high


def cost_of(result: Result, row: Row) -> Cost | None:
    """What the data of `row` takes once; None where it is the raw tree."""
    if row.data == RAW_TREE:
        return None
    measured = result.settings.get(CONVERSIONS, {}).get(row.data)
    if measured is not None:
        return Cost(measured["seconds"], measured["size_bytes"])
    pictures = samples_of(result, row)
    if row.image_bytes is None or pictures is None:
        return Cost(None, None)
    return Cost(None, row.image_bytes * pictures)


def samples_of(result: Result, row: Row) -> int | None:
    """Pictures of an epoch; None where the result does not say."""
    data = result.settings.get("data", {}).get(f"{row.backend} on {row.data}")
    return None if data is None else int(data["samples"])


def sentences(result: Result, gpu_price: float | None = None) -> list[str]:
    """What the result says, a few sentences for each trainer.

    Args:
        gpu_price: dollars per hour of the accelerator; None leaves money out.
    """
    names = list(dict.fromkeys(row.trainer_name for row in result.rows if not row.peer))
    said = []
    for name in names:
        rows = [row for row in result.rows if row.trainer_name == name]
        ours = [row for row in rows if is_ours(row)]
        if ours:
            prefix = f"{name}: " if len(names) > 1 else ""
            said.append(prefix + " ".join(_say(result, find_gain(rows), ours, gpu_price)))
    return said


def _say(result: Result, gain: Gain, ours: Sequence[Row], gpu_price: float | None) -> list[str]:
    today = gain.today
    if today is None:
        best = max(ours, key=lambda row: rate(row).median)
        share = busy(best)
        fed = "" if share is None else f" and keeps the accelerator busy {percent(share.median)} of the time"
        return [
            f"Backend `{best.backend}` delivers {best.loader.median:,.0f} images/s{fed}.",
            f"What {TODAY} do was not measured: add the raw tree and backend imagefolder to compare.",
        ]
    now, accelerator = _way(result, today), _accelerator(result, today)
    if today.verdict == KEEPS_UP:
        already = does(now, accelerator, already=True)
        return [f"{already}: neither another loader nor converting gains anything."]
    why_none = _no_winner(result, gain, today, [row for row in ours if row is not today])
    gains = [why_none] if why_none else _gains(result, gain, now, gpu_price)
    return [f"{does(now, accelerator)}.", *gains]


def _no_winner(result: Result, gain: Gain, today: Row, others: Sequence[Row]) -> str:
    """Why nothing is said to be faster than today's; empty where something is."""
    disturbed = disturbance(other_cpu(result.settings))
    if disturbed or not others:
        return disturbed or "No other loader was measured."
    if result.settings["repeats"] < 2:
        return "One run of each names no winner: use --repeats 2 or more."
    if gain.best:
        return ""
    if all(rate(row).high < rate(today).low for row in others):
        return "No other loader here is faster."
    return f"The ranges of {result.settings['repeats']} runs overlap, so no loader wins."


def _gains(result: Result, gain: Gain, now: Way, gpu_price: float | None) -> list[str]:
    line = None if gain.line is None else _way(result, gain.line)
    converted = [_way(result, row) for row in gain.converted]
    said = advice(now, line, converted, samples_of(result, gain.best[0]))
    if not converted and any(row.data != RAW_TREE for row in result.rows if is_ours(row)):
        said.append("Converting gains no more.")
    if gpu_price is not None and now.busy is not None:
        speedup = rate(gain.best[0]).median / now.images_per_s
        said.append(
            f"At ${gpu_price:,.2f} an hour, what costs $100 today then costs ${100 / speedup:,.0f}: "
            f"${gpu_price * (1 - 1 / speedup):,.2f} saved of every hour."
        )
    return said


def _way(result: Result, row: Row) -> Way:
    share = busy(row)
    if row.backend == "imagefolder":
        name = TODAY
    elif row.data == RAW_TREE:
        name = LINE if row.backend == "pytorch" else f"{LINE} with backend {row.backend}"
    else:
        name = row.data if row.data.startswith(row.backend) else f"{row.data} for backend {row.backend}"
    return Way(name, rate(row).median, None if share is None else share.median, cost_of(result, row))


def _accelerator(result: Result, row: Row) -> str:
    if row.trainer_name.startswith("emulated") and row.trainer is not None:
        return f"an accelerator of {row.trainer.median:,.0f} images/s"
    on_cpu = str(result.settings.get("device", "cpu")) == "cpu"
    return f"{row.trainer_name} on this CPU" if on_cpu else "this accelerator"
