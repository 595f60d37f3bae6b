"""What the measurements of one backend mean, in words. Pure."""

from bench.stats import Estimate

KEEPS_UP = "keeps up"
LOADER_BINDS = "loader binds"
NOT_DISTINGUISHABLE = "not distinguishable"
NO_TRAINER = "-"
# Less is not worth acting on, however well it can be told from nothing.
NEGLIGIBLE_SHARE = 0.02


def judge(ratio: Estimate | None) -> str:
    """Whether the trainer waits for the loader.

    `ratio` is of images/s with the loader over images/s on a batch that stays on the device, repeat
    by repeat; None without a trainer. Where one repeat says that the loader keeps up and the median
    that it does not, the two are not distinguishable.
    """
    if ratio is None:
        return NO_TRAINER
    if 1 - ratio.median < NEGLIGIBLE_SHARE:
        return KEEPS_UP
    if 1 - ratio.high < NEGLIGIBLE_SHARE:
        return NOT_DISTINGUISHABLE
    return LOADER_BINDS


def waiting_share(ratio: Estimate) -> float:
    """Share of the time, 0 to 1, that the trainer waits for data."""
    return max(0.0, 1 - ratio.median)
