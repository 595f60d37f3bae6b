"""Choose the samples of a split, and their weights, from the settings of `loaders.build`."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.dataset import SplitData
from loaders.order import Weights
from loaders.settings import Sampling
from precache.dataset.columns import Column
from precache.errors import SettingError

_MAX_SHOWN = 5  # classes or samples that an error lists


def choose_samples(sampling: Sampling, data: SplitData) -> tuple[SplitData, Weights | None]:
    """Return the samples of `data` that `classes` and `subset` name, and their weights, see `EpochOrder`.

    Raises:
        SettingError: a class or sample does not exist, or no sample is left; or the weights are no weights,
            or not one for each sample.
    """
    chosen: Positions | None = None
    if sampling.classes is not None:
        chosen = _positions_with(data.labels, _class_labels(sampling.classes, data))
    is_sorted = True
    if sampling.subset is not None:
        subset, is_sorted = _sort_subset(sampling.subset, data)
        chosen = subset if chosen is None else np.intersect1d(chosen, subset)
    part = data
    if chosen is not None:
        if not len(chosen):
            names = [name for name in ("classes", "subset") if getattr(sampling, name) is not None]
            raise SettingError(f"{' and '.join(names)}: no sample of this split of {data.path} matches")
        part = data.select(chosen)
    if sampling.weights is None:
        return part, None
    if isinstance(sampling.weights, str):
        return part, _balance(sampling.weights, part)
    weights = _to_array("weights", sampling.weights, "'balanced' or a number for each sample")
    if weights.dtype.kind not in "biuf" or weights.shape not in ((len(data),), (len(part),)):
        lengths = " or ".join(f"[{count}]" for count in dict.fromkeys((len(data), len(part))))
        raise SettingError(
            f"weights must be 'balanced' or numbers {lengths}, one for each sample in stored order, as "
            f"loader.dataset.targets are; got {weights.dtype} {list(weights.shape)}"
        )
    if chosen is not None and len(weights) == len(data):
        weights = weights[chosen]
    elif not is_sorted:
        raise SettingError(
            "weights of a subset are in stored order, and this subset is not",
            remedy="sort the subset, and its weights with it; or give a weight for each sample of the split",
        )
    return part, _check_weights(weights)


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


def _sort_subset(subset: npt.ArrayLike, data: SplitData) -> tuple[Positions, bool]:
    """Return the positions in `data` that `subset` lists, ascending, and whether they were so already."""
    listed = _to_array("subset", subset, "a list or array of positions in loader.dataset")
    if listed.size == 0:
        raise SettingError("subset is empty", remedy="give positions in loader.dataset")
    if listed.dtype.kind not in "iu" or listed.ndim != 1:
        raise SettingError(
            f"subset must be integers, one after the other: positions in loader.dataset; got {listed.dtype} "
            f"{list(listed.shape)}",
            remedy="give np.flatnonzero(subset)" if listed.dtype.kind == "b" else "",
        )
    outside = listed[(listed < 0) | (listed >= len(data))]
    if len(outside):
        shown = ", ".join(map(str, outside[:_MAX_SHOWN]))
        if len(outside) > _MAX_SHOWN:
            shown += ", ..."
        raise SettingError(
            f"subset: this split of {data.path} has positions 0 to {len(data) - 1}, got {shown}",
            remedy="make positions of ids with np.flatnonzero(np.isin(loader.dataset.ids, ids))",
        )
    positions, counts = np.unique(listed.astype(np.int64), return_counts=True)
    if len(positions) < len(listed):
        raise SettingError(
            f"subset names position {positions[counts.argmax()]} {counts.max()} times",
            remedy="name each once; weights serve some more often",
        )
    return positions, bool((listed == positions).all())


def _balance(name: str, data: SplitData) -> Weights:
    """Return weights with which each class of `data` comes equally often; SettingError for another `name`."""
    if name != "balanced":
        raise SettingError(f"weights must be 'balanced' or a number for each sample, got {name!r}")
    _check_has_classes("weights 'balanced' need", data)
    labels = np.asarray(data.labels)
    weights: Weights = 1 / np.bincount(labels)[labels]
    return weights


def _check_weights(numbers: npt.NDArray[Any]) -> Weights:
    """Return `numbers` as weights, scaled so that their sum neither overflows nor loses small ones."""
    with np.errstate(over="ignore"):  # a number beyond float64 becomes infinite
        weights = numbers.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise SettingError(f"weights must be at least 0 and finite, got {numbers[wrong[0]]} at {wrong[0]}")
    largest = weights.max()
    if largest == 0:
        raise SettingError("weights: all are 0", remedy="give some sample more than 0")
    scaled: Weights = np.ldexp(weights, -np.frexp(largest)[1])  # by a power of 2: no draw changes
    return scaled


def _to_array(name: str, values: Any, expected: str) -> npt.NDArray[Any]:
    """Return `values` as an array; raise SettingError, which names the setting, if they are no array."""
    try:
        return np.asarray(list(values) if isinstance(values, (set, frozenset)) else values)
    except (TypeError, ValueError) as error:
        raise SettingError(f"{name} must be {expected}, got {values!r:.80}") from error
