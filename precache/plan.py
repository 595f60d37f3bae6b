"""Which sample goes into which shard, as which row. Pure: touches no disk."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precache.dataset.columns import Ints
from precache.dataset.shard_table import shard_name
from precache.errors import SettingError
from precache.recipe import DEFAULT_SPLITS, Recipe, parse_splits
from precache.sources.base import Samples

_SHUFFLE_TAG, _SPLIT_TAG = 1, 5


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlan:
    """One shard to write.

    Attributes:
        name: without suffix.
        split: that it belongs to.
        rows: int64 [n], positions in the scan's samples, in the order in which they are written.
    """

    name: str
    split: str
    rows: Ints

    @property
    def number(self) -> int:
        """Number of the shard in its split."""
        return int(self.name.removeprefix(f"{self.split}-"))


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """All shards of a conversion, each sample in exactly one of them."""

    recipe: Recipe
    shards: tuple[ShardPlan, ...]


def plan_conversion(samples: Samples, recipe: Recipe) -> ConvertPlan:
    """Shuffle `samples` globally by `recipe.seed` and cut them into shards of near-equal count.

    The plan does not depend on `recipe.format`: the same tree gives the same shards in every
    format. It is written shuffled because sequential readers can shuffle only within a window.

    Raises:
        SettingError: the samples have several splits already, and the recipe asks for others.
    """
    return ConvertPlan(recipe, tuple(_shards(split_rows(samples, recipe), recipe)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Grown:
    """What a dataset already holds, to which an update adds samples.

    Attributes:
        update: number of the update, from 1.
        shards: split -> number of its next shard; splits without shards are left out.
        kept: split -> int64 [n], labels of its samples that stay.
    """

    update: int
    shards: Mapping[str, int]
    kept: Mapping[str, Ints]


def plan_update(samples: Samples, rows: Ints, recipe: Recipe, grown: Grown) -> ConvertPlan:
    """Cut the samples at `rows`, in their order shuffled, into further shards of a dataset.

    Raises:
        SettingError: as `plan_conversion`.
    """
    if not len(rows):
        return ConvertPlan(recipe, ())
    members = ((split, rows[of_split]) for split, of_split in split_rows(samples.select(rows), recipe, grown))
    return ConvertPlan(recipe, tuple(_shards(members, recipe, grown)))


def _shards(
    members: Iterable[tuple[str, Ints]], recipe: Recipe, grown: Grown | None = None
) -> Iterator[ShardPlan]:
    """The shards of each split's rows."""
    key = (recipe.seed, _SHUFFLE_TAG, *(() if grown is None else (grown.update,)))
    for split, rows in members:
        order = np.random.default_rng(key).permutation(len(rows))
        shard_count = -(-len(rows) // recipe.samples_per_shard)
        first = 0 if grown is None else grown.shards.get(split, 0)
        for index, part in enumerate(np.array_split(rows[order], shard_count) if shard_count else []):
            yield ShardPlan(shard_name(split, first + index), split, part)


def split_rows(samples: Samples, recipe: Recipe, grown: Grown | None = None) -> Iterator[tuple[str, Ints]]:
    """(split, rows of its samples), by the shares of `recipe`, or as the source has them.

    Raises:
        SettingError: the source has several splits of its own, and the recipe asks for others.
    """
    if not keeps_splits(samples, recipe):
        shares = parse_splits(recipe.splits)
        names = tuple(shares)
        present = None if grown is None else [grown.kept.get(name, np.empty(0, np.int64)) for name in names]
        split_of = split_samples(samples.labels, list(shares.values()), recipe.seed, present)
    elif recipe.splits == DEFAULT_SPLITS or recipe.has_split_list:
        split_of, names = samples.splits, samples.split_names
    else:
        raise SettingError(
            f"splits {recipe.splits!r} asked for, but the source has its own: "
            f"{', '.join(samples.split_names)}; leave splits out to keep them"
        )
    for index, name in enumerate(names):
        yield name, np.flatnonzero(split_of == index)


def keeps_splits(samples: Samples, recipe: Recipe) -> bool:
    """Whether samples stay in the splits of their source: if it has one alone, shares go before."""
    names = samples.split_names
    return names != ("",) and (len(names) > 1 or recipe.splits == DEFAULT_SPLITS or recipe.has_split_list)


def split_samples(
    labels: Ints, shares: list[float], seed: int, present: Sequence[Ints] | None = None
) -> Ints:
    """Put each sample into one split, class by class, by the largest remainder.

    What a class's whole numbers leave over or short is carried to the next class, so that both
    each class and the whole set are within one sample of their shares.

    Args:
        labels: int64 [n], of the samples.
        shares: of the splits; they sum to 1.
        present: labels of the samples that each split already has: they count for the shares.

    Returns:
        int64 [n]: each sample's index of `shares`.
    """
    if len(shares) == 1:
        return np.zeros(len(labels), np.int64)
    wanted = np.array(shares)
    carried = np.zeros(len(shares))
    most = int(labels.max()) + 2
    has = (
        None if present is None else np.array([np.bincount(of + 1, minlength=most)[:most] for of in present])
    )
    split_of = np.zeros(len(labels), np.int64)
    by_class = np.argsort(labels, kind="stable")
    for members in np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1):
        label = labels[members[0]]
        quota = len(members) * wanted
        if has is not None:
            quota = _missing(has[:, label + 1], len(members), wanted)
        counts = np.floor(quota).astype(int)
        remainder = quota - counts
        for index in np.argsort(-(remainder + carried), kind="stable")[: len(members) - counts.sum()]:
            counts[index] += 1
        carried += quota - counts
        order = np.random.default_rng((seed, _SPLIT_TAG, max(0, label))).permutation(len(members))
        for index, taken in enumerate(np.split(members[order], np.cumsum(counts)[:-1])):
            split_of[taken] = index
    return split_of


def _missing(has: Ints, more: int, wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How many of `more` samples each split gets, as far as they go: float64 that sum to `more`."""
    lacks = np.maximum((has.sum() + more) * wanted - has, 0)
    share: npt.NDArray[np.float64] = lacks * (more / lacks.sum())
    return share
