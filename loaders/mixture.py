"""Several datasets served as one: which sample of which comes when, and batches put together of theirs.

Every batch holds its share of each, as evenly spread as can be: that keeps gradients and batch statistics
steadier than shares that are right on average alone. An epoch serves each sample of the first dataset once,
and of the others as many as their shares say: each goes through its own epochs, one after the other, wherever
those of the mixture begin, so that no sample comes again before all others of its dataset.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from loaders.batch import Batch, Positions, Request
from loaders.dataset import SplitData
from loaders.device import upload
from loaders.transfer import Pipeline
from precache.errors import SettingError

DATASET = "dataset"
"""The field that says which dataset a sample is of."""


def unite_classes(parts: Sequence[SplitData]) -> list[SplitData]:
    """The parts with the classes of all, by name: those of the first, then what the next ones add.

    Raises:
        SettingError: they cannot be in one batch.
    """
    targets = [part.index.targets for part in parts]
    kinds = {None if t is None else (t.kind, t.row_shape) for t in targets}
    if len(kinds) > 1 or (targets[0] is not None and len({part.classes for part in parts}) > 1):
        raise SettingError(
            "datasets of a mixture must have the same kind of labels: one class each, or the same targets"
        )
    if len({(part.channels, part.dtype) for part in parts}) > 1:
        kinds_of = " and ".join(f"{part.dtype} of {part.channels}" for part in parts)
        raise SettingError(f"datasets of a mixture must have the same channels, got {kinds_of}")
    classes = tuple(dict.fromkeys(name for part in parts for name in part.classes))
    labels = {name: label for label, name in enumerate(classes)}
    return [
        part
        if part.classes == classes
        else part.relabel(classes, np.array([labels[name] for name in part.classes]))
        for part in parts
    ]


def samples_of(shares: Sequence[float] | None, samples: Sequence[int]) -> tuple[int, ...]:
    """How many samples of each dataset an epoch has; without shares, all that each has.

    Raises:
        SettingError: the shares are not one for each, or not above 0.
    """
    if shares is None:
        return tuple(samples)
    given = np.asarray(shares, object)
    try:
        numbers = given.astype(np.float64)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    if numbers.shape != (len(samples),) or not (np.isfinite(numbers) & (numbers > 0)).all():
        raise SettingError(
            f"shares must be {len(samples)} numbers above 0, one for each path, got {shares!r}"
        )
    counts = samples[0] * (numbers / numbers[0])
    if counts.max() > 2**40:
        raise SettingError(
            f"shares {shares!r} make an epoch of more than {2**40:,} samples; give closer shares"
        )
    return tuple(max(1, round(count)) for count in counts.tolist())


class Mixture:
    """The pipelines of several splits, `parts`, as one, see `loaders.loader.Source`."""

    def __init__(self, parts: Sequence[Pipeline]) -> None:
        sizes = {part.size for part in parts}
        self.lane = parts[0].lane
        self.size = sizes.pop() if len(sizes) == 1 else None
        self.parts = parts
        self._starts = np.cumsum([0, *(len(part.data) for part in parts)])

    def read(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        """Yield one batch per request, each part's samples by its own pipeline."""
        starts = self._starts  # not `self`: a reader keeps what asks it, which would keep the reader
        whole: deque[list[tuple[int, Positions, Request]]] = deque()
        waiting: list[deque[Request]] = [deque() for _ in self.parts]

        def pull() -> bool:
            request = next(requests, None)
            if request is not None:
                whole.append(_split(request, starts))
                for number, _, part in whole[-1]:
                    waiting[number].append(part)
            return request is not None

        def ask(number: int) -> Iterator[Request]:
            while waiting[number] or pull():
                if waiting[number]:
                    yield waiting[number].popleft()

        with ExitStack() as at_end:
            streams = [
                at_end.enter_context(closing(part.read(ask(number))))
                for number, part in enumerate(self.parts)
            ]
            while whole or pull():
                parts = whole.popleft()
                yield self._merge([(*part, next(streams[part[0]])) for part in parts])

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        for part in self.parts:
            part.close()

    def _merge(self, parts: list[tuple[int, Positions, Request, Batch]]) -> Batch:
        """One batch of those of the parts, in the order asked."""
        refused = dict(enumerate(chain.from_iterable(batch.refused.values() for *_, batch in parts)))
        found = [part for part in parts if len(part[3].ids)]
        if not found:
            parts[0][3].refused = refused
            return parts[0][3]
        slots = [np.delete(slots, [*batch.refused]) for _, slots, _, batch in found]
        batches = [batch for *_, batch in found]
        order = np.argsort(np.concatenate(slots))  # of what is served, among the parts' one behind the other
        rows = np.split(np.argsort(order), np.cumsum([len(part) for part in slots])[:-1])
        on_cpu = torch.from_numpy(order)
        on_device = upload(on_cpu, self.lane.device)
        places = [upload(torch.from_numpy(part), self.lane.device) for part in rows]
        views = [_interleave(images, places) for images in zip(*(b.views for b in batches), strict=True)]
        numbers = np.repeat([number for number, *_ in found], [len(part) for part in slots])
        batch = Batch(
            views[0],
            torch.cat([batch.labels for batch in batches])[on_device],
            torch.cat([batch.ids for batch in batches])[on_cpu],
            torch.cat([batch.padding for batch in batches])[on_cpu],
            {**_merge_fields(batches, order), DATASET: torch.from_numpy(numbers)[on_cpu]},
            views[1:],
        )
        batch.ready, batch.refused = self.lane.mark(), refused
        return batch


