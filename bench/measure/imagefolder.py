"""The loader that people have today: torchvision's ImageFolder in a DataLoader, to the letter of its recipe.

The recipe is that of torchvision's own training, references/classification of its repository: `presets.py`
with its default backend, PIL, and `train.py`: decode with Pillow, RandomResizedCrop, RandomHorizontalFlip,
normalise, `DataLoader(num_workers=N, pin_memory=True)`, copies by `.to(device)`. It is not ours to speed up.
Two things are ours: full batches only, as all trials have them, and workers that live on from epoch to epoch.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from loaders.batch import Batch
from loaders.settings import CROP_RATIO
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache.errors import DatasetError, check_choice

NAME = "imagefolder"
CONDITION = (
    f"{NAME} is torchvision's own training recipe with Pillow and delivers normalised float32, whatever the "
    f"trainer takes"
)
"""What a result says that has it."""
AUGMENTATIONS = ("eval", "train")
_FLIP = 0.5
_ORDER, _DRAWS = 1, 2  # what is random for


def known(files: Sequence[str]) -> int:
    """How many of these ImageFolder takes for pictures: it goes by their endings."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return sum(file.lower().endswith(IMG_EXTENSIONS) for file in files)


class _Indexed(Dataset[Any]):
    """Each picture with its class and its place in ImageFolder's sorted list, which is no sample id.

    Attributes:
        seed: what torchvision draws follows it, the epoch and the place; None: chance.
        epoch: int64 [], in memory that the workers share.
    """

    def __init__(
        self,
        path: Path,
        transform: Callable[[Any], torch.Tensor],
        only: Callable[[str], bool] | None,
        seed: int | None,
    ) -> None:
        from torchvision.datasets import ImageFolder  # imports torch's compiler too: as long as torch itself

        self.tree = ImageFolder(str(path), transform, is_valid_file=only)
        self.seed = seed
        self.epoch = torch.zeros((), dtype=torch.int64)
        self.epoch.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.tree)

    def __getitem__(self, index: int) -> tuple[Any, int, int]:
        if self.seed is not None:
            # workers live on over epochs, and a training that goes on has to draw what it would have drawn
            torch.default_generator.manual_seed(_mixed(self.seed, int(self.epoch), _DRAWS, index))
        try:
            image, label = self.tree[index]
        except (OSError, SyntaxError, ValueError) as error:
            raise DatasetError(f"{self.tree.samples[index][0]}: {error}") from error
        return image, label, index


class _Order(Sampler[int]):
    """A permutation that follows seed and epoch: DataLoader's own also counts the iterations before."""

    def __init__(self, found: _Indexed, seed: int) -> None:
        self._found, self._seed = found, seed

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng((self._seed, int(self._found.epoch), _ORDER))
        return iter(rng.permutation(len(self._found)).tolist())

    def __len__(self) -> int:
        return len(self._found)


class ImageFolderLoader:
    """What a trial feeds from: float32 batches [n, 3, size, size], normalised, on `device`.

    Attributes:
        batch_size: of every batch; what fills none is left out.
        samples: pictures that ImageFolder finds: it goes by the endings of their names.
        size: side of the served square, pixels.
        classes: names of the class folders.

    Args:
        seed: order and draws follow it and the epoch, see `set_epoch`; None: chance.
        only: which files are pictures, by their paths; by default their endings tell.

    Raises:
        DatasetError: a class folder has no picture by its ending.
        SettingError: unknown `augment`: "train" is the recipe of training, "eval" that of validation.
    """

    def __init__(
        self,
        path: Path,
        *,
        batch_size: int,
        size: int,
        workers: int,
        device: torch.device,
        augment: str,
        shuffle: bool,
        seed: int | None = None,
        only: Callable[[str], bool] | None = None,
    ) -> None:
        check_choice("augment", augment, AUGMENTATIONS)
        try:
            found = _Indexed(path, recipe(augment, size), only, seed)
        except FileNotFoundError as error:
            raise DatasetError(f"{path}: ImageFolder refuses it ({error})") from error
        self.batch_size, self.size = batch_size, size
        self.samples, self.classes = len(found), tuple(found.tree.classes)
        self._device = device
        self._found = found
        self._loader: DataLoader[Any] | None = DataLoader(
            found,
            batch_size=batch_size,
            shuffle=shuffle and seed is None,
            sampler=_Order(found, seed) if shuffle and seed is not None else None,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            drop_last=True,
            persistent_workers=workers > 0,
        )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.samples // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Of a loader with a seed: the next iteration serves this one, whatever was served before."""
        self._found.epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """One epoch; DatasetError, with the file's name, at a picture that Pillow cannot decode."""
        assert self._loader is not None, "closed"
        try:
            for images, labels, places in self._loader:
                yield Batch(images.to(self._device), labels.to(self._device), places)
        except DatasetError as error:  # from a worker it comes with its whole traceback
            raise DatasetError(str(error).strip().splitlines()[-1].split("DatasetError: ")[-1]) from error

    def close(self) -> None:
        """End the workers."""
        self._loader = None  # they end with it

    def __enter__(self) -> "ImageFolderLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def recipe(augment: str, size: int) -> Callable[[Any], torch.Tensor]:
    """From a picture of Pillow's to float32 [3, size, size], normalised.

    `presets.ClassificationPresetTrain` with its default flips and no automatic augmentation, or
    `ClassificationPresetEval`, which resizes the shorter side to 256 for 224.
    """
    from torchvision import transforms

    whole: Callable[[Any], torch.Tensor] = transforms.Compose(
        [
            *shape(augment, size),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize(mean=IMAGENET_MEAN, std=IMAGENET_STD),
        ]
    )
    return whole


def shape(augment: str, size: int) -> list[Any]:
    """The part of the recipe that gives a picture of Pillow's its size."""
    from torchvision import transforms

    bilinear = transforms.InterpolationMode.BILINEAR
    shapes: dict[str, list[Any]] = {
        "train": [
            transforms.RandomResizedCrop(size, interpolation=bilinear, antialias=True),
            transforms.RandomHorizontalFlip(_FLIP),
        ],
        "eval": [
            transforms.Resize(round(size / CROP_RATIO), interpolation=bilinear, antialias=True),
            transforms.CenterCrop(size),
        ],
    }
    return shapes[augment]


def _mixed(*numbers: int) -> int:
    """A seed of torch's that is another one for all other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
