"""Serve several datasets as one: their classes united, their batches merged.

Every batch holds its share of each dataset, spread as evenly as possible: that keeps gradients and batch
statistics steadier than shares that hold on average alone. An epoch serves each sample of the first dataset
once, and as many of the others as their shares say. Each dataset goes through its own epochs, one after the
other, wherever the epochs of the mixture begin, so that no sample comes again before all others of its
dataset. `loaders.order.MixedEpochs` computes which sample comes when.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from loaders.batch import Batch, Positions, Request
from loaders.dataset import SplitData
from loaders.device import upload
from loaders.transfer import Pipeline
from precache.dataset.columns import Ints
from precache.errors import SettingError

DATASET = "dataset"
"""Name of the field that says which dataset a sample is from."""


def unite_classes(parts: Sequence[SplitData]) -> list[SplitData]:
    """Return the parts labelled by the classes of all: those of the first, then what the next ones add.

    Raises:
        SettingError: their samples cannot be in one batch.
    """
    targets = [part.index.targets for part in parts]
    kinds = {None if column is None else (column.kind, column.row_shape) for column in targets}
    if len(kinds) > 1 or (targets[0] is not None and len({part.classes for part in parts}) > 1):
        raise SettingError(
            "datasets of a mixture must have the same kind of labels: one class each, or the same targets"
        )
    if len({part.channels for part in parts}) > 1:
        channels = " and ".join(f"{part.channels}" for part in parts)
        raise SettingError(f"datasets of a mixture must have the same channels, got {channels}")
    classes = tuple(dict.fromkeys(name for part in parts for name in part.classes))
    labels = {name: label for label, name in enumerate(classes)}
    united = []
    for part in parts:
        if part.classes == classes:
            united.append(part)
        else:
            united.append(part.relabel(classes, np.array([labels[name] for name in part.classes])))
    return united


def epoch_samples(shares: Sequence[float] | None, samples: Sequence[int]) -> tuple[int, ...]:
    """Return how many samples of each dataset an epoch has; without shares, all of its samples.

    Args:
        shares: see `loaders.Sampling`.
        samples: number of samples of each dataset.

    Raises:
        SettingError: there is not one share for each dataset, or one is not above 0.
    """
    if shares is None:
        return tuple(samples)
    try:
        numbers = np.asarray(shares, object).astype(np.float64)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    if numbers.shape != (len(samples),) or not (np.isfinite(numbers) & (numbers > 0)).all():
        raise SettingError(
            f"shares must be {len(samples)} numbers above 0, one for each path, got {shares!r}"
        )
    counts = samples[0] * (numbers / numbers[0])
    if counts.max() > 2**40:
        raise SettingError(
            f"shares {shares!r} make an epoch of more than {2**40:,} samples", remedy="give closer shares"
        )
    return tuple(max(1, round(count)) for count in counts.tolist())


@dataclass(frozen=True, slots=True)
class _PartRequest:
    """Samples of one dataset in a request for the mixture.

    Attributes:
        number: the dataset's number.
        slots: int64 [n], slots of its samples in the mixture's request.
        request: request for these samples to the dataset's own pipeline.
    """

    number: int
    slots: Ints
    request: Request


class Mixture:
    """Pipelines of several splits, served as one, see `loaders.loader.Source`.

    Attributes:
        parts: pipeline of each split.
        lane: lane of the loader.
        size: size of the served pictures; None if it is not the same for all parts.
    """

    def __init__(self, parts: Sequence[Pipeline]) -> None:
        sizes = {part.size for part in parts}
        self.lane = parts[0].lane
        self.size = sizes.pop() if len(sizes) == 1 else None
        self.parts = parts
        self._starts = np.cumsum([0, *(len(part.data) for part in parts)])

    def read(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        """Yield one batch per request, reading each part's samples by its own pipeline."""
        starts = self._starts  # not `self`: readers keep the generators below alive, a cycle otherwise
        split_requests: deque[list[_PartRequest]] = deque()
        waiting: list[deque[Request]] = [deque() for _ in self.parts]

        def split_next() -> bool:
            request = next(requests, None)
            if request is None:
                return False
            parts = _split_request(request, starts)
            split_requests.append(parts)
            for part in parts:
                waiting[part.number].append(part.request)
            return True

        def part_requests(number: int) -> Iterator[Request]:
            while waiting[number] or split_next():
                if waiting[number]:
                    yield waiting[number].popleft()

        with ExitStack() as stack:
            streams = [
                stack.enter_context(closing(pipeline.read(part_requests(number))))
                for number, pipeline in enumerate(self.parts)
            ]
            while split_requests or split_next():
                parts = split_requests.popleft()
                yield self._merge(parts, [next(streams[part.number]) for part in parts])

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        for part in self.parts:
            part.close()

    def _merge(self, parts: list[_PartRequest], batches: list[Batch]) -> Batch:
        """Merge the batches of the parts into one, in the order of the request."""
        refused = dict(enumerate(chain.from_iterable(batch.refused.values() for batch in batches)))
        filled = [(part, batch) for part, batch in zip(parts, batches, strict=True) if len(batch.ids)]
        if not filled:
            batches[0].refused = refused
            return batches[0]
        batches = [batch for _, batch in filled]
        # the parts' samples lie one behind the other; slot i of the merged batch is sample order[i] of these
        request_slots = [np.delete(part.slots, [*batch.refused]) for part, batch in filled]
        order = np.argsort(np.concatenate(request_slots))
        merged_slots = np.split(np.argsort(order), np.cumsum([len(slots) for slots in request_slots])[:-1])
        order_on_cpu = torch.from_numpy(order)
        order_on_device = upload(order_on_cpu, self.lane.device)
        slots_on_device = [upload(torch.from_numpy(slots), self.lane.device) for slots in merged_slots]
        views = [
            _interleave(images, slots_on_device)
            for images in zip(*(batch.views for batch in batches), strict=True)
        ]
        datasets = np.repeat([part.number for part, _ in filled], [len(slots) for slots in request_slots])
        batch = Batch(
            views[0],
            torch.cat([batch.labels for batch in batches])[order_on_device],
            torch.cat([batch.ids for batch in batches])[order_on_cpu],
            torch.cat([batch.padding for batch in batches])[order_on_cpu],
            {**_merge_fields(batches, order), DATASET: torch.from_numpy(datasets)[order_on_cpu]},
            views[1:],
        )
        batch.ready, batch.refused = self.lane.mark(), refused
        return batch


