"""Settings of short trials, for tests."""

from typing import Any

from bench.measure.settings import Settings


def quick(**changes: Any) -> Settings:
    """Return settings of a trial of a few small batches on the CPU, with no trainer unless one is given."""
    values: dict[str, Any] = {
        "batch_size": 8,
        "workers": 1,
        "size": 32,
        "warmup": 1,
        "batches": 4,
        "repeats": 1,
    }
    return Settings(**{**values, **changes})
