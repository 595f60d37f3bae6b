"""Which thread of a loader more workers do not relieve."""

from pathlib import Path

import pytest

from bench.measure.threads import serial_seconds, thread_seconds
from tests.building import build_loader


@pytest.mark.parametrize(
    ("spent", "expected"),
    [
        ({("Thread-7 (_produce)", 1): 5.0, ("fill", 2): 3.0, ("fill", 3): 3.5, ("fill", 4): 4.0}, 1.5),
        ({("Thread-7 (_produce)", 1): 5.0, ("MainThread", 2): 1.0}, 5.0),
        ({("read", 1): 9.0, ("MainThread", 2): 1.0}, 1.0),
        ({("Thread-7 (_produce)", 1): 2.0, ("fill", 2): 3.0}, 0.0),
        ({}, 0.0),
    ],
)
def test_what_a_thread_fills_of_batches_is_not_serial(
    spent: dict[tuple[str, int], float], expected: float
) -> None:
    before = dict.fromkeys(spent, 10.0)
    now = {key: 10 + seconds for key, seconds in spent.items()}
    assert serial_seconds(before, now) == expected


def test_the_threads_that_fill_batches_are_told_from_others(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], batch_size=16, workers=3) as loader:
        batches = iter(loader)
        next(batches)
        names = [name for name, _ in thread_seconds()]
        del batches
    assert names.count("fill") in (1, 2), "two, once both had something to do"
    assert "MainThread" in names
