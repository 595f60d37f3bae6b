"""Backend `webdataset`: tars read whole, or sample by sample; JPEGs decoded by threads."""

from collections.abc import Iterator
from contextlib import closing

from loaders.augment import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.read.decoding import EncodedShards, Samples
from loaders.read.filler import BatchFiller, Pictures
from loaders.settings import LoaderSpec
from precache.pictures.jpeg import Pixels


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> "WebdatasetReader":
    """A reader over `data`, a folder of format `webdataset`."""
    return WebdatasetReader(spec, data, crops)


class WebdatasetReader:
    """Decodes in threads; the JPEG decoder releases the interpreter lock."""

    random_access = False

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self._data = data
        self._shards = EncodedShards(spec, data)
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        with closing(self._shards.read(requests)) as asked:
            yield from self._filler.fill_each(self._pictures(*read) for read in asked)

    def close(self) -> None:
        """End the threads."""
        self._filler.close()

    def _pictures(self, request: Request, samples: Samples) -> Pictures:
        positions = request.positions.tolist()

        def decode(slot: int) -> Pixels:
            sample, shard = samples[slot]
            self._shards.check.compare(positions[slot], sample.data, sample.damage)
            pixels = sample.pixels(shard, self._data.channels)
            self._data.check_shape(positions[slot], *pixels.shape[:2])
            return pixels

        return Pictures(request, decode)
