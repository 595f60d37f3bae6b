"""What the measurements of one backend mean, in words. Pure."""

from bench.stats import Estimate

KEEPS_UP = "keeps up"
LOADER_BINDS = "loader binds"
NO_TRAINER = "-"
# Less is not worth acting on, however well it can be told from nothing.
NEGLIGIBLE_SHARE = 0.02


def judge(together: Estimate, trainer: Estimate | None) -> str:
    """Whether the trainer waits for the loader.

    `together` and `trainer` are images/s with the loader and on a batch that stays on the device.
    Where their ranges overlap the two are not distinguishable, and the loader keeps up; as it does
    where the trainer waits for less than NEGLIGIBLE_SHARE of the time.
    """
    if trainer is None:
        return NO_TRAINER
    if together.overlaps(trainer) or waiting_share(together, trainer) < NEGLIGIBLE_SHARE:
        return KEEPS_UP
    return LOADER_BINDS


def waiting_share(together: Estimate, trainer: Estimate) -> float:
    """Share of the time, 0 to 1, that the trainer waits for data."""
    return max(0.0, 1 - together.median / trainer.median)
