"""Backend `webdataset`: tars read whole, one after the other, JPEGs decoded by threads.

For `shuffle="full"`, as of a node that decodes some of the batches alone, samples are read one by one.
"""

import os
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial

import numpy as np

from loaders.augment.cpu import Crops
from loaders.batch import DecodedBatch, Positions, Request
from loaders.dataset import SplitData
from loaders.read.filler import BatchFiller, Pictures
from loaders.read.integrity import SampleCheck
from loaders.read.sequential import EncodedShards
from loaders.settings import LoaderSpec
from precache.errors import DatasetError
from precache.formats import FORMATS, StoredSample
from precache.formats.base import Places
from precache.pictures.jpeg import Pixels
from precache.storage import open_regular, read_descriptor_at


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> "WebdatasetReader":
    """A reader over `data`, a folder of format `webdataset`."""
    return WebdatasetReader(spec, data, crops)


class WebdatasetReader:
    """Decodes in threads; the JPEG decoder releases the interpreter lock."""

    random_access = False

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self._data = data
        window_shards = data.window_shards(spec.reading.memory_bytes)
        self._check = SampleCheck(data, spec.reading.check)
        shards = EncodedShards(data, window_shards, self._check)
        self._shards = EncodedSamples(data, shards, self._check) if spec.shuffle == "full" else shards
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        asked = self._shards.read(requests)
        with closing(asked):
            yield from self._filler.fill_each(
                Pictures(request, partial(self._decode, request.positions.tolist(), samples))
                for request, samples in asked
            )

    def close(self) -> None:
        """End the threads."""
        self._filler.close()

    def _decode(self, positions: list[int], samples: list[tuple[StoredSample, str]], slot: int) -> Pixels:
        sample, shard = samples[slot]
        self._check.compare(positions[slot], sample.data, sample.damage)
        pixels = sample.pixels(shard, self._data.channels)
        self._data.check_shape(positions[slot], *pixels.shape[:2])
        return pixels


_KEPT_PLACES = 1024  # shards: 16 bytes a sample


class EncodedSamples:
    """As `EncodedShards`, of which `shards` reads what is not where an index says: it says what is wrong."""

    def __init__(self, data: SplitData, shards: EncodedShards, check: SampleCheck) -> None:
        self._data, self._shards, self._check = data, shards, check
        self._places: dict[int, Places] = {}

    def read(
        self, requests: Iterator[Request]
    ) -> Generator[tuple[Request, list[tuple[StoredSample, str]]], None, None]:
        """Yield each request with its stored samples, in order, each with its shard's path."""
        for request in requests:
            indexes, rows = self._data.locate(request.positions)
            found: list[StoredSample | None] = [None] * len(rows)
            try:
                for index in np.unique(indexes).tolist():
                    self._read_from(index, np.flatnonzero(indexes == index), rows, found)
                for position, sample in zip(request.positions.tolist(), found, strict=True):
                    if sample is None or sample.id != self._data.ids[position]:
                        raise ValueError("another sample")
            except (ValueError, OSError, DatasetError):
                yield from self._shards.read(iter([request]))
                continue
            files = [self._data.files[index] for index in indexes.tolist()]
            yield request, [(s, file) for s, file in zip(found, files, strict=True) if s is not None]

    def _read_from(
        self, index: int, slots: Positions, rows: Positions, found: list[StoredSample | None]
    ) -> None:
        """Put the samples of shard `index`, wanted at `slots`, into `found`."""
        with self._data.held(index) as path:
            file = open_regular(path)
        with file:
            descriptor = file.fileno()
            if index not in self._places:
                self._places[index] = self._find(index)
            places = self._places[index]
            wanted = [(slot, *places[rows[slot]].tolist()) for slot in slots.tolist()]
            for _, start, size in wanted if hasattr(os, "posix_fadvise") else ():
                # of all at a time: each read alone would wait for the disk
                os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_WILLNEED)
            for slot, start, size in wanted:
                content = read_descriptor_at(descriptor, start, size)
                found[slot] = FORMATS[self._data.kind].read_sample(content)

    def _find(self, index: int) -> Places:
        """Where the samples of shard `index` lie."""
        while len(self._places) >= _KEPT_PLACES:
            del self._places[next(iter(self._places))]
        with self._data.held(index, with_index=True) as path:
            self._check.open_file(index)
            places = FORMATS[self._data.kind].find_samples(path)
        if len(places) != self._data.whole.shard_samples[index]:
            raise ValueError("an index of other samples")
        return places
