"""Detection of uneven batches, which averages hide: spikes, their period, first batches of epochs. Pure."""

from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

from bench.report.result import Batches, Spikes

# Of normal noise about one batch in 20,000 exceeds the quicker half's median by this many deviations.
_DEVIATIONS = 8.0
_TO_SIGMA = 1.4826  # standard deviation over median absolute deviation, for normal noise
_SHORT_SHARE = 0.1  # share of a batch's time below which an excess is not reported
_FEWEST_BATCHES = 8
_REGULAR_SHARE = 0.75


def analyse(wait_s: Sequence[float], step_s: Sequence[float], epoch_starts: Sequence[int]) -> Batches:
    """Find spikes and slow first batches among timed batches.

    Args:
        wait_s: float [n], seconds that the trainer waited for each batch.
        step_s: float [n], seconds of the step on each batch.
        epoch_starts: positions of the first batches of epochs.
    """
    waits, steps = np.asarray(wait_s, dtype=np.float64), np.asarray(step_s, dtype=np.float64)
    starts = sorted(set(epoch_starts))
    typical_s = float(np.median(waits + steps)) if len(waits) else 0.0
    wait_spikes = _find_spikes(waits, starts, typical_s)
    step_spikes = _find_spikes(steps, starts, typical_s)
    first_wait_s = None
    if starts:
        others = np.delete(waits, starts)
        usual_s = float(np.median(others)) if len(others) else 0.0
        more_s = median(max(0.0, float(waits[start]) - usual_s) for start in starts)
        first_wait_s = more_s if more_s >= _SHORT_SHARE * typical_s else None
    return Batches(tuple(wait_s), tuple(step_s), tuple(epoch_starts), wait_spikes, step_spikes, first_wait_s)


def _find_spikes(series: npt.NDArray[np.float64], starts: list[int], typical_s: float) -> Spikes:
    """Find batches that took far longer than the quicker half, without first batches of epochs.

    Args:
        series: float64 [n], seconds of each batch.
        starts: positions of the first batches of epochs.
        typical_s: median of wait and step together, in seconds.
    """
    steady = np.setdiff1d(np.arange(len(series)), starts)
    if len(steady) < _FEWEST_BATCHES:
        return Spikes()
    # Two workers that cannot keep up make every second batch a spike. The median of all batches would then
    # lie between the spikes and the rest, and the deviation from it would be too large to tell them apart.
    quicker = np.sort(series[steady])[: len(steady) // 2]
    base = float(np.median(quicker))
    deviation = _TO_SIGMA * float(np.median(np.abs(quicker - base)))
    # Where waits of 200 ms come again and again, a wait of 20 ms is no spike.
    halfway = (float(np.quantile(series[steady], 0.9)) - base) / 2
    above_s = base + max(_DEVIATIONS * deviation, _SHORT_SHARE * typical_s, halfway)
    batches = [int(batch) for batch in steady if series[batch] > above_s]
    return Spikes(tuple(batches), above_s, _find_period(batches, starts, len(steady)))


def _find_period(batches: list[int], starts: list[int], steady: int) -> int | None:
    """Find the usual distance between neighbouring spikes of an epoch.

    Returns:
        Batches from one spike to the next; None where spikes are not regular throughout the series.
    """
    epochs = np.searchsorted(starts, batches, side="right")
    distances = np.diff(batches)[np.diff(epochs) == 0]
    if len(distances) < 3:
        return None
    period = int(median(distances.tolist()))
    is_regular = np.mean(distances == period) >= _REGULAR_SHARE
    lasts_throughout = len(batches) * period >= _REGULAR_SHARE * steady
    return period if is_regular and lasts_throughout and period > 1 else None
