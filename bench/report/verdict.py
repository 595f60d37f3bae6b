"""What the measurements of one backend mean: the bottleneck, and what would fix it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.stats import Estimate
from precache.console.commandline import human_bytes

KEEPS_UP = "keeps up"
LOADER_BINDS = "the loader is the bottleneck"
NOT_DISTINGUISHABLE = "not distinguishable"
WITHIN_NOISE = "within noise"
"""How sentences say NOT_DISTINGUISHABLE, which files hold."""
NO_TRAINER = "-"
COLD_FETCH = "cold fetch"
# Less is not worth acting on, however well it can be told from nothing.
NEGLIGIBLE_SHARE = 0.02
# Stages are timed apart on other pictures than the whole, and in threads: they differ by that much anyway.
_PROBE_ERROR = 0.2
_STALLS = {
    "storage": "fetch",
    "decode": "prep",
    "collate": "prep",
    "storage or decode": "fetch or prep",
    "storage or collate": "fetch or prep",
    "transfer": "transfer",
}
_WORDS = {
    "storage": "storage",
    "decode": "decoding",
    "collate": "collating",
    "storage or decode": "storage or decoding",
    "storage or collate": "storage or collating",
    "transfer": "the transfer",
    "compute": "compute",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Images/s of each part of one pipeline, alone, and of all of it; None where not measured.

    Attributes:
        loader: alone, warm cache.
        cold: the same after its files were dropped from the cache.
        trainer: alone, on a batch that stays on the device.
        together: the trainer fed by the loader, warm cache.
        ratio: together over trainer, repeat by repeat.
        transfer: moving batches to the device alone.
        read, decode: these stages of the loader alone, by as many threads as it has workers.
        does: the stage, "decode" or "collate", that is most of a loader whose stages cannot be run apart.
        warmed: whether its files were read into the page cache before; else `loader` may have read storage.
    """

    loader: Estimate
    cold: Estimate | None = None
    trainer: Estimate | None = None
    together: Estimate | None = None
    ratio: Estimate | None = None
    transfer: Estimate | None = None
    read: Estimate | None = None
    decode: Estimate | None = None
    does: str = "collate"
    warmed: bool = True

    @property
    def reads_cold(self) -> bool:
        """Whether a cold cache makes a difference that can be told."""
        return self.cold is not None and self.cold.high < self.loader.low

    @property
    def rest(self) -> str:
        """The stage that has the loader's time beyond that of the stages that ran apart."""
        if self.decode is not None:
            return "collate"
        return self.does if self.warmed or self.reads_cold else f"storage or {self.does}"

    @property
    def supply(self) -> Estimate:
        """Images/s that reach the trainer at most: of the loader, cold where that is slower, or the bus."""
        rates = [self.loader]
        rates += [self.cold] if self.cold is not None and self.reads_cold else []
        rates += [self.transfer] if self.transfer is not None else []
        return min(rates, key=lambda rate: rate.median)

    @property
    def predicted(self) -> float | None:
        """Images/s of the trainer fed from a warm cache: those of the slowest part."""
        if self.trainer is None:
            return None
        rates = [self.loader, self.trainer, *([self.transfer] if self.transfer else [])]
        return min(rate.median for rate in rates)


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do about a loader.

    Attributes:
        what: as the subject of a sentence.
        images_per_s: with it, fed.
        measured: in the same run; else it is predicted.
        cold: whether `images_per_s` are from a cold disk; else with the files in memory.
        size_bytes: what it takes on disk; 0 where nothing is converted.
    """

    what: str
    images_per_s: Estimate
    measured: bool
    size_bytes: int = 0
    cold: bool = False

    def gains_over(self, now: Estimate) -> bool:
        """Whether it gives more images/s than `now`, by more than is worth nothing and than noise."""
        enough = self.images_per_s.median >= now.median * (1 + NEGLIGIBLE_SHARE)
        return enough and self.images_per_s.low > now.high


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


def loader_parts(measured: Measured) -> dict[str, Estimate]:
    """Seconds per image that each stage adds to the loader's own; what is left over is `measured.rest`."""
    whole = _seconds(measured.loader)
    parts = {
        name: _seconds(rate)
        for name, rate in (
            ("storage", measured.read),
            ("decode", measured.decode),
            ("transfer", measured.transfer),
        )
        if rate is not None
    }
    rest = Estimate(
        whole.median - sum(part.median for part in parts.values()),
        whole.low - sum(part.high for part in parts.values()),
        whole.high - sum(part.low for part in parts.values()),
    )
    if rest.median > 0:
        parts[measured.rest] = rest
    if measured.cold is not None and measured.reads_cold:
        cold = _seconds(measured.cold)
        parts["storage"] = Estimate(cold.median - whole.median, cold.low - whole.high, cold.high - whole.low)
    return parts


def stage_rates(measured: Measured) -> dict[str, float]:
    """Images/s that each stage could do alone."""
    rates = {name: 1 / part.median for name, part in loader_parts(measured).items()}
    if measured.trainer is not None:
        rates["compute"] = measured.trainer.median
    return rates


