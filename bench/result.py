"""What a comparison of loaders gives: rows of figures, as JSON and back."""

from dataclasses import asdict, dataclass, field
from typing import Any

from bench import stats
from bench.verdict import judge
from precache.errors import SettingError


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result: images/s, seconds, and what they mean.

    Attributes:
        loader: images/s of the loader alone.
        trainer: images/s of the trainer alone, on a batch that stays on the device.
        together: images/s of the trainer fed by the loader.
        ratio: together over trainer, repeat by repeat.
        first_batch_s: from before the loader is built until its first batch is there.
        batch_s_median, batch_s_p95: of the time per batch, together; over all repeats.
        peer: whether it is another library's loader, measured alone in a process of its own.
        of_limit: loader over the limit of the same pictures, repeat by repeat.
        over: loader over those of the peers that do the same work, repeat by repeat.
        epoch_gap_s: the longest time of a batch that was the first of an epoch; None if no timed one was.
        cold: images/s of the loader alone, its files dropped from the page cache before; None if not asked
            for, or where the file system does not drop them.
        data_wait: share of the time, 0-1, that the trainer waited for a batch, fed.
        utilisation: compute time over total time, 0-1, fed.
        stalls: seconds per batch lost to "fetch", "prep" and "transfer".
        stages: images/s that each stage alone can do, of those measured: "storage", "decode", "collate",
            "transfer", "compute".
        predicted: images/s that the stages predict for `together`.
        binds: the stage that binds; None where that cannot be told.
        advice: the one change with the largest predicted gain, in words and numbers.
        wait_s, step_s: of every timed batch of the last repeat, fed.
        epoch_starts: which of these batches were the first of an epoch.
        spikes: what `bench.batch_times` says of them, as JSON.
        monitor: what `bench.monitor` sampled meanwhile, as JSON.
    """

    backend: str
    data: str
    trainer_name: str
    loader: stats.Estimate
    trainer: stats.Estimate | None
    together: stats.Estimate | None
    ratio: stats.Estimate | None
    first_batch_s: stats.Estimate
    batch_s_median: float
    batch_s_p95: float
    peer: bool = False
    of_limit: stats.Estimate | None = None
    over: dict[str, stats.Estimate] = field(default_factory=dict)
    epoch_gap_s: float | None = None
    cold: stats.Estimate | None = None
    data_wait: stats.Estimate | None = None
    utilisation: stats.Estimate | None = None
    stalls: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    predicted: float | None = None
    binds: str | None = None
    advice: str = ""
    wait_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    epoch_starts: list[int] = field(default_factory=list)
    spikes: dict[str, Any] = field(default_factory=dict)
    monitor: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """What the measurements mean; see `bench.verdict`."""
        return judge(self.ratio)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished comparison, with what one needs to repeat it.

    `host_to_device_gbps` is in GB/s (1e9 bytes); None without a GPU.
    """

    machine: dict[str, str]
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    skipped: dict[str, str]
    host_to_device_gbps: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `Result.from_json` reads them back."""
        return {"version": 1, **asdict(self)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Result":
        """Read what `to_json` gave; SettingError if it is something else."""
        try:
            rows = tuple(_row_from_json(row) for row in content["rows"])
            result = cls(
                content["machine"],
                content["settings"],
                rows,
                content["skipped"],
                content.get("host_to_device_gbps"),
            )
            missing = {"cpu", "memory", "accelerator", "date"} - result.machine.keys()
            missing |= {"trainers", "batch_size", "size", "workers", "repeats"} - result.settings.keys()
            if not rows:
                missing.add("rows")
            if missing:
                raise KeyError(*sorted(missing))
            return result
        except (KeyError, TypeError, AttributeError) as error:
            raise SettingError(f"not a result of 'bench loaders' ({error!r})") from error


def _row_from_json(content: dict[str, Any]) -> Row:
    """A row of any version: older ones lack some of the fields that have defaults."""
    estimates = (
        *("loader", "trainer", "together", "ratio", "first_batch_s", "of_limit"),
        *("cold", "data_wait", "utilisation"),
    )
    read = {
        name: stats.Estimate(**content[name]) if content[name] else None
        for name in estimates
        if name in content
    }
    over = {name: stats.Estimate(**ratio) for name, ratio in content.get("over", {}).items()}
    kept = {name: value for name, value in content.items() if name != "verdict"}
    return Row(**{**kept, **read, "over": over})