def _split(request: Request, starts: Positions) -> list[tuple[int, Positions, Request]]:
    """Of each part that is in `request`: its number, which samples they are, and what to ask it for."""
    numbers = np.searchsorted(starts, request.positions, side="right") - 1
    parts = []
    for number in np.unique(numbers).tolist():
        slots = np.flatnonzero(numbers == number)
        part = request.select(slots)
        parts.append((number, slots, replace(part, positions=part.positions - starts[number])))
    return parts


def _merge_fields(batches: Sequence[Batch], order: Positions) -> dict[str, Any]:
    """The fields that all of them have, of the samples in this order."""
    merged: dict[str, Any] = {}
    for name in set.intersection(*(set(batch.fields) for batch in batches)):
        parts = [batch.fields[name] for batch in batches]
        if not all(isinstance(part, torch.Tensor) for part in parts):
            listed = list(chain.from_iterable(parts))
            merged[name] = [listed[row] for row in order.tolist()]
        elif len({(part.dtype, part.shape[1:]) for part in parts}) == 1:
            values = torch.cat(parts)
            merged[name] = values[upload(torch.from_numpy(order), values.device)]
        else:
            raise SettingError(
                f"field {name} has different kinds in the datasets of the mixture: "
                f"{' and '.join(f'{part.dtype} {[*part.shape[1:]]}' for part in parts)}"
            )
    return merged


def _interleave(parts: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n, 3, height, width] of `parts`, each picture in its place, in channels-last memory."""
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        sizes = " and ".join(f"{height}x{width}" for _, height, width in sorted(shapes))
        raise SettingError(f"the datasets of a mixture are served in one size, these are {sizes}; give size")
    out = torch.empty(
        (sum(map(len, parts)), *parts[0].permute(0, 2, 3, 1).shape[1:]),
        dtype=parts[0].dtype,
        device=parts[0].device,
    )
    # of uint16 torch writes no rows: the same bytes as int16
    dtype = torch.int16 if out.dtype == torch.uint16 else out.dtype
    for part, place in zip(parts, places, strict=True):
        out.view(dtype)[place] = part.permute(0, 2, 3, 1).view(dtype)
    return out.permute(0, 3, 1, 2)
