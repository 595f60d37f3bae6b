"""What the times of single batches say: averages hide a wait that only some batches have. Pure."""

from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

from bench.report.row import BatchTimes, Spikes

# Of normal noise about one batch in 20,000 exceeds the quicker half's median by this many deviations.
_DEVIATIONS = 8.0
_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, of normal noise
_NEGLIGIBLE_SHARE = 0.1  # of a batch's time: a shorter excess is not worth a word
_FEWEST_BATCHES = 8
_REGULAR_SHARE = 0.75
_NAMED_GAPS = 5


def analyse(
    wait_s: Sequence[float], step_s: Sequence[float], epoch_starts: Sequence[int], workers: int
) -> BatchTimes:
    """Find spikes, their period, and waits for the first batches of epochs.

    Args:
        wait_s: float [n], how long the trainer waited for each batch, in seconds.
        step_s: float [n], how long its step then took, in seconds.
        epoch_starts: positions of batches that were the first of an epoch.
        workers: of the loader.

    Raises:
        ValueError: the two are not equally long, or a start lies outside them.
    """
    waits, steps = np.asarray(wait_s, dtype=np.float64), np.asarray(step_s, dtype=np.float64)
    if waits.shape != steps.shape or waits.ndim != 1:
        raise ValueError(f"waits {waits.shape} and steps {steps.shape} must be equally long series")
    starts = sorted(set(epoch_starts))
    if starts and not 0 <= starts[0] <= starts[-1] < len(waits):
        raise ValueError(f"epoch starts {starts} lie outside of {len(waits)} batches")
    typical_s = float(np.median(waits + steps)) if len(waits) else 0.0
    wait_spikes = _spikes(waits, starts, typical_s)
    step_spikes = _spikes(steps, starts, typical_s)
    told = [*_explain_waits(wait_spikes, waits, workers), *_explain_steps(step_spikes)]
    return BatchTimes(wait_spikes, step_spikes, (*told, *_explain_first_batches(waits, starts, typical_s)))


def _spikes(series: npt.NDArray[np.float64], starts: list[int], typical_s: float) -> Spikes:
    steady = np.setdiff1d(np.arange(len(series)), starts)
    if len(steady) < _FEWEST_BATCHES:
        return Spikes()
    # Two workers that cannot keep up make every second batch a spike: the median of all would then lie
    # between the spikes and the rest, and their deviation from it would be that of everything.
    quicker = np.sort(series[steady])[: len(steady) // 2]
    base = float(np.median(quicker))
    deviation = _TO_SIGMA * float(np.median(np.abs(quicker - base)))
    # Beside waits of 200 ms that come again and again, one of 20 ms is no spike.
    halfway = (float(np.quantile(series[steady], 0.9)) - base) / 2
    above_s = base + max(_DEVIATIONS * deviation, _NEGLIGIBLE_SHARE * typical_s, halfway)
    batches = [int(batch) for batch in steady if series[batch] > above_s]
    return Spikes(tuple(batches), above_s, _period(batches, starts, len(steady)))


def _period(batches: list[int], starts: list[int], steady: int) -> int | None:
    """The distance that most neighbouring spikes of one epoch have, if it explains the whole series."""
    epochs = np.searchsorted(starts, batches, side="right")
    distances = np.diff(batches)[np.diff(epochs) == 0]
    if len(distances) < 3:
        return None
    period = int(median(distances.tolist()))
    regular = np.mean(distances == period) >= _REGULAR_SHARE
    throughout = len(batches) * period >= _REGULAR_SHARE * steady
    return period if regular and throughout and period > 1 else None


def _explain_waits(spikes: Spikes, waits: npt.NDArray[np.float64], workers: int) -> list[str]:
    if not spikes.batches:
        return []
    mean_s = float(waits[list(spikes.batches)].mean())
    if spikes.period is None:
        return [f"{_count(spikes)} waited {_ms(mean_s)} on average, at no regular distance."]
    found = f"Every {spikes.period} batches the trainer waits {_ms(mean_s)} on average"
    if spikes.period == workers:
        return [
            f"{found}: as many as the loader has workers. They finish together and then all begin anew: "
            f"the loader cannot keep up."
        ]
    return [
        f"{found}, which is not the number of workers ({workers}): look for what happens at that "
        f"distance, as opening a shard."
    ]


def _explain_steps(spikes: Spikes) -> list[str]:
    if not spikes.batches:
        return []
    when = "at no regular distance" if spikes.period is None else f"every {spikes.period} batches"
    return [
        f"{_count(spikes)} had a step of more than {_ms(spikes.above_s or 0.0)}, {when}: "
        f"not the loader's doing."
    ]


def _explain_first_batches(waits: npt.NDArray[np.float64], starts: list[int], typical_s: float) -> list[str]:
    if not starts:
        return []
    others = np.delete(waits, starts)
    usual_s = float(np.median(others)) if len(others) else 0.0
    more_s = median(max(0.0, float(waits[start]) - usual_s) for start in starts)
    if more_s < _NEGLIGIBLE_SHARE * typical_s:
        return []
    named = ", ".join(f"batch {start} {_ms(float(waits[start]))}" for start in starts[:_NAMED_GAPS])
    more = f" and {len(starts) - _NAMED_GAPS} more" if len(starts) > _NAMED_GAPS else ""
    return [
        f"{len(starts)} epoch {'boundary' if len(starts) == 1 else 'boundaries'}: the first batch waits "
        f"{_ms(more_s)} more than others do (median): {named}{more}."
    ]


def _count(spikes: Spikes) -> str:
    return f"{len(spikes.batches)} batch{'es' if len(spikes.batches) > 1 else ''}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
