"""What the machine did while something ran; `bench.measure.monitor` samples it."""

from dataclasses import dataclass, field
from typing import Any

_KEPT = ("peak", "mean", "flags", "missing")


@dataclass(frozen=True, slots=True)
class Watched:
    """What was sampled.

    Attributes:
        time_s: of each sample, since the start.
        series: name to one value per sample. Shares are from 0 to 1, `..._per_s` are bytes per second
            since the sample before.
        peak, mean: of each series.
        flags: limits that hurt, one sentence each.
        missing: what could not be sampled, and why.
        own_cpu_share: CPU time of the sampling itself, of one core; not kept in JSON.
    """

    time_s: tuple[float, ...]
    series: dict[str, tuple[float, ...]]
    peak: dict[str, float]
    mean: dict[str, float]
    flags: tuple[str, ...]
    missing: dict[str, str]
    own_cpu_share: float = field(default=0.0, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, the series beside the others by their names."""
        return {
            "time_s": list(self.time_s),
            **{name: list(values) for name, values in self.series.items()},
            "peak": self.peak,
            "mean": self.mean,
            "flags": list(self.flags),
            "missing": self.missing,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Watched":
        """What `to_json` gave."""
        series = {name: values for name, values in content.items() if name not in ("time_s", *_KEPT)}
        return cls(
            time_s=tuple(content["time_s"]),
            series={name: tuple(values) for name, values in series.items()},
            peak=content.get("peak", {}),
            mean=content.get("mean", {}),
            flags=tuple(content.get("flags", ())),
            missing=content.get("missing", {}),
        )
