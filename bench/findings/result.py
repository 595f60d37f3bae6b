"""What a comparison of loaders gives: rows of figures, as JSON and back."""

from dataclasses import asdict, dataclass, field
from typing import Any

from bench.findings import stats
from bench.findings.verdict import judge
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
        cold: as `loader`, the files dropped from the cache before; None where that was not asked for or
            the file system keeps them.
        data_wait: share of the time, 0 to 1, that the fed trainer waited for a batch.
        utilisation: compute time of the trainer alone over all the time, fed; MLPerf Storage asks for 0.9.
        first_step_s: of the very first step, which allocates, compiles and tunes.
        stalls: seconds per batch lost to "fetch", "prep" and "transfer" from a warm cache, and as
            "cold fetch" what a cold one would add.
        stages: images/s that each alone can do: "storage", "decode", "collate", "transfer", "compute";
            "storage or decode" and "storage or collate" where two cannot be told apart.
        predicted: images/s together, predicted from the parts.
        binds: the narrowest stage; None where it cannot be told from another.
        advice: what binds, and the change with the largest gain, in words.
        changes: all that were considered: the fields of `bench.findings.verdict.Change`, as plain values.
        wait_s, step_s: of every timed batch of the last repeat, fed.
        epoch_starts: which of these were the first of an epoch.
        spikes: what `bench.findings.batch_times` says of them.
        monitor: what `bench.trial.monitor` sampled meanwhile: "time_s", each series by its name, "peak",
            "mean", "flags", "missing".
        image_bytes: of a picture as it is stored, on average; None where the loader reads none, and of peers.
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
    first_step_s: stats.Estimate | None = None
    stalls: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    predicted: float | None = None
    binds: str | None = None
    advice: str = ""
    changes: list[dict[str, Any]] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    epoch_starts: list[int] = field(default_factory=list)
    spikes: dict[str, Any] = field(default_factory=dict)
    monitor: dict[str, Any] = field(default_factory=dict)
    image_bytes: float | None = None

    @property
    def verdict(self) -> str:
        """What the measurements mean; see `bench.findings.verdict`."""
        return judge(self.ratio)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished comparison, with what one needs to repeat it.

    Attributes:
        host_to_device_gbps: 10^9 bytes per second from pinned memory, of batches of uint8; CUDA only.
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
    """A row of any version: older ones lack the fields from `peer` or `cold` on."""
    estimates = (
        *("loader", "trainer", "together", "ratio", "first_batch_s", "of_limit"),
        *("cold", "data_wait", "utilisation", "first_step_s"),
    )
    read = {
        name: stats.Estimate(**content[name]) if content[name] else None
        for name in estimates
        if name in content
    }
    over = {name: stats.Estimate(**ratio) for name, ratio in content.get("over", {}).items()}
    kept = {name: value for name, value in content.items() if name != "verdict"}
    return Row(**{**kept, **read, "over": over})
