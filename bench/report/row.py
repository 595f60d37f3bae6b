"""What repeats of trials say: a row for each loader with each trainer; a result is rows, as JSON and back."""

import json
import math
import types
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from bench.report.stats import Estimate
from precache.errors import SettingError

RAW_TREE = "raw tree"
SYNTHETIC = "synthetic"
TODAY_BACKEND = "imagefolder"
_NEEDED: dict[str, Any] = {
    "trainers": tuple[str, ...],
    "batch_size": int,
    "size": int,
    "workers": int,
    "repeats": int,
}
_OPTIONAL: dict[str, Any] = {
    "data": dict[str, dict[str, Any]],
    "peers": dict[str, str],
    "notes": tuple[str, ...],
    "other_cpu": float | None,
}
BUSY_SHARE = 0.95
"""From this share of all cores on, averaged over a run, there is no CPU time left for another worker."""
ALL_BUSY = "All cores were busy"
"""How the flag begins that is no harm where the trainer does not wait."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What the machine did while something ran; `bench.machine.monitor` samples it.

    Attributes:
        time_s: of each sample, since the start.
        series: name to one value per sample. Shares are from 0 to 1, `..._per_s` are bytes per second
            since the sample before.
        peak, mean: of each series.
        flags: limits that hurt, one sentence each.
    """

    time_s: tuple[float, ...] = ()
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    mean: dict[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spikes:
    """Batches that took far longer than the quicker half did.

    Attributes:
        batches: their positions in the series.
        above_s: what counts as one; None where too few batches were timed to say.
        period: every how many batches one comes; None where they are not regular.
    """

    batches: tuple[int, ...] = ()
    above_s: float | None = None
    period: int | None = None


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """What is uneven about a series of batches; `bench.report.verdict` finds it.

    Attributes:
        wait_spikes, step_spikes: first batches of epochs are never among them.
        explanation: of the spikes, and of waits for first batches, in words, one sentence each.
    """

    wait_spikes: Spikes
    step_spikes: Spikes
    explanation: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do about a loader.

    Attributes:
        what: as the subject of a sentence.
        images_per_s: with it, fed.
        measured: in the same run; else it is predicted.
    """

    what: str
    images_per_s: Estimate
    measured: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One loader on one folder, with one trainer. Rates are images/s; None is what was not measured.

    Attributes:
        backend, data: what was measured, and on what.
        trainer_name: 'none' where there was no trainer.
        peer: whether it is another library's loader, measured alone in a process of its own.
        loader: of the loader alone, files in memory.
        cold: the same, its files dropped from the cache before.
        trainer: of the trainer alone, on a batch that stays on the device.
        together: of the trainer fed by the loader.
        ratio: together over trainer, repeat by repeat.
        of_limit: loader over the limit of the same pictures, repeat by repeat.
        over: loader over those of the peers that do the same work, repeat by repeat.
        transfer: of moving batches to the device alone.
        read, decode: of these stages of the loader alone, by as many threads as it has workers.
        rest: the stage that has the loader's time beyond that of those that ran apart.
        first_batch_s: from before the loader is built until its first batch is there.
        batch_s_median, batch_s_p95: of the time per batch, together, in seconds; over all repeats.
        epoch_gap_s: the longest time of a batch that was the first of an epoch; None if no timed one was.
        first_step_s: of the very first step, which allocates, compiles and tunes.
        data_wait: share of the time, 0 to 1, that the fed trainer waited for a batch.
        utilisation: compute time of the trainer alone over all the time, fed: how busy the accelerator is,
            0 to 1. MLPerf Storage asks for 0.9.
        wait_s, step_s: of every timed batch of the last repeat, fed.
        epoch_starts: which of these were the first of an epoch.
        spikes: what is uneven about them; None where no trainer was fed.
        stages: images/s that each stage alone can do: "storage", "decode", "collate", "transfer",
            "compute"; "storage or decode" and "storage or collate" where two cannot be told apart.
        stalls: seconds per batch lost to "fetch", "prep" and "transfer" from a warm cache, and as
            "cold fetch" what a cold one would add.
        predicted: images/s together, predicted from the parts.
        binds: the bottleneck among the stages; None where it cannot be told from another.
        advice: the bottleneck and the change with the largest gain, in words; empty where none was sought.
        changes: all that were considered.
        monitor: what the machine did meanwhile; None where nothing was sampled.
        image_bytes: of a picture as it is stored, on average; None where the loader reads none, and of peers.
        convert_s, size_bytes: what it takes once to have the data; None where not known, or nothing is
            converted.
    """

    backend: str
    data: str
    trainer_name: str
    loader: Estimate
    peer: bool = False
    cold: Estimate | None = None
    trainer: Estimate | None = None
    together: Estimate | None = None
    ratio: Estimate | None = None
    of_limit: Estimate | None = None
    over: dict[str, Estimate] = field(default_factory=dict)
    transfer: Estimate | None = None
    read: Estimate | None = None
    decode: Estimate | None = None
    rest: str = "collate"
    first_batch_s: Estimate | None = None
    batch_s_median: float | None = None
    batch_s_p95: float | None = None
    epoch_gap_s: float | None = None
    first_step_s: Estimate | None = None
    data_wait: Estimate | None = None
    utilisation: Estimate | None = None
    wait_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    epoch_starts: tuple[int, ...] = ()
    spikes: BatchTimes | None = None
    stages: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
    predicted: float | None = None
    binds: str | None = None
    advice: str = ""
    changes: tuple[Change, ...] = ()
    monitor: Watched | None = None
    image_bytes: float | None = None
    convert_s: float | None = None
    size_bytes: float | None = None

    @property
    def label(self) -> str:
        """What was measured on what."""
        return f"{self.backend} on {self.data}"

    @property
    def name(self) -> str:
        """The loader as people call it: whose it is, for `pytorch` and `webdataset` are libraries, too."""
        if self.backend == TODAY_BACKEND:
            return "imagefolder (torchvision)"
        if self.backend == SYNTHETIC:
            return "synthetic (noise)"
        if self.peer:
            return f"{self.backend} (the limit)" if self.is_limit else self.backend
        return (
            f"{self.backend} (ours)" if self.data == self.backend else f"{self.backend} (ours, {self.data})"
        )

    @property
    def rate(self) -> Estimate:
        """Images/s of training: fed to the trainer, or of the loader alone where there was none."""
        return self.together or self.loader

    @property
    def busy(self) -> Estimate | None:
        """Share of the time, 0 to 1, that the accelerator computes; None where no trainer was fed."""
        if self.ratio is None:
            return None
        return Estimate(*(min(1.0, part) for part in (self.ratio.median, self.ratio.low, self.ratio.high)))

    @property
    def is_ours(self) -> bool:
        """Whether it is a loader that one could train with here: no other library's, no noise."""
        return not self.peer and self.backend != SYNTHETIC

    @property
    def is_limit(self) -> bool:
        """Whether it only copies pictures, as `gather` of `bench.peers.libraries`: no loader serves faster."""
        return self.peer and self.backend.startswith("gather")

    @property
    def reads_cold(self) -> bool:
        """Whether a cold disk makes a difference that can be told."""
        return self.cold is not None and self.cold.high < self.loader.low

    @property
    def batch_s(self) -> tuple[float, ...]:
        """Wait and step of each timed batch of the last repeat."""
        return tuple(wait + step for wait, step in zip(self.wait_s, self.step_s, strict=True))

    @property
    def flags(self) -> tuple[str, ...]:
        """Limits of the machine that were met, one sentence each."""
        return self.monitor.flags if self.monitor is not None else ()


class Key(NamedTuple):
    """What tells the rows of a result apart; `rank` is that among rows alike in all else."""

    backend: str
    data: str
    trainer: str
    rank: int

    @property
    def loader(self) -> str:
        """What was measured on what, `shards on shards (2)`."""
        return f"{self.backend} on {self.data}" + (f" ({self.rank})" if self.rank > 1 else "")

    @property
    def words(self) -> str:
        """The same for people, to whom `shards on shards` says no more than `shards`."""
        return self.loader.replace(f"{self.backend} on {self.backend}", self.backend, 1)


def by_key(rows: Iterable[Row]) -> dict[Key, Row]:
    """The rows, in their order."""
    found: dict[Key, Row] = {}
    for row in rows:
        rank = 1
        while (key := Key(row.backend, row.data, row.trainer_name, rank)) in found:
            rank += 1
        found[key] = row
    return found


@dataclass(frozen=True, slots=True)
class Result:
    """A finished comparison, with what one needs to repeat it.

    Attributes:
        machine: of `bench.machine.hardware.describe_machine`.
        settings: fields of `bench.measure.settings.Settings`, and what was found out while measuring.
        skipped: what could not be measured, and why.
        host_to_device_gbps: 10^9 bytes per second from pinned memory, of batches of uint8; CUDA only.
    """

    machine: dict[str, str]
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    skipped: dict[str, str]
    host_to_device_gbps: float | None = None

    @property
    def several_trainers(self) -> bool:
        """Whether a row needs its trainer's name."""
        return len({row.trainer_name for row in self.rows if not row.peer}) > 1

    def title(self, row: Row) -> str:
        """The loader, and where it needs saying, with which trainer."""
        fed = f", fed to {row.trainer_name}" if self.several_trainers and not row.peer else ""
        return row.name + fed

    def samples(self, row: Row) -> int | None:
        """Pictures of an epoch; None where the result does not say."""
        data = self.settings.get("data", {}).get(row.label)
        return None if data is None else int(data["samples"])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back."""
        plain: dict[str, Any] = _plain({"version": 1, **asdict(self)})
        return plain

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Result":
        """Read what `to_json` gave; SettingError if it is something else."""
        try:
            result: Result = typed(cls, content)
            missing = {"cpu", "memory", "accelerator", "date"} - result.machine.keys()
            missing |= _NEEDED.keys() - result.settings.keys()
            if not result.rows:
                missing.add("rows")
            if missing:
                raise KeyError(*sorted(missing))
            for name, kind in {**_NEEDED, **_OPTIONAL}.items():
                if name in result.settings:
                    typed(kind, result.settings[name])
            return result
        except (KeyError, TypeError, AttributeError) as error:
            raise SettingError(f"not a result of 'bench loaders' ({error!r})") from error


def read_result(path: Path) -> Result:
    """The result in the file at `path`.

    Raises:
        SettingError: it cannot be read, or is not such a result.
    """
    remedy = "give a file of 'bench loaders --json'"
    try:
        return Result.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingError(f"{path}: cannot be read ({error.strerror})") from error
    except SettingError as error:  # before ValueError, which it is as well
        raise SettingError(f"{path}: {error}; {remedy}") from error
    except ValueError as error:
        raise SettingError(f"{path}: not JSON ({error}); {remedy}") from error


def typed(kind: Any, content: Any) -> Any:
    """JSON as the type `kind` says: dataclasses from objects, tuples from lists; unknown keys are left out.

    Raises:
        KeyError, TypeError, AttributeError: it is something else.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (part for part in parts if part is not type(None))
        return None if content is None or content == {} else typed(inner, content)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(content, dict):
            raise TypeError(f"{content!r} is not an object")
        names = [each.name for each in fields(kind) if each.name in content]
        return kind(**{name: typed(hints[name], content[name]) for name in names})  # type: ignore[operator]
    if origin is tuple:
        if not isinstance(content, (list, tuple)):
            raise TypeError(f"{content!r} is not a list")
        return tuple(typed(parts[0], each) for each in content)
    if origin is dict:
        return {name: typed(parts[1], each) for name, each in content.items()}
    if kind in (str, bool, int, float):
        plain = (int, float) if kind is float else kind
        if not isinstance(content, plain) or (isinstance(content, bool) and kind is not bool):
            raise TypeError(f"{content!r} is not of type {kind.__name__}")
    return content


def _plain(values: Any) -> Any:
    """As JSON gives it back: lists for tuples, and None for the infinite, which JSON does not have."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_plain(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def more_workers_can_help(workers: int, cpus: int, cpu_share: float | None) -> bool:
    """Whether there is a CPU for another worker of a loader that has `workers`, of `cpus` that it may use.

    `cpu_share` is that of all cores, 0 to 1, busy while it ran; None where not sampled.
    """
    return 0 < workers < cpus and (cpu_share is None or cpu_share < BUSY_SHARE)


def busy_cores(cpu_share: float) -> str | None:
    """The sentence for cores without time to spare; None where they have some."""
    if cpu_share < BUSY_SHARE:
        return None
    return f"{ALL_BUSY} ({cpu_share:.0%} on average): more workers will not help, less work per sample will."
