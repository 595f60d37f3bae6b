"""What frameworks look for at a loader that they take for torch's DataLoader: data set and samplers.

Who puts a DataLoader together out of them, as Accelerate's `skip_first_batches` does, gets the loader's own
batches: `RankBatchSampler` names them, and `SplitDataset` hands them over.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler, SequentialSampler

from loaders.batch import Batch
from loaders.dataset import SplitData
from loaders.mixture import MixedData
from loaders.order.order import Order
from precache.errors import SettingError

if TYPE_CHECKING:
    from loaders.loader import Loader

Place = tuple[int, int]
"""Epoch and number of a batch."""


class SplitDataset(Dataset[Any]):
    """The samples of a split: how many, of which classes.

    Attributes:
        classes: class names.
        class_to_idx: class name -> label.
    """

    def __init__(self, loader: "Loader", data: SplitData | MixedData) -> None:
        self.classes = data.classes
        self.class_to_idx = {name: label for label, name in enumerate(data.classes)}
        self._loader = loader
        self._data = data

    @property
    def targets(self) -> list[Any]:
        """What each sample is labelled with, in stored order: an index, a number, or a list of them."""
        return self._data.targets()

    @property
    def total_dataset_length(self) -> int:
        """0: Accelerate need not cut anything off what it gathers of the last batch."""
        return 0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, position: Any) -> Any:
        raise SettingError(
            f"the loader of {self._data.path} serves whole batches, and divides them among processes by "
            f"itself; iterate over the loader, pass it to accelerator.prepare(), or pass on its `dataset` "
            f"and `batch_sampler` together, unchanged"
        )

    def __getitems__(self, asked: list[int]) -> Batch:
        """The batch that `RankBatchSampler` named."""
        if not isinstance(asked, BatchPlace) or not asked.follows():
            self[asked]  # raises
            raise AssertionError
        return self._loader.take(asked.place)


class BatchPlace(list[int]):
    """The samples of a batch, as positions in stored order, and where in an iteration it is served."""

    def __init__(self, positions: list[int], place: Place, taken: list[int]) -> None:
        super().__init__(positions)
        self.place = place
        self._samples = len(positions)
        self._taken = taken  # the number of the batch taken before in the same iteration

    def follows(self) -> bool:
        """Whether it is whole and next: none between the one before and this one was given to another."""
        number = self.place[1]
        follows = len(self) == self._samples and (not self._taken or number == self._taken[0] + 1)
        self._taken[:] = [number]
        return follows


class RankSampler(Sampler[int]):
    """The positions that this rank serves in the coming epoch; who sets its epoch sets the loader's."""

    def __init__(self, loader: "Loader", order: Order, epoch: int) -> None:
        self._loader = loader
        self._order = order
        self._epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """See `loaders.Loader.set_epoch`."""
        self._loader.set_epoch(epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for share in self._order.batches(self._epoch):
            yield from share.positions.tolist()

    def __len__(self) -> int:
        return self._order.cut.rank_samples()


class InStoredOrder(RankSampler, SequentialSampler):
    """Of a loader that does not shuffle: Lightning's `overfit_batches` wants a SequentialSampler."""


class RankBatchSampler:
    """Names the batches of one iteration of the loader, as torch's `BatchSampler` names samples."""

    def __init__(self, loader: "Loader", sampler: RankSampler, order: Order) -> None:
        self.sampler = sampler
        self.batch_size = order.cut.batch_size
        self.drop_last = order.cut.last == "drop"
        self._loader = loader
        self._order = order

    def set_epoch(self, epoch: int) -> None:
        """See `loaders.Loader.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[BatchPlace]:
        taken: list[int] = []
        shares = None
        iteration = self._loader.__iter__()
        while (place := iteration.next_place()) is not None:
            shares = shares or self._order.batches(place[0])
            yield BatchPlace(shares[place[1]].positions.tolist(), place, taken)

    def __len__(self) -> int:
        return len(self._loader)


def make_batch_sampler(loader: "Loader", order: Order, epoch: int) -> RankBatchSampler:
    """The sampler of `loader`, whose next iteration serves `epoch`; its `sampler` is that of the samples."""
    kind = InStoredOrder if order.epochs.kind == "none" else RankSampler
    return RankBatchSampler(loader, kind(loader, order, epoch), order)


def as_is(batch: torch.Tensor) -> torch.Tensor:
    """What is served is collated."""
    return batch
