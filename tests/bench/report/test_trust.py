"""When a result says that it is not to be relied on."""

import pytest

from bench.report import trust


@pytest.mark.parametrize(("share", "disturbed"), [(None, False), (0.0, False), (0.1, False), (0.11, True)])
def test_a_machine_is_busy_above_the_limit(share: float | None, disturbed: bool) -> None:
    assert trust.is_disturbed(share) is disturbed
    assert bool(trust.disturbance(share)) is disturbed


@pytest.mark.parametrize(
    ("predicted", "measured", "said"),
    [
        (124, 100, ""),
        (76, 100, ""),
        (140, 100, "the prediction is 40% too high: together they share CPUs"),
        (50, 100, "the prediction is 50% too low: the machine's speed changed"),
    ],
)
def test_a_prediction_that_is_far_off_says_so(predicted: float, measured: float, said: str) -> None:
    found = trust.miss(predicted, measured)
    assert found.startswith(said)
    assert bool(found) == bool(said)