def _split_request(request: Request, starts: Positions) -> list[_PartRequest]:
    """Split a request into one for each dataset that has samples in it.

    Args:
        starts: position of each dataset's first sample in the mixture, and behind the last one.
    """
    numbers = np.searchsorted(starts, request.positions, side="right") - 1
    parts = []
    for number in np.unique(numbers).tolist():
        slots = np.flatnonzero(numbers == number)
        selected = request.select(slots)
        selected = replace(selected, positions=selected.positions - starts[number])
        parts.append(_PartRequest(number, slots, selected))
    return parts


def _merge_fields(batches: Sequence[Batch], order: Ints) -> dict[str, Any]:
    """Return the fields that all `batches` have, of their samples in this order."""
    merged: dict[str, Any] = {}
    for name in set.intersection(*(set(batch.fields) for batch in batches)):
        parts = [batch.fields[name] for batch in batches]
        if not all(isinstance(part, torch.Tensor) for part in parts):
            values = list(chain.from_iterable(parts))
            merged[name] = [values[number] for number in order.tolist()]
        elif len({(part.dtype, part.shape[1:]) for part in parts}) == 1:
            tensor = torch.cat(parts)
            merged[name] = tensor[upload(torch.from_numpy(order), tensor.device)]
        else:
            raise SettingError(
                f"field {name} has different kinds in the datasets of the mixture: "
                f"{' and '.join(f'{part.dtype} {[*part.shape[1:]]}' for part in parts)}"
            )
    return merged


def _interleave(parts: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the images of `parts` as one [n, channels, height, width] in channels-last memory.

    Args:
        slots: for each part, int64 [m], the slots of its images in the result.
    """
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        sizes = " and ".join(f"{height}x{width}" for _, height, width in sorted(shapes))
        raise SettingError(
            f"the datasets of a mixture are served in one size, these are {sizes}", remedy="give size"
        )
    out = torch.empty(
        (sum(map(len, parts)), *parts[0].permute(0, 2, 3, 1).shape[1:]),
        dtype=parts[0].dtype,
        device=parts[0].device,
    )
    for part, part_slots in zip(parts, slots, strict=True):
        out[part_slots] = part.permute(0, 2, 3, 1)
    return out.permute(0, 3, 1, 2)
