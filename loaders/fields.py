"""What is known of the samples of a batch beside their pictures: targets and fields, for every backend here.

    kind     served as
    int      int64 [n]
    float    float64 [n]: as it is stored
    vector   int64 or float64 [n, k]
    ragged   a list of n tensors, int64 or float64 [m] or [m, k], such as boxes
    text     a list of n str

All of it is on the CPU. `batch.labels` are on the loader's device, whatever the samples are labelled with:

    class    int64 [n]
    classes  float32 [n, classes]: 1 where the sample is of the class, else 0
    number   float32 [n] or [n, k]
    none     int64 [n], all -1
"""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from loaders.batch import DecodedBatch, Positions, Reader, Request
from loaders.dataset import SplitData
from precache.columns import Column


def with_fields(reader: Reader, data: SplitData) -> Reader:
    """`reader`, or around it one whose batches have the targets and fields of `data`, where it has any."""
    if data.index is None or not (data.index.fields or data.index.targets is not None):
        return reader
    return FieldsReader(reader, data)


class FieldsReader:
    """Puts targets and fields into what `reader` decodes."""

    def __init__(self, reader: Reader, data: SplitData) -> None:
        assert data.index is not None
        self.random_access = reader.random_access
        self._reader = reader
        self._data = data
        self._targets, self._fields = data.index.targets, data.index.fields

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request."""
        asked: deque[Request] = deque()  # of the reader, which looks ahead

        def ask() -> Iterator[Request]:
            for request in requests:
                asked.append(request)
                yield request

        with closing(self._reader.read(ask())) as batches:  # type: ignore[type-var]
            for batch in batches:
                yield self._describe(batch, asked.popleft())

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _describe(self, batch: DecodedBatch, request: Request) -> DecodedBatch:
        ids = self._data.ids[request.positions]
        rows = request.positions[~np.isin(ids, list(batch.refused))]
        assert np.array_equal(self._data.ids[rows], batch.ids.numpy())
        labels = batch.labels
        if self._targets is not None:
            labels = labels_of(self._targets, rows, len(self._data.classes))
        fields = {name: values_of(column, rows) for name, column in self._fields.items()}
        return replace(batch, labels=labels, fields=fields)


def labels_of(targets: Column, rows: Positions, classes: int) -> torch.Tensor:
    """What `rows` are labelled with: indices of so many `classes`, or numbers; see the module."""
    chosen = targets.select(rows)
    if chosen.ends is None:
        with np.errstate(over="ignore"):  # beyond 32 bits it is infinite
            return torch.from_numpy(chosen.values.astype(np.float32))
    labels = np.zeros((len(chosen), classes), np.float32)
    labels[np.repeat(np.arange(len(chosen)), np.diff(chosen.ends, prepend=0)), chosen.values] = 1
    return torch.from_numpy(labels)


def values_of(column: Column, rows: Positions) -> torch.Tensor | list[Any]:
    """The values of `rows`, as the module says; nobody else has their memory."""
    chosen = column.select(rows)
    if chosen.kind == "text":
        return [chosen.value(row) for row in range(len(chosen))]
    if chosen.ends is None:
        return torch.from_numpy(chosen.values)
    return [torch.from_numpy(chosen.array(row)) for row in range(len(chosen))]
