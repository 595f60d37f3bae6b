"""One line of a comparison's result, in typed parts; as JSON it is flat, and stays as it was."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.report.batch_times import BatchTimes, Gap, Spikes
from bench.report.stats import Estimate
from bench.report.verdict import Change, judge
from bench.report.watched import Watched


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Images per second, and their ratios; each is None where it was not measured.

    Attributes:
        loader: of the loader alone.
        cold: the same, its files dropped from the cache before; None where the file system keeps them, too.
        trainer: of the trainer alone, on a batch that stays on the device.
        together: of the trainer fed by the loader.
        ratio: together over trainer, repeat by repeat.
        of_limit: loader over the limit of the same pictures, repeat by repeat.
        over: loader over those of the peers that do the same work, repeat by repeat.
    """

    loader: Estimate
    cold: Estimate | None = None
    trainer: Estimate | None = None
    together: Estimate | None = None
    ratio: Estimate | None = None
    of_limit: Estimate | None = None
    over: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Times of batches, seconds, and the trainer's shares of the time, 0 to 1.

    Attributes:
        first_batch_s: from before the loader is built until its first batch is there.
        batch_s_median, batch_s_p95: of the time per batch, together; over all repeats.
        epoch_gap_s: the longest time of a batch that was the first of an epoch; None if no timed one was.
        first_step_s: of the very first step, which allocates, compiles and tunes.
        data_wait: share of the time that the fed trainer waited for a batch.
        utilisation: compute time of the trainer alone over all the time, fed: how busy the accelerator is.
            MLPerf Storage asks for 0.9.
        wait_s, step_s: of every timed batch of the last repeat, fed.
        epoch_starts: which of these were the first of an epoch.
        spikes: what is uneven about them; None where no trainer was fed.
    """

    first_batch_s: Estimate
    batch_s_median: float
    batch_s_p95: float
    epoch_gap_s: float | None = None
    first_step_s: Estimate | None = None
    data_wait: Estimate | None = None
    utilisation: Estimate | None = None
    wait_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    epoch_starts: tuple[int, ...] = ()
    spikes: BatchTimes | None = None

    @property
    def batch_s(self) -> tuple[float, ...]:
        """Wait and step of each timed batch of the last repeat."""
        return tuple(wait + step for wait, step in zip(self.wait_s, self.step_s, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """What the parts of the pipeline can do.

    Attributes:
        rates: images/s that each alone can do: "storage", "decode", "collate", "transfer", "compute";
            "storage or decode" and "storage or collate" where two cannot be told apart.
        stalls: seconds per batch lost to "fetch", "prep" and "transfer" from a warm cache, and as
            "cold fetch" what a cold one would add.
        predicted: images/s together, predicted from the parts.
        binds: the bottleneck; None where it cannot be told from another.
    """

    rates: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
    predicted: float | None = None
    binds: str | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do.

    Attributes:
        text: the bottleneck, and the change with the largest gain, in words; empty where none was sought.
        changes: all that were considered.
    """

    text: str = ""
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One loader on one folder, with one trainer.

    Attributes:
        peer: whether it is another library's loader, measured alone in a process of its own.
        monitor: what the machine did meanwhile; None where nothing was sampled.
        image_bytes: of a picture as it is stored, on average; None where the loader reads none, and of peers.
    """

    backend: str
    data: str
    trainer_name: str
    rates: Rates
    batches: Batches
    stages: Stages = field(default_factory=Stages)
    advice: Advice = field(default_factory=Advice)
    monitor: Watched | None = None
    image_bytes: float | None = None
    peer: bool = False

    @property
    def label(self) -> str:
        """What was measured on what."""
        return f"{self.backend} on {self.data}"

    @property
    def verdict(self) -> str:
        """What the measurements mean; see `bench.report.verdict`."""
        return judge(self.rates.ratio)

    @property
    def loader(self) -> Estimate:
        """Images/s of the loader alone."""
        return self.rates.loader

    @property
    def cold(self) -> Estimate | None:
        """Images/s of the loader alone, from a cold page cache."""
        return self.rates.cold

    @property
    def trainer(self) -> Estimate | None:
        """Images/s of the trainer alone."""
        return self.rates.trainer

    @property
    def together(self) -> Estimate | None:
        """Images/s of the trainer fed by the loader."""
        return self.rates.together

    @property
    def ratio(self) -> Estimate | None:
        """Together over trainer."""
        return self.rates.ratio

    @property
    def reads_cold(self) -> bool:
        """Whether a cold disk makes a difference that can be told."""
        return self.cold is not None and self.cold.high < self.loader.low

    @property
    def now(self) -> Estimate:
        """Images/s that a change must beat: fed or alone, from a cold disk where that is slower."""
        rate = self.together or self.loader
        if self.cold is not None and self.reads_cold:
            return min(rate, self.cold, key=lambda one: one.median)
        return rate

    @property
    def busy(self) -> Estimate | None:
        """Share of the time, 0 to 1, that the accelerator computes, fed."""
        return self.batches.utilisation

    @property
    def flags(self) -> tuple[str, ...]:
        """Limits of the machine that were met, one sentence each."""
        return self.monitor.flags if self.monitor is not None else ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, flat; `Row.from_json` reads them back."""
        rates, batches, stages = asdict(self.rates), asdict(self.batches), asdict(self.stages)
        flat = {
            **{name: getattr(self, name) for name in ("backend", "data", "trainer_name", "peer")},
            **rates,
            **{name: value for name, value in batches.items() if name != "spikes"},
            "stages": stages.pop("rates"),
            **stages,
            "advice": self.advice.text,
            "changes": [asdict(change) for change in self.advice.changes],
            "spikes": batches["spikes"] or {},
            "monitor": self.monitor.to_json() if self.monitor is not None else {},
            "image_bytes": self.image_bytes,
        }
        plain: dict[str, Any] = _plain(flat)
        return plain

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Row":
        """A row of any version: older ones lack the fields from `peer` or `cold` on."""
        get = content.get
        return cls(
            backend=content["backend"],
            data=content["data"],
            trainer_name=content["trainer_name"],
            peer=get("peer", False),
            rates=Rates(
                loader=Estimate(**content["loader"]),
                **_estimates(content, "cold", "trainer", "together", "ratio", "of_limit"),
                over={name: Estimate(**ratio) for name, ratio in get("over", {}).items()},
            ),
            batches=Batches(
                first_batch_s=Estimate(**content["first_batch_s"]),
                **_estimates(content, "first_step_s", "data_wait", "utilisation"),
                batch_s_median=content["batch_s_median"],
                batch_s_p95=content["batch_s_p95"],
                epoch_gap_s=get("epoch_gap_s"),
                wait_s=tuple(get("wait_s", ())),
                step_s=tuple(get("step_s", ())),
                epoch_starts=tuple(get("epoch_starts", ())),
                spikes=_batch_times(content["spikes"]) if get("spikes") else None,
            ),
            stages=Stages(
                rates=get("stages", {}),
                stalls=get("stalls", {}),
                predicted=get("predicted"),
                binds=get("binds"),
            ),
            advice=Advice(get("advice", ""), tuple(map(_change, get("changes", ())))),
            monitor=Watched.from_json(content["monitor"]) if get("monitor") else None,
            image_bytes=get("image_bytes"),
        )


def _estimates(content: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: Estimate(**content[name]) if content.get(name) else None for name in names}


def _change(content: dict[str, Any]) -> Change:
    known = {name: content[name] for name in Change.__dataclass_fields__ if name in content}
    return Change(**{**known, "images_per_s": Estimate(**content["images_per_s"])})


def _batch_times(content: dict[str, Any]) -> BatchTimes:
    return BatchTimes(
        running_wait_s=tuple(content["running_wait_s"]),
        running_step_s=tuple(content["running_step_s"]),
        wait_spikes=_spikes(content["wait_spikes"]),
        step_spikes=_spikes(content["step_spikes"]),
        gaps=tuple(Gap(**gap) for gap in content["gaps"]),
        explanation=tuple(content["explanation"]),
    )


def _spikes(content: dict[str, Any]) -> Spikes:
    above_s = content["above_s"]
    return Spikes(tuple(content["batches"]), math.inf if above_s is None else above_s, content["period"])


def _plain(values: Any) -> Any:
    """As JSON gives it back: lists for tuples, and None for the infinite, which JSON does not have."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_plain(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
