"""Which sample goes into which shard, as which row. Pure: touches no disk."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precache.errors import SettingError
from precache.recipe import DEFAULT_SPLITS, Recipe, parse_splits
from precache.source import SampleRef

_SHUFFLE_TAG, _SPLIT_TAG = 1, 5


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard to write: `name` has no suffix, `samples` are in the order of their rows."""

    name: str
    split: str
    samples: tuple[SampleRef, ...]


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """All shards of a conversion, each sample in exactly one of them."""

    recipe: Recipe
    shards: tuple[ShardPlan, ...]


def plan_conversion(samples: Sequence[SampleRef], recipe: Recipe) -> ConvertPlan:
    """Shuffle `samples` globally by `recipe.seed` and cut them into shards of near-equal count.

    The plan does not depend on `recipe.format`: the same tree gives the same shards in every
    format. It is written shuffled because sequential readers can shuffle only within a window.

    Raises:
        SettingError: the samples have splits already, and the recipe asks for others.
    """
    shards = []
    for split, members in _splits(samples, recipe).items():
        order = np.random.default_rng((recipe.seed, _SHUFFLE_TAG)).permutation(len(members))
        shard_count = -(-len(members) // recipe.samples_per_shard)
        for index, rows in enumerate(np.array_split(order, shard_count) if shard_count else []):
            shards.append(ShardPlan(f"{split}-{index:05d}", split, tuple(members[row] for row in rows)))
    return ConvertPlan(recipe, tuple(shards))


def _splits(samples: Sequence[SampleRef], recipe: Recipe) -> dict[str, list[SampleRef]]:
    if not samples or not samples[0].split:
        return split_samples(samples, parse_splits(recipe.splits), recipe.seed)
    names = list(dict.fromkeys(sample.split for sample in samples))
    if recipe.splits != DEFAULT_SPLITS:
        raise SettingError(
            f"splits {recipe.splits!r} asked for, but the source has its own: {', '.join(names)}; "
            f"leave --splits out to keep them"
        )
    return {name: [sample for sample in samples if sample.split == name] for name in names}


def split_samples(
    samples: Sequence[SampleRef], shares: dict[str, float], seed: int
) -> dict[str, list[SampleRef]]:
    """Put each sample into one split, class by class, by the largest remainder.

    What a class's whole numbers leave over or short is carried to the next class, so that both
    each class and the whole set are within one sample of their shares. Members keep their order.
    """
    classes: dict[int, list[SampleRef]] = {}
    for sample in samples:
        classes.setdefault(sample.label, []).append(sample)
    names = list(shares)
    wanted = np.array(list(shares.values()))
    carried = np.zeros(len(names))
    split_of: dict[int, str] = {}
    for label, members in classes.items():
        quota = len(members) * wanted
        counts = np.floor(quota).astype(int)
        remainder = quota - counts
        for index in np.argsort(-(remainder + carried), kind="stable")[: len(members) - counts.sum()]:
            counts[index] += 1
        carried += quota - counts
        order = np.random.default_rng((seed, _SPLIT_TAG, label)).permutation(len(members))
        for name, rows in zip(names, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            split_of.update((members[row].id, name) for row in rows)
    return {name: [s for s in samples if split_of[s.id] == name] for name in names}
