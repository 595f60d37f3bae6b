"""When a figure is not to be relied on: a busy machine, a prediction that was far off. Pure."""

from collections.abc import Mapping
from typing import Any

OTHER_CPU_LIMIT = 0.1
"""Share of the CPUs: where other processes take more, rates are those of a part of the machine."""
PREDICTION_LIMIT = 0.25
"""Share of what was measured: a prediction farther off than that is said to be."""


def other_cpu(settings: Mapping[str, Any]) -> float | None:
    """What other processes took of the CPUs, 0 to 1, by a result's settings; None where it does not say."""
    share: float | None = settings.get("other_cpu")
    return share


def is_disturbed(share: float | None) -> bool:
    """Whether other processes took so much of the CPUs that no winner is named."""
    return share is not None and share > OTHER_CPU_LIMIT


def disturbance(share: float | None, then: str = ", so no winner is named") -> str:
    """The sentence that says so, and what follows from it; empty where they did not."""
    if share is None or not is_disturbed(share):
        return ""
    return (
        f"Other processes took {share:.0%} of the CPUs while this was measured: the rates are too low, and "
        f"not all by as much{then}. Measure again on a quiet machine."
    )


def miss(predicted: float, measured: float) -> str:
    """`the prediction is 40% too high: WHY`, of a loader and a trainer together; empty where it is near."""
    off = predicted / measured - 1
    if abs(off) <= PREDICTION_LIMIT:
        return ""
    why = "together they share CPUs and memory, or batches come unevenly"
    if off < 0:
        why = "the machine's speed changed meanwhile; more --repeats measure longer"
    return f"the prediction is {abs(off):.0%} too {'high' if off > 0 else 'low'}: {why}"