def binding(measured: Measured) -> str | None:
    """The narrowest stage; None where two cannot be told apart, or the parts contradict the whole."""
    if measured.trainer is not None:
        fed = judge(measured.ratio)
        if measured.supply.low > measured.trainer.high:
            return "compute" if fed == KEEPS_UP else None
        if measured.supply.high >= measured.trainer.low or (fed == KEEPS_UP and not measured.reads_cold):
            return None
    parts = loader_parts(measured)
    first, *others = sorted(parts, key=lambda name: -parts[name].median)
    if others and parts[first].low <= parts[others[0]].high * (1 + _PROBE_ERROR):
        return None
    return first


def stalls(measured: Measured, batch_size: int) -> dict[str, float]:
    """Seconds per batch that the trainer waits for "fetch" (storage), "prep" and "transfer", warm cache.

    The wait is shared out as the loader's stages are, so that these add up to it; it is "fetch or
    prep" where storage cannot be told from the rest. `COLD_FETCH` is what a cold cache would add, and only
    there where that can be told.
    """
    lost_s = {"fetch": 0.0, "prep": 0.0, "transfer": 0.0}
    if measured.trainer is None or measured.together is None:
        return {}
    trainer = measured.trainer.median
    warm_s = max(0.0, batch_size / measured.together.median - batch_size / trainer)
    warm_parts = loader_parts(_warm(measured))
    total = sum(part.median for part in warm_parts.values())
    for name, part in warm_parts.items():
        stall = _STALLS[name]
        lost_s[stall] = lost_s.get(stall, 0.0) + warm_s * part.median / total
    if measured.cold is not None and measured.reads_cold:
        cold_s = batch_size / min(trainer, measured.cold.median)
        lost_s[COLD_FETCH] = cold_s - batch_size / min(trainer, measured.loader.median)
    return lost_s


def advise(measured: Measured, changes: Sequence[Change]) -> str:
    """The bottleneck, and the change that gains most, in a few sentences."""
    bound = binding(measured)
    sentences = [_finding(measured, bound)]
    if bound != "compute":
        sentences.append(_gain(measured, changes))
    return " ".join(sentences)


def files_are(*, cold: bool) -> str:
    """From where the files of a rate were read, in words."""
    return "from a cold disk" if cold else "with the files in memory"


def takes(change: Change) -> str:
    """The disk that it takes, in words; empty where none."""
    return human_bytes(change.size_bytes) if change.size_bytes else ""


def _finding(measured: Measured, bound: str | None) -> str:
    trainer, supply = measured.trainer, measured.supply.median
    against = f" against {trainer.median:,.0f} of the trainer" if trainer else ""
    files = "" if measured.cold is None else f" {files_are(cold=measured.supply is measured.cold)}"
    uneven = trainer is not None and measured.supply.low > trainer.high
    if bound is None and uneven and judge(measured.ratio) == LOADER_BINDS:
        return (
            f"no single stage is the bottleneck{files}: the loader alone reaches {supply:,.0f} images/s"
            f"{against}, and yet the trainer waits, because batches come unevenly or both share the CPUs."
        )
    if bound is None:
        return (
            f"no stage stands out as the bottleneck{files}, {WITHIN_NOISE}: {supply:,.0f} images/s{against}."
        )
    if bound == "compute" and trainer is not None:
        return (
            f"the trainer itself is the bottleneck: it takes {trainer.median:,.0f} images/s and the loader "
            f"could give {supply:,.0f}{files}. Only a faster step would help."
        )
    slow = "is the bottleneck" if trainer else "takes most of the loader's time"
    found = f"{_WORDS[bound]} {slow}{files}: {supply:,.0f} images/s{against}"
    if bound.startswith("storage or "):
        without = " without --cold" if measured.cold is None else ""
        found += f"; the files were not in memory before, so the two cannot be told apart{without}"
    return f"{found}."


def _gain(measured: Measured, changes: Sequence[Change]) -> str:
    now = measured.together or measured.loader
    if measured.reads_cold and measured.supply.median < now.median:
        now = measured.supply
    worth = now.median * (1 + NEGLIGIBLE_SHARE)
    gaining = [change for change in changes if change.images_per_s.median >= worth]
    if not gaining:
        return "No change known here is predicted to gain."
    change = _best(gaining)
    then = change.images_per_s
    said = "gave" if change.measured else "is predicted to give"
    files = f" {files_are(cold=change.cold)}" if measured.cold is not None else ""
    text = f"{change.what} {said} {then.median:,.0f}{files}"
    if not change.gains_over(now):
        return f"{text}, no more than that {WITHIN_NOISE}."
    return f"{text}; it takes {takes(change)}." if takes(change) else f"{text}."


def _best(changes: Sequence[Change]) -> Change:
    """The one with the most images/s; of those as good as that, one that was measured, then one for free."""
    most = max(change.images_per_s.median for change in changes)
    alike = [change for change in changes if change.images_per_s.median >= most * (1 - NEGLIGIBLE_SHARE)]
    return max(alike, key=lambda change: (change.measured, not change.size_bytes, change.images_per_s.median))


def _warm(measured: Measured) -> Measured:
    return Measured(
        loader=measured.loader,
        transfer=measured.transfer,
        read=measured.read,
        decode=measured.decode,
        does=measured.does,
        warmed=measured.warmed or measured.reads_cold,
    )


def _seconds(rate: Estimate) -> Estimate:
    return Estimate(1 / rate.median, 1 / rate.high, 1 / rate.low)
