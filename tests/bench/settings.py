"""Settings that tests measure with."""

from typing import Any

from bench.measure.settings import Settings


def quick(**given: Any) -> Settings:
    """Of a few small batches on the CPU, with no trainer unless one is given."""
    few: dict[str, Any] = {"batch_size": 8, "workers": 1, "size": 32, "warmup": 1, "batches": 4, "repeats": 1}
    return Settings(**{**few, **given})
