"""Backend `webdataset`: tars read whole, one after the other, JPEGs decoded by threads.

For `shuffle="full"`, as of a node that decodes some of the batches alone, samples are read one by one.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

from loaders.augment.cpu import Crops
from loaders.backends.filler import BatchFiller, Pictures
from loaders.backends.integrity import SampleCheck
from loaders.backends.sequential import EncodedShards
from loaders.backends.single import EncodedSamples
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.settings import LoaderSpec
from precache.formats import StoredSample
from precache.pictures.jpeg import Pixels


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
