"""Backend `synthetic`: the ids and labels of a dataset with noise for pictures.

Costs next to nothing per batch: what a training loop reaches with it is the most that any backend
can give it.
"""

from collections.abc import Iterator

import torch

from loaders.augment.cpu import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.settings import LoaderSpec


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> "SyntheticReader":
    """A reader that makes one batch of noise on the loader's device and serves it again and again."""
    return SyntheticReader(spec, data, crops)


class SyntheticReader:
    """Holds one batch of noise on the loader's device."""

    random_access = True

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        generator = torch.Generator().manual_seed(spec.seed)
        shape = (spec.batch_size * crops.views, crops.size, crops.size, 3)
        noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self._noise = noise.to(spec.device)
        self._data = data
        self._views = crops.views

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch of the same noise per request."""
        for request in requests:
            yield DecodedBatch(
                self._noise[: len(request.positions) * self._views],
                torch.from_numpy(self._data.labels[request.positions]),
                torch.from_numpy(self._data.ids[request.positions]),
            )

    def close(self) -> None:
        """Nothing to free."""
