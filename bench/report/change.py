"""Change that would make a training faster, and what it gives, from prediction to sentence. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bench.report.stats import Estimate


class ChangeKind(str, Enum):
    """What is changed; the value is its name in files."""

    LOADER = "loader"
    """Another backend, or another folder of the same kind."""
    CONVERT = "convert"
    """Another backend on converted data."""
    WORKERS = "workers"
    PERSISTENT_WORKERS = "persistent_workers"
    PIN_MEMORY = "pin_memory"


class Basis(str, Enum):
    """Where the images/s of a change, or the values of a row, are from."""

    MEASURED = "measured"
    """The range is over the runs of the same command."""
    PREDICTED = "predicted"
    """The range is one that came true in the lab, as often as the sentence beside it says."""
    BOUND = "bound"
    """`stats.at_least` or `stats.at_most`: computed, and on its other side without a limit."""
    UNKNOWN = "unknown"
    """Nothing is known, as `stats.at_least(0)` says: the change is one to try."""


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a loader or of a script, and what it gives.

    Attributes:
        kind: what is changed.
        images_per_s: images/s of training with the change.
        basis: where these are from.
        arguments: what the change sets: arguments of a DataLoader, or `backend` and `data` of a loader.
    """

    kind: ChangeKind
    images_per_s: Estimate
    basis: Basis
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "kind": self.kind.value,
            "images_per_s": self.images_per_s.to_json(),
            "basis": self.basis.value,
            "arguments": dict(self.arguments),
        }
