"""Whether more workers would help a loader: the one place that says so. Pure."""

from collections.abc import Iterable

BUSY_SHARE = 0.95
"""From this share of all cores on, averaged over a run, there is no CPU time left for another worker."""
ALL_BUSY = "All cores were busy"
"""How the flag begins that is no harm where the trainer does not wait."""
# Files written before 2026-11-22 hold it beside the opposite; only one of the two was looked at.
_FORMER_ADVICE = "; more workers or less work per sample would help"


def more_can_help(workers: int, cpus: int, cpu_share: float | None) -> bool:
    """Whether there is a CPU for another worker.

    Args:
        workers: of the loader.
        cpus: that it may use.
        cpu_share: of all cores, 0 to 1, busy while it ran; None where not sampled.
    """
    return 0 < workers < cpus and (cpu_share is None or cpu_share < BUSY_SHARE)


def busy_cores(cpu_share: float) -> str | None:
    """The sentence for cores without time to spare; None where they have some."""
    if cpu_share < BUSY_SHARE:
        return None
    return f"{ALL_BUSY} ({cpu_share:.0%} on average): more workers will not help, less work per sample will."


def without_former_advice(sentences: Iterable[str]) -> list[str]:
    """Stored explanations of batch times, which say what was and no longer what would help."""
    return [sentence.replace(_FORMER_ADVICE, "") for sentence in sentences]
