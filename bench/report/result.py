"""What a comparison of loaders gives: rows of figures, as JSON and back."""

from dataclasses import dataclass
from typing import Any

from bench.report.row import Row
from precache.errors import SettingError

__all__ = ["Result", "Row"]


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

    @property
    def ours(self) -> tuple[Row, ...]:
        """The rows that are no peers'."""
        return tuple(row for row in self.rows if not row.peer)

    @property
    def trainer_names(self) -> tuple[str, ...]:
        """In the order of the rows; those of peers, which are fed to none, are left out."""
        return tuple(dict.fromkeys(row.trainer_name for row in self.ours))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `Result.from_json` reads them back."""
        return {
            "version": 1,
            "machine": self.machine,
            "settings": self.settings,
            "rows": [row.to_json() for row in self.rows],
            "skipped": self.skipped,
            "host_to_device_gbps": self.host_to_device_gbps,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Result":
        """Read what `to_json` gave; SettingError if it is something else."""
        try:
            rows = tuple(map(Row.from_json, content["rows"]))
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
