import pytest

from bench.stats import Estimate
from bench.verdict import KEEPS_UP, LOADER_BINDS, NO_TRAINER, NOT_DISTINGUISHABLE, judge, waiting_share


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Estimate(0.50, 0.48, 0.52), LOADER_BINDS),
        (Estimate(1.00, 0.99, 1.01), KEEPS_UP),
        (Estimate(0.985, 0.984, 0.986), KEEPS_UP),  # told apart, but negligible
        (Estimate(0.97, 0.969, 0.971), LOADER_BINDS),
        (Estimate(0.56, 0.34, 1.00), NOT_DISTINGUISHABLE),  # one repeat kept up
        (Estimate(1.10, 1.09, 1.11), KEEPS_UP),
        (None, NO_TRAINER),
    ],
)
def test_judge(ratio: Estimate | None, verdict: str) -> None:
    assert judge(ratio) == verdict


def test_waiting_share_is_never_negative() -> None:
    assert waiting_share(Estimate(0.75, 0.7, 0.8)) == 0.25
    assert waiting_share(Estimate(1.2, 1.1, 1.3)) == 0
