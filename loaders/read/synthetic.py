"""Backend `synthetic`: the ids and labels of a dataset, with noise for pictures.

A batch costs next to nothing, so that the speed of a training loop with it is the most that any backend can
reach.
"""

from collections.abc import Iterator

import torch

from loaders.augment.crops import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.settings import LoaderSpec
from precache.pictures.images import sides


class SyntheticReader:
    """Serves the same batch of noise, on the loader's device, again and again."""

    random_access = True

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        generator = torch.Generator("cpu").manual_seed(spec.seed)
        self._noise = []
        for view in crops.views:
            shape = (spec.batch_size, *sides(view.size), data.channels)
            noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device="cpu")
            self._noise.append(noise.to(spec.device))

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch of the same noise per request."""
        for request in requests:
            yield DecodedBatch(tuple(noise[: len(request.positions)] for noise in self._noise))

    def close(self) -> None:
        """Free nothing: there are no threads or files."""
