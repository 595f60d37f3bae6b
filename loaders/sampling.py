"""Which samples of a split are served, how often, and in which order, as `loaders.build` was told."""

from loaders.dataset import SplitData
from loaders.order import EpochOrder
from loaders.settings import LoaderSpec
from precache.errors import SettingError


def make_order(spec: LoaderSpec, data: SplitData, random_access: bool) -> EpochOrder:
    """The order of each epoch.

    Raises:
        SettingError: the backend cannot serve it, or it cannot be had within `memory_bytes`.
    """
    return EpochOrder(
        ids=data.ids,
        shard_samples=data.shard_samples,
        kind=_shuffle_kind(spec, random_access),
        seed=spec.seed,
        batch_size=spec.batch_size,
        last=spec.last,
        window_shards=data.window_shards(spec.reading.memory_bytes),
        rank=spec.rank,
        world_size=spec.world_size,
    )


def _shuffle_kind(spec: LoaderSpec, random_access: bool) -> str:
    """`full`, `window` or `none`."""
    if spec.shuffle is True:
        return "full" if random_access else "window"
    if spec.shuffle == "full" and not random_access:
        raise SettingError(
            f"shuffle 'full' needs random access, which {spec.path} does not give; use 'window' or True"
        )
    return "none" if spec.shuffle is False else spec.shuffle
