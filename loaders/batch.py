"""Types that pass between a loader, its backend and the training loop.

Everywhere in `loaders` a sample is named by one of these numbers:

    id          its name for good, `Batch.ids`
    row         its number in its shard
    position    its number in the stored order of a split, or of a part of one
    place       its number in the order of an epoch
    slot        its number in a batch, or in the request for the batch
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import register_pytree_node

from precache.dataset.columns import Ints
from precache.errors import ImageError
from precache.pictures.jpeg import Pixels

Positions: TypeAlias = npt.NDArray[np.int64]
"""int64 [n]: numbers of samples in the stored order of a split."""
Step: TypeAlias = tuple[int, int]
"""Epoch of a batch, and the batch's number in it."""


class Batch(list[torch.Tensor]):
    """Batch for one training step: `images, labels = batch`.

    A list of these two, as torch's DataLoader yields it, so that frameworks unpack, slice, move, pin and
    rebuild it as they do a DataLoader's batch. Copies keep the other attributes. Two batches are equal if
    they are the same object.

    Attributes:
        images: [n, channels, height, width] in channels-last memory, RGB unless converted to other channels;
            normalised floats, or integers, as `dtype` of `loaders.build` says. In this memory
            `images.reshape(n, -1)` and `images.flatten(1)` make rows; `images.view(n, -1)` raises. With
            several views a list of them, as torch's DataLoader makes of a transform that returns several.
        labels: int64 [n] if each sample has one class; else float32 [n, ...], see `loaders.transfer`. With
            MixUp or CutMix float32 [n, classes], the weight of each class.
        ids: int64 [n], on the CPU: each sample's name for good, which every format keeps.
        padding: bool [n], on the CPU: which samples are repeats, so that every rank has as many batches;
            see `last` of `loaders.Sampling`.
        fields: other values of the samples, by name, on the CPU; see `loaders.transfer`.
        views: tuple of as many batches of images as `loaders.RandomAugmentation` says, each drawn anew from
            the same pictures; a single one is `images`. Their sizes may differ.
        partners: int64 [n], on the CPU: slot of the picture that each one was mixed with, by MixUp or CutMix;
            None if pictures are as they were drawn.
    """

    # The loader uses the last two until it serves the batch: `ready` is an event behind the work on it, if
    # that may still be going on, and `refused` is that of `DecodedBatch`.
    __slots__ = ("_ids", "_padding", "fields", "partners", "ready", "refused")

    def __init__(
        self,
        images: torch.Tensor | Iterable[torch.Tensor],
        labels: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
        fields: Mapping[str, Any] | None = None,
        partners: torch.Tensor | None = None,
    ) -> None:
        """Make a batch of images, or several views, and labels; or of one iterable of both.

        Frameworks rebuild a list of an iterable.
        """
        parts: list[Any] = list(images) if labels is None else [images, labels]
        if len(parts) != 2 or (labels is None and isinstance(images, torch.Tensor)):
            raise TypeError(f"a batch is images and labels, got {[type(part).__name__ for part in parts]}")
        super().__init__(parts)
        self._ids, self._padding, self.fields = ids, padding, dict(fields or {})
        self.partners = partners
        self.ready: torch.cuda.Event | None = None
        self.refused: Mapping[int, ImageError] = {}

    @property
    def images(self) -> torch.Tensor:
        """Images, `batch[0]`; a list with several views, see the class."""
        return self[0]

    @property
    def labels(self) -> torch.Tensor:
        """Labels, `batch[1]`; see the class."""
        return self[1]

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """Batches of images, one per view; see the class."""
        return _views(self[0])

    @property
    def ids(self) -> torch.Tensor:
        """Sample ids; see the class.

        Raises:
            AttributeError: a framework made this batch of images and labels alone.
        """
        if self._ids is None:
            raise AttributeError(
                "this batch has no ids: a framework that moved or gathered it rebuilt it from images and "
                "labels alone; take the ids of the batch that the loader served"
            )
        return self._ids

    @property
    def padding(self) -> torch.Tensor:
        """Marks of repeated samples; see the class.

        Raises:
            AttributeError: a framework made this batch of images and labels alone.
        """
        if self._padding is None:
            self._padding = torch.zeros(len(self.ids), dtype=torch.bool, device="cpu")
        return self._padding

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "Batch":
        """Return the batch with images and labels on `device`; Lightning and Accelerate call this."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self, device: torch.device | str | None = None) -> "Batch":
        """Return the batch with images and labels in pinned memory; torch's DataLoader calls this."""
        return self._map_tensors(torch.Tensor.pin_memory)

    def _map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Return the batch with `function` applied to its images and labels."""
        views, labels = [*map(function, self.views)], function(self[1])
        images = views if isinstance(self[0], list) else views[0]
        return Batch(images, labels, *_other_attributes(self))

    def __setitem__(self, index: Any, part: Any) -> None:
        # torch's default_collate stacks several batches into a copy of the first, whose ids do not hold then
        if index == 0:
            before, after = self.views[0], _views(part)[0]
            if after.shape[:1] != before.shape[:1] or after.ndim != before.ndim:
                self._ids = self._padding = self.partners = None
                self.fields = {}
        super().__setitem__(index, part)

    def __contains__(self, part: object) -> bool:
        return any(part is tensor for tensor in self)  # == of tensors is not a truth value

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:  # type: ignore[override]  # a list has none
        return id(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (*self, *_other_attributes(self))

    def __repr__(self) -> str:
        images = " and ".join(map(_describe, self.views))
        return f"<loaders.Batch: images {images}, labels {_describe(self[1])}>"


def _views(images: Any) -> tuple[Any, ...]:
    return tuple(images) if isinstance(images, (list, tuple)) else (images,)


def _describe(part: object) -> str:
    return f"{part.dtype} {[*part.shape]}" if isinstance(part, torch.Tensor) else str(part)


def _other_attributes(batch: Batch) -> tuple[Any, ...]:
    """Return the arguments that make a batch anew, behind images and labels."""
    return batch._ids, batch._padding, batch.fields, batch.partners


def _flatten(batch: Batch) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    return list(batch), _other_attributes(batch)


def _unflatten(parts: Iterable[Any], context: tuple[Any, ...]) -> Batch:
    batch = Batch(parts)
    batch._ids, batch._padding, batch.fields, batch.partners = context
    return batch


# with this torchvision's transforms take a whole batch: `CutMix(...)(batch)`
register_pytree_node(Batch, _flatten, _unflatten, serialized_type_name="loaders.Batch")


@dataclass(frozen=True, slots=True)
class Request:
    """Samples that a backend is asked for as one batch.

    Attributes:
        epoch: the epoch that they are served in.
        positions: int64 [n].
        padding: how many at the end of `positions` are repeats, which fill the batch up.
        places: int64 [n], the samples' places in their epoch; given where a sample may come several times in
            an epoch, so that it is augmented anew each time.
        memory: where a backend that fills batches on the CPU puts this one, uint8 [bytes], see
            `loaders.augment.crops.carve`; None: memory of its own.
    """

    epoch: int
    positions: Positions
    padding: int = 0
    places: Ints | None = None
    memory: Pixels | None = None

    def select(self, slots: Ints) -> "Request":
        """Return a request for the samples at `slots` of this one, int64 [m], alone."""
        padding = int((slots >= len(self.positions) - self.padding).sum())
        places = None if self.places is None else self.places[slots]
        return Request(self.epoch, self.positions[slots], padding, places)

    def drop(self, slots: Collection[int]) -> "Request":
        """Return a request for all samples but those at `slots` of this one."""
        if not slots:
            return self
        return self.select(np.delete(np.arange(len(self.positions)), [*slots]))


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """Pictures that a backend read for one request.

    Attributes:
        views: the pictures of each view, uint8 [n, height, width, channels], on the CPU or the loader's
            device; a single one where views are made of it later, or where a function of the caller has
            made [n, ...] of any dtype.
        refused: errors of the pictures that could not be decoded, by their slots; `views` have
            the others, in the order of the request.
    """

    views: tuple[torch.Tensor, ...]
    refused: Mapping[int, ImageError] = field(default_factory=dict)


class Reader(Protocol):
    """Backend: decodes the samples of each request, in the order of the requests.

    Attributes:
        random_access: whether it reads samples in any order as fast as in the stored one.
    """

    random_access: bool

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request; runs in a thread, ahead of the training, on the loader's lane.

        `requests` go on from epoch to epoch without end, and a reader may look ahead in them. The generator
        is closed midway when the caller wants another epoch than the next.
        """

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
