"""The shards of a dataset at a URL, fetched to this machine when they are needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from precache.converted import ConvertedDataset
from precache.shard_table import ShardTable


@dataclass(frozen=True, slots=True)
class RemoteShards:
    """What is fetched for each shard of a split.

    Attributes:
        shards: in stored order.
    """

    dataset: ConvertedDataset
    shards: ShardTable

    @classmethod
    def of(cls, dataset: ConvertedDataset, shards: ShardTable) -> "RemoteShards | None":
        """Of a dataset at a URL; None: it lies on this machine."""
        return None if dataset.mirror is None else cls(dataset, shards)

    @contextmanager
    def held(self, number: int) -> Iterator[None]:
        """Have the files of shard `number` on this machine until the end of the block.

        Raises:
            StorageError: one cannot be fetched.
        """
        with self.dataset.held(*self.shards[number].files):
            yield
