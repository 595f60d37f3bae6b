"""Choose the samples of a split, their weights and their order from the settings of `loaders.build`."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.dataset import SplitData
from loaders.order import Epochs, Weights
from loaders.settings import LoaderSpec, Sampling
from precache.dataset.columns import Column
from precache.errors import SettingError

_MAX_SHOWN = 5  # classes or samples that an error lists


def choose_samples(sampling: Sampling, data: SplitData) -> SplitData:
    """Return the samples of `data` that `classes` and `subset` name.

    Raises:
        SettingError: a class or sample does not exist, or no sample is left.
    """
    chosen: Positions | None = None
    if sampling.classes is not None:
        chosen = _positions_with(data.labels, _class_labels(sampling.classes, data))
    if sampling.subset is not None:
        in_subset = _subset_positions(sampling.subset, data)
        chosen = in_subset if chosen is None else np.intersect1d(chosen, in_subset)
    if chosen is None:
        return data
    if not len(chosen):
        names = [name for name in ("classes", "subset") if getattr(sampling, name) is not None]
        raise SettingError(f"{' and '.join(names)}: no sample of this split of {data.path} matches")
    return data.select(chosen)


def _positions_with(column: Column, values: npt.ArrayLike) -> Positions:
    """Return the positions at which `column` has one of `values`, ascending."""
    return np.flatnonzero(np.isin(column[:], values))


def _class_labels(classes: Iterable[str], data: SplitData) -> list[int]:
    if isinstance(classes, str):
        raise SettingError(f"classes must be a list of names, got {classes!r}", remedy=f"write [{classes!r}]")
    _check_has_classes("classes need", data)
    labels = {name: label for label, name in enumerate(data.classes)}
    names = list(classes)
    for name in names:
        if name not in labels:
            choices = ", ".join(data.classes[:_MAX_SHOWN])
            if len(data.classes) > _MAX_SHOWN:
                choices += ", ..."
            raise SettingError(
                f"classes: {data.path} has no class {name!r}; it has {len(labels):,}: {choices}"
            )
    return [labels[name] for name in names]


def _check_has_classes(need: str, data: SplitData) -> None:
    """Raise SettingError, which begins with `need`, unless each sample has one class."""
    if not data.classes or data.index.targets is not None:
        raise SettingError(
            f"{need} samples of one class each, which those of {data.path} are not",
            remedy="give subset, or weights of your own",
        )


def _subset_positions(subset: npt.ArrayLike, data: SplitData) -> Positions:
    """Return the positions of the samples that `subset` names, ascending."""
    ids = _to_array("subset", subset, "a list or array of sample ids")
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        if ids.size == 0:
            raise SettingError("subset is empty", remedy="give the ids of samples, of batch.ids")
        raise SettingError(
            f"subset must be integers, one after the other: ids of samples, of batch.ids; got {ids.dtype} "
            f"{list(ids.shape)}"
        )
    positions = _positions_with(data.ids, ids)
    missing = ids[~np.isin(ids, data.ids[positions])]
    if len(missing):
        shown = ", ".join(map(str, missing[:_MAX_SHOWN]))
        if len(missing) > _MAX_SHOWN:
            shown += ", ..."
        raise SettingError(
            f"subset: {data.path} has {len(missing):,} of {len(ids):,} samples not in this split: {shown}"
        )
    unique_ids, counts = np.unique(ids, return_counts=True)
    if len(unique_ids) < len(ids):
        raise SettingError(
            f"subset names sample {unique_ids[counts.argmax()]} {counts.max()} times",
            remedy="name each once; weights serve some more often",
        )
    return positions


def find_weights(sampling: Sampling, data: SplitData) -> Weights | None:
    """Return the weights of the samples of `data`, float64 [n]; None if each is served once.

    Raises:
        SettingError: they are no weights, or not one for each of these samples.
    """
    if sampling.weights is None:
        return None
    if isinstance(sampling.weights, str):
        if sampling.weights != "balanced":
            raise SettingError(
                f"weights must be 'balanced' or a number for each sample, got {sampling.weights!r}"
            )
        _check_has_classes("weights 'balanced' need", data)
        labels = np.asarray(data.labels)
        balanced: Weights = 1 / np.bincount(labels)[labels]
        return balanced
    weights = _to_array("weights", sampling.weights, "'balanced' or a number for each sample")
    whole_count, part_count = len(data.whole), len(data)
    if weights.dtype.kind not in "iuf" or weights.shape not in ((whole_count,), (part_count,)):
        lengths = " or ".join(f"[{count}]" for count in dict.fromkeys((whole_count, part_count)))
        raise SettingError(
            f"weights must be 'balanced' or numbers {lengths}, one for each sample in stored order, as "
            f"loader.dataset.targets are; got {weights.dtype} {list(weights.shape)}"
        )
    if len(weights) == whole_count:
        weights = weights[data.positions_in_whole(slice(None))]
    weights = weights.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise SettingError(f"weights must be at least 0 and finite, got {weights[wrong[0]]} at {wrong[0]}")
    with np.errstate(over="ignore"):
        total = weights.sum()
    if not 0 < total < np.inf:
        raise SettingError(f"weights: their sum is {total}", remedy="give some sample more than 0")
    return weights


def _to_array(name: str, values: Any, expected: str) -> npt.NDArray[Any]:
    """Return `values` as an array; raise SettingError, which names the setting, if they are no array."""
    try:
        return np.asarray(list(values) if isinstance(values, (set, frozenset)) else values)
    except (TypeError, ValueError) as error:
        raise SettingError(f"{name} must be {expected}, got {values!r:.80}") from error


def find_epochs(
    spec: LoaderSpec, data: SplitData, random_access: bool, weights: Weights | None = None
) -> Epochs:
    """Return the order in which all ranks together serve `data`.

    Args:
        random_access: whether the backend reads samples in any order as fast as in the stored one.

    Raises:
        SettingError: the backend cannot serve this order, or not within `memory_bytes`.
    """
    if spec.shuffle == "full" and not random_access:
        raise SettingError(
            f"shuffle 'full' needs random access, which {data.path} does not give",
            remedy="use 'window' or True",
        )
    kind = "none"
    if spec.shuffle is True:
        kind = "full" if random_access else "window"
    elif spec.shuffle is not False:
        kind = spec.shuffle
    return Epochs(
        shard_starts=data.shard_starts,
        kind=kind,
        seed=spec.seed,
        window_shards=data.window_shards(spec.reading.memory_bytes),
        chosen=None if data.chosen is None else (data.chosen, len(data.whole)),
        weights=weights,
    )
