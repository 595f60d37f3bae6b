"""When a result says that it is not to be relied on."""

import pytest

from bench.report import trust


@pytest.mark.parametrize(("share", "disturbed"), [(None, False), (0.0, False), (0.1, False), (0.11, True)])
def test_a_machine_is_busy_above_the_limit(share: float | None, disturbed: bool) -> None:
    assert trust.is_disturbed(share) is disturbed
    assert bool(trust.disturbance(share)) is disturbed


def test_the_share_is_told() -> None:
    assert trust.disturbance(0.314).startswith("Other processes took 31% of the CPUs")


def test_an_older_result_does_not_say_and_is_trusted() -> None:
    assert trust.other_cpu({"batch_size": 64}) is None
    assert trust.other_cpu({"other_cpu": 0.2}) == 0.2


@pytest.mark.parametrize(
    ("predicted", "measured", "said"),
    [
        (124, 100, ""),
        (76, 100, ""),
        (140, 100, "the prediction is 40% too high: so"),
        (50, 100, "the prediction is 50% too low: so"),
    ],
)
def test_a_prediction_that_is_far_off_says_so(predicted: float, measured: float, said: str) -> None:
    assert trust.miss(predicted, measured, "so") == said
