"""The analysis of batch times, on series made by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from bench.report.verdict import analyse

STEP_S = 0.010


def steady(batches: int, wait_s: float = 0.0005) -> np.ndarray:
    """Waits with the jitter of a real clock."""
    return wait_s * (1 + 0.1 * np.random.default_rng((1, batches)).standard_normal(batches))


@pytest.mark.parametrize(
    ("batches", "workers", "spikes", "added_s", "period", "said"),
    [
        *((120, count, range(count - 1, 120, count), 0.04, count, "as many as the loader has workers")
            for count in (2, 8)),
        (160, 4, range(0, 160, 16), 0.1, 16, "not the number of workers (4)"),
        (200, 4, (7, 11, 48, 90, 93, 151, 199), 0.05, None, "7 batches waited 50."),
    ],
)  # fmt: skip
def test_spikes_are_found_where_they_are_with_their_period_and_its_cause(
    batches: int, workers: int, spikes: Sequence[int], added_s: float, period: int | None, said: str
) -> None:
    waits = steady(batches)
    assert analyse(waits, np.full(batches, STEP_S), [], workers).explanation == ()
    waits[list(spikes)] += added_s
    found = analyse(waits, np.full(batches, STEP_S), [], workers)
    assert found.wait_spikes.batches == tuple(spikes)
    assert found.wait_spikes.period == period
    (sentence,) = found.explanation
    assert said in sentence


def test_an_excess_too_short_to_matter_is_no_spike_and_hides_none() -> None:
    assert analyse([], [], [], 2).explanation == ()
    waits = np.full(100, 1e-6)
    waits[::4] = 200e-6  # 200 times as long, and 2% of a batch
    assert analyse(waits, np.full(100, STEP_S), [], 4).wait_spikes.batches == ()
    waits = steady(100)
    starts = list(range(0, 100, 10))
    for start in starts:  # a period holds over epochs whose length it does not divide
        waits[[start + 4, start + 8]] += 0.04
    assert analyse(waits, np.full(100, STEP_S), starts, 4).wait_spikes.period == 4


def test_a_slow_step_and_the_first_batch_of_an_epoch_are_no_spikes_of_the_loader() -> None:
    steps = np.full(100, STEP_S)
    steps[49::50] = 0.5
    found = analyse(steady(100), steps, [], 2)
    assert (found.wait_spikes.batches, found.step_spikes.batches) == ((), (49, 99))
    assert found.explanation[0].endswith("not the loader's doing.")
    waits = np.full(90, 0.001)
    waits[[0, 30, 60]] = 0.8, 0.201, 0.301
    found = analyse(waits, np.full(90, STEP_S), [60, 0, 30], 2)
    assert found.wait_spikes.batches == ()
    (sentence,) = found.explanation
    assert "first batch of an epoch waits 300 ms more" in sentence
