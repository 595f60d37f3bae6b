"""The shards of a dataset at a URL, fetched to this machine when they are needed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from precache.converted import ConvertedDataset
from precache.files import FileEntry
from precache.manifest import ShardEntry


@dataclass(frozen=True, slots=True)
class RemoteShards:
    """What is fetched for each shard of a split.

    Attributes:
        files: of each shard, in stored order.
    """

    dataset: ConvertedDataset
    files: tuple[tuple[FileEntry, ...], ...]

    @classmethod
    def of(cls, dataset: ConvertedDataset, shards: Sequence[ShardEntry]) -> "RemoteShards | None":
        """Of a dataset at a URL; None: it lies on this machine."""
        return None if dataset.mirror is None else cls(dataset, tuple(shard.files for shard in shards))

    @contextmanager
    def held(self, number: int) -> Iterator[None]:
        """Have the files of shard `number` on this machine until the end of the block.

        Raises:
            StorageError: one cannot be fetched.
        """
        with self.dataset.held(*self.files[number]):
            yield
