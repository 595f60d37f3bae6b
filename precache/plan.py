"""Plan which sample goes into which shard, as which row; pure functions that touch no disk."""

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
    """A shard to write.

    Attributes:
        name: its files' name without suffix.
        split: the split that it belongs to.
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
    return ConvertPlan(recipe, tuple(_shards(split_rows(samples, recipe), recipe)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExistingSamples:
    """The samples of a dataset to which an update adds others.

    Attributes:
        update: number of the update, from 1.
        next_shards: split -> number of its next shard; splits without shards are left out.
        labels: split -> int64 [n], labels of its samples that stay.
    """

    update: int
    next_shards: Mapping[str, int]
    labels: Mapping[str, Ints]


def plan_update(samples: Samples, rows: Ints, recipe: Recipe, existing: ExistingSamples) -> ConvertPlan:
    """Shuffle the samples at `rows` and cut them into further shards of a dataset.

    Raises:
        SettingError: the samples have several splits already, and the recipe asks for others.
    """
    if not len(rows):
        return ConvertPlan(recipe, ())
    new = samples.select(rows)
    members = ((split, rows[positions]) for split, positions in split_rows(new, recipe, existing))
    return ConvertPlan(recipe, tuple(_shards(members, recipe, existing)))


def _shards(
    members: Iterable[tuple[str, Ints]], recipe: Recipe, existing: ExistingSamples | None = None
) -> Iterator[ShardPlan]:
    """Yield the shards of each (split, rows of its samples)."""
    key: tuple[int, ...] = (recipe.seed, _SHUFFLE_TAG)
    if existing is not None:
        key = (*key, existing.update)
    for split, rows in members:
        shard_count = -(-len(rows) // recipe.samples_per_shard)
        if not shard_count:
            continue
        order = np.random.default_rng(key).permutation(len(rows))
        first = 0 if existing is None else existing.next_shards.get(split, 0)
        for index, shard_rows in enumerate(np.array_split(rows[order], shard_count)):
            yield ShardPlan(shard_name(split, first + index), split, shard_rows)


def split_rows(
    samples: Samples, recipe: Recipe, existing: ExistingSamples | None = None
) -> Iterator[tuple[str, Ints]]:
    """Yield (split, rows of its samples), by the shares of `recipe` or as the source divides them.

    Raises:
        SettingError: the source has several splits of its own, and the recipe asks for others.
    """
    if not keeps_splits(samples, recipe):
        shares = parse_splits(recipe.splits)
        names = tuple(shares)
        present = None
        if existing is not None:
            present = [existing.labels.get(name, np.empty(0, np.int64)) for name in names]
        split_of = split_samples(samples.labels, list(shares.values()), recipe.seed, present)
    elif recipe.splits == DEFAULT_SPLITS or recipe.has_split_list:
        split_of, names = samples.splits, samples.split_names
    else:
        raise SettingError(
            f"splits {recipe.splits!r} asked for, but the source has its own: "
            f"{', '.join(samples.split_names)}",
            remedy="leave splits out to keep them",
        )
    for index, name in enumerate(names):
        yield name, np.flatnonzero(split_of == index)


def keeps_splits(samples: Samples, recipe: Recipe) -> bool:
    """Whether samples stay in the splits of their source.

    A source without splits has none to keep; shares in the recipe divide a source of a single split.
    """
    names = samples.split_names
    if names == ("",):
        return False
    return len(names) > 1 or recipe.splits == DEFAULT_SPLITS or recipe.has_split_list


def split_samples(
    labels: Ints, shares: list[float], seed: int, present: Sequence[Ints] | None = None
) -> Ints:
    """Put each sample into one split, class by class, by the largest remainder method.

    The fraction of a sample that rounding adds or omits in a class is carried to the next class, so that both
    each class and the whole set are within one sample of their shares.

    Args:
        labels: int64 [n], labels of the samples.
        shares: shares of the splits, which sum to 1.
        present: labels of the samples that each split already has, which count for the shares.

    Returns:
        int64 [n]: each sample's index of `shares`.
    """
    if len(shares) == 1:
        return np.zeros(len(labels), np.int64)
    target_shares = np.array(shares)
    carried = np.zeros(len(shares))
    present_counts = None
    if present is not None:  # [splits, labels from -1 on]
        length = int(labels.max()) + 2
        counts_by_split = [
            np.bincount(split_labels + 1, minlength=length)[:length] for split_labels in present
        ]
        present_counts = np.array(counts_by_split)
    split_of = np.zeros(len(labels), np.int64)
    by_class = np.argsort(labels, kind="stable")
    for members in np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1):
        label = labels[members[0]]
        quota = len(members) * target_shares
        if present_counts is not None:
            quota = _divide_by_lack(present_counts[:, label + 1], len(members), target_shares)
        counts = np.floor(quota).astype(int)
        remainder = quota - counts
        for index in np.argsort(-(remainder + carried), kind="stable")[: len(members) - counts.sum()]:
            counts[index] += 1
        carried += quota - counts
        order = np.random.default_rng((seed, _SPLIT_TAG, max(0, label))).permutation(len(members))
        for index, split_members in enumerate(np.split(members[order], np.cumsum(counts)[:-1])):
            split_of[split_members] = index
    return split_of


def _divide_by_lack(
    present: Ints, new: int, target_shares: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Divide `new` samples among splits in proportion to what each lacks of its share.

    Args:
        present: int64 [splits], samples that each split has.

    Returns:
        float64 [splits], which sum to `new`.
    """
    lack = np.maximum((present.sum() + new) * target_shares - present, 0)
    quota: npt.NDArray[np.float64] = lack * (new / lack.sum())
    return quota
