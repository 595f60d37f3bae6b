"""Random numbers that depend on seed, epoch and sample alone.

So a picture is augmented alike in any batch, rank and backend, and a resumed run augments as the
uninterrupted one would have.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]
_MAX_VIEWS = 1 << 16


def draw_keys(ids: Integers, view: int = 0, places: Integers | None = None) -> Integers:
    """Return keys to draw by in the place of `ids`, int64 [n], so that views and repeats differ.

    The keys of the first view are the ids if there are no `places`; all others are hashes.

    Args:
        places: see `loaders.batch.Request`.
    """
    numbers = np.full(len(ids), view) if places is None else places * _MAX_VIEWS + view
    if not numbers.any():
        return ids
    with np.errstate(over="ignore"):
        hashes = _mix(_mix(ids.astype(np.uint64)) ^ numbers.astype(np.uint64))
    return np.where(numbers == 0, ids, hashes.view(np.int64))


def uniforms(seed: int, epoch: int, ids: Integers, count: int) -> Floats:
    """Return float64 [n, count], uniform in [0, 1): hashes of seed, epoch, sample id and number of the draw.

    SplitMix64, whose output for counters is the random sequence: https://doi.org/10.1145/2660193.2660195
    """
    with np.errstate(over="ignore"):  # 64-bit arithmetic that wraps is the point
        start = _mix(_mix(np.uint64(seed % 2**64)) + np.uint64(epoch))
        state = (
            _mix(start + ids.astype(np.uint64))[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        )
        draws: Floats = (_mix(state) >> np.uint64(11)) * 2.0**-53
        return draws


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    mixed: npt.NDArray[np.uint64] = np.asarray(state) + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed
