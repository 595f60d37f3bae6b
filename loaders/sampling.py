"""Which samples of a split are served, how often, and in which order, as `loaders.build` was told."""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.dataset import SplitData
from loaders.order import Epochs, Weights
from loaders.settings import LoaderSpec, Sampling, Shuffle
from precache.dataset.columns import Column
from precache.errors import SettingError

_NAMED = 5  # of the samples that an error is about


def choose_samples(sampling: Sampling, data: SplitData) -> SplitData:
    """Those of `data` that `classes` and `subset` name.

    Raises:
        SettingError: they name what is not there, or nothing is left.
    """
    if sampling.classes is None and sampling.subset is None:
        return data
    found = []
    if sampling.classes is not None:
        found.append(_among(data.labels, _labels(sampling.classes, data)))
    if sampling.subset is not None:
        found.append(_ids(sampling.subset, data))
    chosen = reduce(np.intersect1d, found)
    if not len(chosen):
        names = [name for name in ("classes", "subset") if getattr(sampling, name) is not None]
        raise SettingError(f"{' and '.join(names)}: no sample of this split of {data.path} matches")
    return data.select(chosen)


def _among(column: Column, values: npt.ArrayLike) -> Positions:
    """Where `column` has one of `values`."""
    return np.flatnonzero(np.isin(column[:], values))


def _labels(classes: Iterable[str], data: SplitData) -> list[int]:
    if isinstance(classes, str):
        raise SettingError(f"classes must be a list of names, got {classes!r}; write [{classes!r}]")
    _check_classes("classes need", data)
    labels = {name: label for label, name in enumerate(data.classes)}
    names = list(classes)
    for name in names:
        if name not in labels:
            shown = ", ".join(data.classes[:_NAMED]) + (", ..." if len(data.classes) > _NAMED else "")
            raise SettingError(f"classes: {data.path} has no class {name!r}; it has {len(labels):,}: {shown}")
    return [labels[name] for name in names]


def _check_classes(what: str, data: SplitData) -> None:
    if not data.classes or data.index.targets is not None:
        raise SettingError(
            f"{what} samples of one class each, which those of {data.path} are not; give subset, or "
            f"weights of your own"
        )


def _ids(subset: npt.ArrayLike, data: SplitData) -> Positions:
    """Where the samples of `subset` lie."""
    ids = _array("subset", subset, "a list or array of sample ids")
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        if ids.size == 0:
            raise SettingError("subset is empty; give the ids of samples, of batch.ids")
        raise SettingError(
            f"subset must be integers, one after the other: ids of samples, of batch.ids; got {ids.dtype} "
            f"{list(ids.shape)}"
        )
    found = _among(data.ids, ids)
    missing = ids[~np.isin(ids, data.ids[found])]
    if len(missing):
        raise SettingError(
            f"subset: {data.path} has {len(missing):,} of {len(ids):,} samples not in this split: "
            f"{', '.join(map(str, missing[:_NAMED]))}{', ...' if len(missing) > _NAMED else ''}"
        )
    named, counts = np.unique(ids, return_counts=True)
    if len(named) < len(ids):
        raise SettingError(
            f"subset names sample {named[counts.argmax()]} {counts.max()} times; name each once; "
            f"weights serve some more often"
        )
    return found


def find_weights(sampling: Sampling, data: SplitData) -> Weights | None:
    """float64 [n], of the samples of `data`, or None: each is served once.

    Raises:
        SettingError: they are no weights, or not of these samples.
    """
    asked = sampling.weights
    if asked is None:
        return None
    if isinstance(asked, str):
        if asked != "balanced":
            raise SettingError(f"weights must be 'balanced' or a number for each sample, got {asked!r}")
        _check_classes("weights 'balanced' need", data)
        labels = np.asarray(data.labels)
        shares: Weights = 1 / np.bincount(labels)[labels]
        return shares
    weights = _array("weights", asked, "'balanced' or a number for each sample")
    served = data.whole.index.served
    counts = (int(served.sum()), len(data))
    if weights.dtype.kind not in "iuf" or weights.shape not in [(count,) for count in counts]:
        lengths = " or ".join(f"[{count}]" for count in dict.fromkeys(counts))
        raise SettingError(
            f"weights must be 'balanced' or numbers {lengths}, one for each sample in stored order, as "
            f"loader.dataset.targets are; got {weights.dtype} {list(weights.shape)}"
        )
    if len(weights) == counts[0]:
        weights = weights[(np.cumsum(served) - 1)[data.in_whole(slice(None))]]
    weights = weights.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise SettingError(f"weights must be at least 0 and finite, got {weights[wrong[0]]} at {wrong[0]}")
    with np.errstate(over="ignore"):
        total = weights.sum()
    if not 0 < total < np.inf:
        raise SettingError(f"weights: their sum is {total}; give some sample more than 0")
    return weights


def _array(name: str, values: Any, wanted: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(list(values) if isinstance(values, (set, frozenset)) else values)
    except (TypeError, ValueError) as error:
        raise SettingError(f"{name} must be {wanted}, got {values!r:.80}") from error


def find_epochs(
    spec: LoaderSpec, data: SplitData, random_access: bool, weights: Weights | None = None
) -> Epochs:
    """What all ranks serve of `data` in each epoch.

    Raises:
        SettingError: the backend cannot serve it, or it cannot be had within `memory_bytes`.
    """
    if spec.shuffle == "full" and not random_access:
        raise SettingError(
            f"shuffle 'full' needs random access, which {data.path} does not give; use 'window' or True"
        )
    best = "full" if random_access else "window"
    kinds: dict[Shuffle, str] = {True: best, False: "none", "full": "full", "window": "window"}
    rows = None if data.part_of is None else data.part_of[1]
    return Epochs(
        shard_starts=data.shard_starts,
        kind=kinds[spec.shuffle],
        seed=spec.seed,
        window_shards=data.window_shards(spec.reading.memory_bytes),
        chosen=None if rows is None else (rows, len(data.whole)),
        weights=weights,
    )
