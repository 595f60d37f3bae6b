"""Uneven batches: spikes with their period and its cause, and batches that are no spikes."""

import numpy as np

from bench.report.sentences import describe_batches
from bench.report.stats import analyse_batches

STEP_S = 0.010


def steady(batches: int, wait_s: float = 0.0005) -> np.ndarray:
    """Make waits with the jitter of a real clock."""
    return wait_s * (1 + 0.1 * np.random.default_rng((1, batches)).standard_normal(batches))


def test_spikes_are_found_with_their_period_and_its_cause() -> None:
    for spikes, period, cause in (
        (range(7, 200, 8), 8, "as many as the loader has workers"),
        (range(0, 200, 16), 16, "not the number of workers (8)"),
        ((7, 11, 48, 90, 93, 151, 199), None, "7 of 200 batches waited far longer than the others: 50."),
    ):
        waits = steady(200)
        assert describe_batches(analyse_batches(waits, np.full(200, STEP_S), []), 8) == []
        waits[list(spikes)] += 0.05
        batches = analyse_batches(waits, np.full(200, STEP_S), [])
        assert (batches.wait_spikes.batches, batches.wait_spikes.period) == (tuple(spikes), period)
        (sentence,) = describe_batches(batches, 8)
        assert cause in sentence


def test_short_waits_are_no_spikes() -> None:
    waits = np.full(100, 1e-6)
    waits[::4] = 200e-6  # 200 times as long, and 2% of a batch
    assert analyse_batches(waits, np.full(100, STEP_S), []).wait_spikes.batches == ()


def test_slow_steps_are_not_spikes_of_the_loader() -> None:
    steps = np.full(100, STEP_S)
    steps[49::50] = 0.5
    batches = analyse_batches(steady(100), steps, [])
    assert (batches.wait_spikes.batches, batches.step_spikes.batches) == ((), (49, 99))
    assert describe_batches(batches, 2)[0].startswith("2 batches had a step of more than ")


def test_first_batches_of_epochs_are_no_spikes() -> None:
    waits = np.full(90, 0.001)
    waits[[0, 30, 60]] = 0.8, 0.201, 0.301
    batches = analyse_batches(waits, np.full(90, STEP_S), [60, 0, 30])
    assert batches.wait_spikes.batches == ()
    (sentence,) = describe_batches(batches, 2)
    assert "first batch of an epoch waits 300 ms more" in sentence
