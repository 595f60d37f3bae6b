"""Dataset and samplers of a loader, for frameworks that take it for torch's DataLoader.

Lightning reads `loader.batch_sampler.sampler`, Accelerate `loader.dataset`. A framework that makes a
DataLoader of these parts, as Accelerate's `skip_first_batches` does, gets the loader's own batches:
`RankBatchSampler` names them, and `SplitDataset` returns them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, SequentialSampler

from loaders.batch import Batch, Request, Step
from loaders.dataset import SplitData
from loaders.order import RankBatches
from precache.dataset.columns import Ints
from precache.errors import SettingError


class SplitDataset(Dataset[Any]):
    """Samples of a loader's split: number, labels and ids; batches are taken through `RankBatchSampler`.

    Args:
        data: split that the loader serves.
        take: returns the loader's batch of a step.

    Attributes:
        classes: class names.
        class_to_idx: class name -> label.
    """

    total_dataset_length = 0  # tells Accelerate not to cut the last gathered batch

    def __init__(self, data: SplitData, take: Callable[[Step], Batch]) -> None:
        self.classes = data.classes
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        self._data, self._take = data, take

    @property
    def targets(self) -> list[Any]:
        """Label of each sample, in stored order: a class as an index, a number, or a list of either."""
        return self._data.targets()

    @property
    def ids(self) -> Ints:
        """Id of each sample, int64 [n], in the order of `targets`."""
        return np.array(self._data.ids[:])

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return (
            f"<loaders.SplitDataset {self._data.kind} {self._data.path}: {self._data.split}, "
            f"{len(self):,} samples, {len(self.classes):,} classes>"
        )

    def __getitem__(self, position: Any) -> Any:
        raise SettingError(
            f"the loader of {self._data.path} serves whole batches, and divides them among processes by "
            f"itself",
            remedy="iterate over the loader, pass it to accelerator.prepare(), or pass on its `dataset` and "
            "`batch_sampler` together, unchanged",
        )

    def __getitems__(self, positions: list[int]) -> Batch:
        """Return the batch that `RankBatchSampler` named; raise SettingError for any other list."""
        if isinstance(positions, NamedBatch) and positions.is_next():
            return self._take(positions.step)
        return self[positions]  # type: ignore[no-any-return]  # raises


class NamedBatch(list[int]):
    """Samples of a batch, as positions in stored order, that knows where in an iteration it is served.

    Args:
        latest: holder of the number of the batch taken last in the same iteration, shared by its batches.

    Attributes:
        step: epoch and number of the batch.
    """

    def __init__(self, positions: list[int], step: Step, latest: "_LatestBatch") -> None:
        super().__init__(positions)
        self.step = step
        self._samples = len(positions)
        self._latest = latest

    def is_next(self) -> bool:
        """Return whether it is whole and follows the batch taken last, and count it as taken.

        A batch in between that another process got, or one that was cut, shows that a framework divides
        the batches among processes, which the loader does by itself.
        """
        number = self.step[1]
        follows = self._latest.number is None or number == self._latest.number + 1
        self._latest.number = number
        return follows and len(self) == self._samples


@dataclass(slots=True)
class _LatestBatch:
    """Number of the batch taken last in an iteration; None before the first."""

    number: int | None = None


class RankSampler(Sampler[int]):
    """Positions that this rank serves in the coming epoch; setting its epoch sets the loader's.

    Args:
        batches: batches of the loader.
        epoch: epoch that the loader serves next.
        set_epoch: sets the loader's epoch.
    """

    def __init__(self, batches: RankBatches, epoch: int, set_epoch: Callable[[int], None]) -> None:
        self._batches, self._epoch, self._set_epoch = batches, epoch, set_epoch

    def set_epoch(self, epoch: int) -> None:
        """Serve epoch `epoch` next, see `loaders.Loader.set_epoch`."""
        self._set_epoch(epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for request in self._batches.requests(self._epoch):
            yield from request.positions.tolist()

    def __len__(self) -> int:
        return self._batches.rank_samples()


class SequentialRankSampler(RankSampler, SequentialSampler):
    """Sampler of a loader that does not shuffle; Lightning's `overfit_batches` wants a SequentialSampler."""


class RankBatchSampler:
    """Names the batches of one iteration of the loader, as torch's `BatchSampler` names samples.

    Args:
        batches: batches of the loader.
        begin_iteration: begins an iteration of the loader, and yields the step of each of its batches.

    Attributes:
        sampler: sampler of the samples.
        batch_size: samples in a batch of this rank.
        drop_last: whether samples that fill no batch are left out.
    """

    def __init__(
        self,
        sampler: RankSampler,
        batches: RankBatches,
        batch_size: int,
        drop_last: bool,
        begin_iteration: Callable[[], Iterator[Step]],
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self._batches, self._begin_iteration = batches, begin_iteration

    def set_epoch(self, epoch: int) -> None:
        """Serve epoch `epoch` next, see `loaders.Loader.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[NamedBatch]:
        latest = _LatestBatch()
        requests: Iterator[Request] | None = None
        for step in self._begin_iteration():
            if requests is None:
                requests = self._batches.requests(*step)
            yield NamedBatch(next(requests).positions.tolist(), step, latest)

    def __len__(self) -> int:
        return len(self._batches)


def return_unchanged(batch: torch.Tensor) -> torch.Tensor:
    """Return `batch`; the `collate_fn` of a loader, whose batches are whole already."""
    return batch
