"""The loader that people have today: torchvision's ImageFolder in a DataLoader, to the letter of its recipe.

The recipe is that of torchvision's own training, references/classification of its repository: `presets.py`
with its default backend, PIL, and `train.py`: decode with Pillow, RandomResizedCrop, RandomHorizontalFlip,
normalise, `DataLoader(num_workers=N, pin_memory=True)`, copies by `.to(device)`. It is not ours to speed up.
Two things are ours: full batches only, as all trials have them, and workers that live on from epoch to epoch.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from loaders.batch import Batch
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
_EVAL_RESIZE = 256 / 224  # of the shorter side, to the side of the crop


class _Indexed(Dataset[Any]):
    """Each picture with its class and its place in ImageFolder's sorted list, which is no sample id."""

    def __init__(self, path: Path, transform: Callable[[Any], torch.Tensor]) -> None:
        from torchvision.datasets import ImageFolder  # imports torch's compiler too: as long as torch itself

        self.tree = ImageFolder(str(path), transform)

    def __len__(self) -> int:
        return len(self.tree)

    def __getitem__(self, index: int) -> tuple[Any, int, int]:
        try:
            image, label = self.tree[index]
        except (OSError, SyntaxError, ValueError) as error:
            raise DatasetError(f"{self.tree.samples[index][0]}: {error}") from error
        return image, label, index


class ImageFolderLoader:
    """What a trial feeds from: float32 batches [n, 3, size, size], normalised, on `device`.

    Attributes:
        batch_size: of every batch; what fills none is left out.
        samples: pictures that ImageFolder finds: it goes by the endings of their names.
        size: side of the served square, pixels.
        classes: names of the class folders.

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
        pin: bool = True,
    ) -> None:
        check_choice("augment", augment, AUGMENTATIONS)
        try:
            found = _Indexed(path, recipe(augment, size))
        except FileNotFoundError as error:
            raise DatasetError(f"{path}: ImageFolder refuses it ({error})") from error
        self.batch_size, self.size = batch_size, size
        self.samples, self.classes = len(found), tuple(found.tree.classes)
        self._device = device
        self._loader: DataLoader[Any] | None = DataLoader(
            found,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=workers,
            pin_memory=pin and device.type == "cuda",
            drop_last=True,
            persistent_workers=workers > 0,
        )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.samples // self.batch_size

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

    bilinear = transforms.InterpolationMode.BILINEAR
    shape = {
        "train": [
            transforms.RandomResizedCrop(size, interpolation=bilinear, antialias=True),
            transforms.RandomHorizontalFlip(_FLIP),
        ],
        "eval": [
            transforms.Resize(round(size * _EVAL_RESIZE), interpolation=bilinear, antialias=True),
            transforms.CenterCrop(size),
        ],
    }
    whole: Callable[[Any], torch.Tensor] = transforms.Compose(
        [
            *shape[augment],
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize(mean=IMAGENET_MEAN, std=IMAGENET_STD),
        ]
    )
    return whole
