"""Backend `synthetic`: the ids and labels of a dataset with noise for pictures.

Costs next to nothing per batch: what a training loop reaches with it is the most that any backend
can give it.
"""

from collections.abc import Iterator

import torch

from loaders.batch import DecodedBatch, LoaderSpec, Positions
from loaders.dataset import SplitData


def open_reader(spec: LoaderSpec, data: SplitData, size: int) -> "SyntheticReader":
    """A reader that makes one batch of noise on the loader's device and serves it again and again."""
    return SyntheticReader(spec, data, size)


class SyntheticReader:
    """Holds one batch of noise on the loader's device."""

    random_access = True

    def __init__(self, spec: LoaderSpec, data: SplitData, size: int) -> None:
        generator = torch.Generator().manual_seed(spec.seed)
        shape = (min(spec.batch_size, len(data.ids)), size, size, 3)
        noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self._noise = noise.to(spec.device)
        self._data = data

    def read(self, batches: Iterator[Positions]) -> Iterator[DecodedBatch]:
        """Yield one batch of the same noise per array of positions."""
        for positions in batches:
            yield DecodedBatch(
                self._noise[: len(positions)],
                torch.from_numpy(self._data.labels[positions]),
                torch.from_numpy(self._data.ids[positions]),
            )

    def close(self) -> None:
        """Nothing to free."""
