"""Plan which sample goes into which shard, as which row; pure functions that touch no disk."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from precache.dataset.columns import Ints
from precache.dataset.shard_table import shard_name
from precache.errors import SettingError
from precache.recipe import DEFAULT_SPLITS, Recipe, parse_splits
from precache.sources.base import Samples

_SHUFFLE_TAG, _SPLIT_TAG = 1, 5


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlan:
    """A shard to write.

    Attributes:
        name: its files' name without suffix.
        split: the split that it belongs to.
        rows: int64 [n], positions in the scan's samples, in the order in which they are written.
    """

    name: str
    split: str
    rows: Ints


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """The shards of a conversion; each sample is in exactly one of them."""

    recipe: Recipe
    shards: tuple[ShardPlan, ...]


def plan_conversion(samples: Samples, recipe: Recipe) -> ConvertPlan:
    """Shuffle `samples` globally by `recipe.seed` and cut them into shards of near-equal count.

    The plan does not depend on `recipe.format`: the same tree gives the same shards in every
    format. It is written shuffled because sequential readers can shuffle only within a window.

    Raises:
        SettingError: the samples have several splits already, and the recipe asks for others.
    """
    shards = []
    for split, rows in split_rows(samples, recipe):
        shard_count = -(-len(rows) // recipe.samples_per_shard)
        if not shard_count:
            continue
        order = np.random.default_rng((recipe.seed, _SHUFFLE_TAG)).permutation(len(rows))
        for number, shard_rows in enumerate(np.array_split(rows[order], shard_count)):
            shards.append(ShardPlan(shard_name(split, number), split, shard_rows))
    return ConvertPlan(recipe, tuple(shards))


def split_rows(samples: Samples, recipe: Recipe) -> Iterator[tuple[str, Ints]]:
    """Yield (split, rows of its samples), by the shares of `recipe` or as the source divides them.

    Raises:
        SettingError: the source has several splits of its own, and the recipe asks for others.
    """
    split_of, names = samples.splits, samples.split_names
    has_shares = recipe.splits != DEFAULT_SPLITS and not recipe.has_split_list
    if has_shares and len(names) > 1:
        raise SettingError(
            f"splits {recipe.splits!r} asked for, but the source has its own: {', '.join(names)}",
            remedy="leave splits out to keep them",
        )
    if has_shares or names == ("",):  # shares divide a source of a single split
        shares = parse_splits(recipe.splits)
        names = tuple(shares)
        split_of = split_samples(samples.labels, list(shares.values()), recipe.seed)
    for index, name in enumerate(names):
        yield name, np.flatnonzero(split_of == index)


def split_samples(labels: Ints, shares: list[float], seed: int) -> Ints:
    """Put each sample into one split, class by class, by the largest remainder method.

    The fraction of a sample that rounding adds or omits in a class is carried to the next class, so that both
    each class and the whole set are within one sample of their shares.

    Args:
        labels: int64 [n], labels of the samples.
        shares: shares of the splits, which sum to 1.

    Returns:
        int64 [n]: each sample's index of `shares`.
    """
    if len(shares) == 1:
        return np.zeros(len(labels), np.int64)
    target_shares = np.array(shares)
    carried = np.zeros(len(shares))
    split_of = np.zeros(len(labels), np.int64)
    by_class = np.argsort(labels, kind="stable")
    for members in np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1):
        label = labels[members[0]]
        quota = len(members) * target_shares
        counts = np.floor(quota).astype(int)
        remainder = quota - counts
        for index in np.argsort(-(remainder + carried), kind="stable")[: len(members) - counts.sum()]:
            counts[index] += 1
        carried += quota - counts
        order = np.random.default_rng((seed, _SPLIT_TAG, max(0, label))).permutation(len(members))
        for index, split_members in enumerate(np.split(members[order], np.cumsum(counts)[:-1])):
            split_of[split_members] = index
    return split_of
