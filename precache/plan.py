"""Which sample goes into which shard, as which row. Pure: touches no disk."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from precache.columns import Ints
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
        SettingError: the samples have splits already, and the recipe asks for others.
    """
    shards: list[ShardPlan] = []
    for split, members in _splits(samples, recipe):
        order = np.random.default_rng((recipe.seed, _SHUFFLE_TAG)).permutation(len(members))
        shard_count = -(-len(members) // recipe.samples_per_shard)
        for index, rows in enumerate(np.array_split(members[order], shard_count) if shard_count else []):
            shards.append(ShardPlan(shard_name(split, index), split, rows))
    return ConvertPlan(recipe, tuple(shards))


def shard_name(split: str, index: int) -> str:
    """Name, without suffix, of the shard `index` of `split`."""
    return f"{split}-{index:05d}"


def _splits(samples: Samples, recipe: Recipe) -> Iterator[tuple[str, Ints]]:
    """(split, rows of its samples)."""
    if samples.split_names == ("",):
        shares = parse_splits(recipe.splits)
        split_of = split_samples(samples.labels, list(shares.values()), recipe.seed)
        names = tuple(shares)
    elif recipe.splits == DEFAULT_SPLITS or recipe.listed:
        split_of, names = samples.splits, samples.split_names
    else:
        raise SettingError(
            f"splits {recipe.splits!r} asked for, but the source has its own: "
            f"{', '.join(samples.split_names)}; leave --splits out to keep them"
        )
    for index, name in enumerate(names):
        yield name, np.flatnonzero(split_of == index)


def split_samples(labels: Ints, shares: list[float], seed: int) -> Ints:
    """Put each sample into one split, class by class, by the largest remainder.

    What a class's whole numbers leave over or short is carried to the next class, so that both
    each class and the whole set are within one sample of their shares.

    Args:
        labels: int64 [n], of the samples.
        shares: of the splits; they sum to 1.

    Returns:
        int64 [n]: each sample's index of `shares`.
    """
    wanted = np.array(shares)
    carried = np.zeros(len(shares))
    split_of = np.zeros(len(labels), np.int64)
    by_class = np.argsort(labels, kind="stable")
    for members in np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1):
        quota = len(members) * wanted
        counts = np.floor(quota).astype(int)
        remainder = quota - counts
        for index in np.argsort(-(remainder + carried), kind="stable")[: len(members) - counts.sum()]:
            counts[index] += 1
        carried += quota - counts
        order = np.random.default_rng((seed, _SPLIT_TAG, max(0, labels[members[0]]))).permutation(
            len(members)
        )
        for index, taken in enumerate(np.split(members[order], np.cumsum(counts)[:-1])):
            split_of[taken] = index
    return split_of
