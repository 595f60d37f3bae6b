import pytest

from bench.stats import Estimate
from bench.verdict import KEEPS_UP, LOADER_BINDS, NO_TRAINER, judge, waiting_share


@pytest.mark.parametrize(
    ("together", "trainer", "verdict"),
    [
        (Estimate(500, 480, 520), Estimate(1000, 990, 1010), LOADER_BINDS),
        (Estimate(1000, 990, 1010), Estimate(1000, 990, 1010), KEEPS_UP),
        (Estimate(950, 900, 1000), Estimate(1000, 990, 1010), KEEPS_UP),  # not distinguishable
        (Estimate(985, 984, 986), Estimate(1000, 999, 1001), KEEPS_UP),  # told apart, but negligible
        (Estimate(970, 969, 971), Estimate(1000, 999, 1001), LOADER_BINDS),
        (Estimate(1100, 1090, 1110), Estimate(1000, 990, 1010), KEEPS_UP),
        (Estimate(1, 1, 1), None, NO_TRAINER),
    ],
)
def test_judge(together: Estimate, trainer: Estimate | None, verdict: str) -> None:
    assert judge(together, trainer) == verdict


def test_waiting_share_is_never_negative() -> None:
    trainer = Estimate(1000, 1000, 1000)
    assert waiting_share(Estimate(750, 750, 750), trainer) == 0.25
    assert waiting_share(Estimate(1200, 1200, 1200), trainer) == 0
