"""Which sample goes into which shard, as which row. Pure: touches no disk."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precache.recipe import Recipe
from precache.source import SampleRef

_SHUFFLE_TAG = 1


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
    """
    order = np.random.default_rng((recipe.seed, _SHUFFLE_TAG)).permutation(len(samples))
    shard_count = -(-len(samples) // recipe.samples_per_shard)
    shards = []
    for index, rows in enumerate(np.array_split(order, shard_count)):
        members = tuple(samples[row] for row in rows)
        shards.append(ShardPlan(f"train-{index:05d}", "train", members))
    return ConvertPlan(recipe, tuple(shards))
