"""What trials are measured on: full batches, epoch after epoch.

A short last batch is another shape: cuDNN would tune for it and torch compile for it inside the measurement,
while the trainer alone, which is fed one batch again and again, never pays for that.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from loaders.batch import Batch
from precache.errors import SettingError
from precache.pictures.sizes import Size

LAST = "drop"
"""What the loader of a trial does with the samples that fill no batch, see `loaders.build`."""


class Feed(AbstractContextManager[Any], Protocol):
    """What a trial needs of a loader: one of `loaders.build`, or one that people use today."""

    batch_size: int
    samples: int
    classes: tuple[str, ...]

    @property
    def size(self) -> Size:
        """Of the served pictures."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int:
        """Batches per epoch."""


def check_fills_batch(batch_size: int, samples: int) -> None:
    """Raise SettingError where an epoch of `samples` has no full batch."""
    if batch_size > samples:
        raise SettingError(
            f"batch_size {batch_size:,} is more than the {samples:,} pictures of an epoch, and trials are "
            f"measured on full batches; choose a smaller one"
        )


def endless(loader: Feed) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it is the first of its epoch; `loader` was built with `last=LAST`.

    Raises:
        SettingError: an epoch has no full batch.
    """
    if not len(loader):  # else this would go on for ever without a batch
        check_fills_batch(loader.batch_size, loader.samples)
    while True:
        for number, batch in enumerate(loader):
            yield batch, number == 0
