"""The types that pass between a loader, its backend and the training loop."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import register_pytree_node

from precache.errors import ImageError

Positions: TypeAlias = npt.NDArray[np.int64]
"""int64 [n]: ranks of samples in the stored order of a split."""


MASK = "mask"
"""The field that is on the device of the images, and goes where they go."""


def masks_in(fields: Mapping[str, Any]) -> torch.Tensor | None:
    """The masks among the fields of a batch, uint8; a field of the user's may have their name."""
    masks = fields.get(MASK)
    return masks if isinstance(masks, torch.Tensor) and masks.dtype == torch.uint8 else None


class Batch(list[torch.Tensor]):
    """What a training step takes: `images, labels = batch`.

    A list of these two, as torch's DataLoader yields it, so that frameworks unpack it, slice it, move it,
    pin it and make it anew as they do with a DataLoader's, and what copies it keeps the rest. Compared
    and hashed as the object that it is.

    Attributes:
        images: [n, channels, height, width] in channels-last memory, RGB unless converted to other channels;
            normalised floats, or integers, as `dtype` of `loaders.build` says.
        labels: int64 [n] of samples of one class each; else float32 [n, ...], see `loaders.transfer`.
        ids: int64 [n], on the CPU: each picture's rank in the sorted scan of the source tree.
        padding: bool [n], on the CPU: which samples are repeats, so that every rank has as many batches;
            see `last` of `loaders.Sampling`.
        fields: what else is known of the samples, by name, on the CPU; see `loaders.transfer`.
        views: tuple of as many batches of images as `loaders.Serving` says, each drawn anew of the
            same pictures; the first is `images`. Masks and boxes follow the first.
    """

    # the last two are the loader's own, until it serves the batch: an event behind the work on it, where that
    # may still be going on, and as of `DecodedBatch`
    __slots__ = ("_ids", "_other_views", "_padding", "fields", "ready", "refused")

    def __init__(
        self,
        images: torch.Tensor | Iterable[torch.Tensor],
        labels: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
        fields: Mapping[str, Any] | None = None,
        other_views: Iterable[torch.Tensor] = (),
    ) -> None:
        """Of images and labels, or, as frameworks make a list anew, of one iterable of both."""
        parts: list[Any] = list(images) if labels is None else [images, labels]
        if len(parts) != 2 or (labels is None and isinstance(images, torch.Tensor)):
            raise TypeError(f"a batch is images and labels, got {[type(part).__name__ for part in parts]}")
        super().__init__(parts)
        self._ids, self._padding, self.fields = ids, padding, dict(fields or {})
        self._other_views = tuple(other_views)
        self.ready: torch.cuda.Event | None = None
        self.refused: Mapping[int, ImageError] = {}

    @property
    def images(self) -> torch.Tensor:
        """See the class; it is `batch[0]`."""
        return self[0]

    @property
    def labels(self) -> torch.Tensor:
        """See the class; it is `batch[1]`."""
        return self[1]

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """See the class."""
        return (self[0], *self._other_views)

    @property
    def ids(self) -> torch.Tensor:
        """See the class.

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
        """See the class; AttributeError as of `ids`."""
        if self._padding is None:
            self._padding = torch.zeros(len(self.ids), dtype=torch.bool, device="cpu")
        return self._padding

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "Batch":
        """The batch with images, labels and masks on `device`; Lightning and Accelerate call this on each."""
        return self._with(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self, device: torch.device | str | None = None) -> "Batch":
        """The batch with images, labels and masks in pinned memory; torch's DataLoader calls this."""
        return self._with(torch.Tensor.pin_memory)

    def _with(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        images, labels = map(moved, self)
        masks = masks_in(self.fields)
        fields = self.fields if masks is None else {**self.fields, MASK: moved(masks)}
        return Batch(images, labels, self._ids, self._padding, fields, map(moved, self._other_views))

    def __setitem__(self, place: Any, part: Any) -> None:
        # torch's default_collate stacks several batches into a copy of the first: its ids are not theirs
        if place == 0 and (part.shape[:1] != self[0].shape[:1] or part.ndim != self[0].ndim):
            self._ids = self._padding = None
            self.fields, self._other_views = {}, ()
        super().__setitem__(place, part)

    def __contains__(self, part: object) -> bool:
        return any(part is ours for ours in self)  # == of tensors is not a truth value

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:  # type: ignore[override]  # a list has none
        return id(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (*self, self._ids, self._padding, self.fields, self._other_views)

    def __repr__(self) -> str:
        images, labels = (f"{p.dtype} {[*p.shape]}" if isinstance(p, torch.Tensor) else p for p in self)
        return f"<loaders.Batch: images {images}, labels {labels}>"


def _flatten(batch: Batch) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    return list(batch), (batch._ids, batch._padding, batch.fields, batch._other_views)


def _unflatten(parts: Iterable[Any], rest: tuple[Any, ...]) -> Batch:
    batch = Batch(parts)
    batch._ids, batch._padding, batch.fields, batch._other_views = rest
    return batch


# torchvision's transforms take a whole batch by this: `CutMix(...)(batch)`
register_pytree_node(Batch, _flatten, _unflatten, serialized_type_name="loaders.Batch")


@dataclass(frozen=True, slots=True)
class Request:
    """The samples that a backend is asked for as one batch.

    Attributes:
        epoch: that they are served in.
        positions: int64 [n].
        padding: how many at the end of `positions` are repeats, which fill up.
        places: int64 [n], of the samples in their epoch, where one may come again, which is drawn anew then.
    """

    epoch: int
    positions: Positions
    padding: int = 0
    places: Positions | None = None

    def select(self, slots: Positions) -> "Request":
        """Of these samples alone."""
        padding = int((slots >= len(self.positions) - self.padding).sum())
        places = None if self.places is None else self.places[slots]
        return Request(self.epoch, self.positions[slots], padding, places)

    def without(self, refused: Collection[int]) -> "Request":
        """Of the samples that do not have these numbers."""
        if not refused:
            return self
        return self.select(np.delete(np.arange(len(self.positions)), [*refused]))


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """What a backend hands over.

    Attributes:
        images: uint8 [n, height, width, channels], on the CPU or the loader's device; of pictures that are
            served whole, each of its own size, uint8 [bytes], one behind the other. Of several views, if the
            backend crops them, one behind the other: [views * n, ...].
        refused: why pictures could not be decoded, by their numbers in the request; the others are there,
            in the order asked.
    """

    images: torch.Tensor
    refused: Mapping[int, ImageError] = field(default_factory=dict)


class Reader(Protocol):
    """A backend: decodes the samples that it is asked for, in the order asked.

    Attributes:
        random_access: whether any order is as good as the stored one.
    """

    random_access: bool

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request; runs in a thread, ahead of the training, on the loader's lane.

        `requests` go on from epoch to epoch without end. A reader may look ahead in them. It is left
        midway, by closing the generator, where the caller wants another epoch than the next.
        """

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
