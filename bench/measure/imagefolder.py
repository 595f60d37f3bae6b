"""The loader that people have today: torchvision's ImageFolder in a DataLoader, to the letter of its recipe.

The recipe is that of torchvision's own training, references/classification of its repository: `presets.py`
with its default backend, PIL, and `train.py`: decode with Pillow, RandomResizedCrop, RandomHorizontalFlip,
normalise, `DataLoader(num_workers=N, pin_memory=True)`, copies by `.to(device)`. It is not ours to speed up.
Three things are ours: full batches only, as all trials have them; workers that live on from epoch to epoch;
a picture that Pillow cannot open is left out, where a training would stop: `find_refused` says which.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset, Sampler

from bench.report.gain import TODAY_BACKEND
from loaders.batch import Batch
from loaders.settings import CROP_RATIO
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache.errors import DatasetError, check_choice
from precache.reporting import abridge, quantity
from precache.sources.base import Scan

NAME = TODAY_BACKEND
CONDITION = (
    f"{NAME} is torchvision's own training recipe with Pillow and delivers normalised float32, whatever the "
    f"trainer takes"
)
"""Sentence of a result in which it was measured."""
AUGMENTATIONS = ("eval", "train")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""`torchvision.datasets.folder.IMG_EXTENSIONS`, which takes seconds to import."""
_FLIP = 0.5
_ORDER, _DRAWS = 1, 2  # what is random for
_MOST_TRIES = 1000  # pictures in a row that cannot be opened, before this is no folder to measure


def known(files: Sequence[str]) -> int:
    """Number of files that ImageFolder takes for pictures: it goes by the endings of their names."""
    return sum(map(_is_listed, files))


def _is_listed(path: str) -> bool:
    return path.lower().endswith(EXTENSIONS)


@dataclass(frozen=True, slots=True)
class Refused:
    """Pictures and classes at which a training with ImageFolder stops, where a trial goes on.

    Attributes:
        empty_classes: class folders in which it knows no picture by its ending.
        files: path below the tree and reason, of what it lists and cannot open.
        opened: how many of its files were tried, with those.
    """

    empty_classes: tuple[str, ...]
    files: dict[str, str]
    opened: int

    def sentences(self) -> list[str]:
        """Say what was refused; empty where nothing was."""
        said = []
        if self.empty_classes:
            said.append(
                f"ImageFolder itself refuses this tree: it knows no picture in "
                f"{quantity(len(self.empty_classes), 'class folder')} ({abridge(list(self.empty_classes))})."
            )
        if self.files:
            path, reason = next(iter(self.files.items()))
            said.append(
                f"A training with ImageFolder stops at a picture that Pillow cannot open: "
                f"{len(self.files):,} of {self.opened:,} that were tried, the first is {path} ({reason})."
            )
        return said


def find_refused(scan: Scan, paths: Sequence[str]) -> Refused:
    """Find what ImageFolder stops at, among some of the pictures and all that the scan left out.

    Args:
        scan: of a tree on disk; of its splits, ImageFolder is given that of training.
        paths: below the tree, of the pictures to try.
    """
    samples, below = scan.samples, ""
    rows = np.arange(len(samples))
    if "train" in samples.split_names:
        rows = np.flatnonzero(samples.splits == samples.split_names.index("train"))
        below = f"{samples[int(rows[0])].path.split('/')[0]}/"
    root = scan.folder / below
    in_classes = [path for path in (one.path for one in scan.ignored) if path.removeprefix(below).count("/")]
    tried = [path for path in (*paths, *in_classes) if path.startswith(below) and _is_listed(path)]
    filled = {path.removeprefix(below).split("/")[0] for path in tried}
    labels, starts = np.unique(samples.labels[rows], return_index=True)
    for label, start in zip(labels, starts, strict=True):
        for row in rows[start:]:  # those of a class lie together: most often the first one tells
            if samples.labels[row] != label:
                break
            path = samples[int(row)].path
            if _is_listed(path):
                filled.add(path.removeprefix(below).split("/")[0])
                break
    hidden = {one.path.removeprefix(below) for one in scan.ignored}  # it takes their folders for classes
    folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name not in hidden)
    reasons = {path: _why_refused(f"{scan.folder}/{path}") for path in tried}
    return Refused(
        tuple(name for name in folders if name not in filled),
        {path: reason for path, reason in reasons.items() if reason},
        len(tried),
    )


def _load_regular(path: str) -> Any:
    """Load a picture as torchvision's `pil_loader` does; OSError for a pipe, for which it would wait."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("not a regular file")
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


def _why_refused(path: str) -> str:
    """Why ImageFolder cannot open the picture; empty where it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load_regular(path)
    except UnidentifiedImageError:
        return "cannot identify image file"
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # Pillow raises whatever its decoders raise
        return f"{type(error).__name__}: {str(error).rstrip('.')}"
    return ""


class _Indexed(Dataset[Any]):
    """Each picture with its class and its place in ImageFolder's sorted list, which is no sample id.

    Attributes:
        seed: what torchvision draws follows it, the epoch and the place; None: chance.
        skip_refused: whether the next picture that can be opened stands in for one that cannot.
        epoch: int64 [], in memory that the workers share.
        refused: int64 [], in such memory: place of a picture that could not be opened; -1: there was none.
    """

    def __init__(
        self,
        path: Path,
        transform: Callable[[Any], torch.Tensor],
        only: Callable[[str], bool] | None,
        seed: int | None,
        *,
        skip_refused: bool,
    ) -> None:
        from torchvision.datasets import ImageFolder  # imports torch's compiler too: as long as torch itself

        self.tree = ImageFolder(str(path), transform, is_valid_file=only, allow_empty=skip_refused)
        if skip_refused:
            self.tree.loader = _load_regular
        if not len(self.tree):
            raise FileNotFoundError("it knows no picture here by its ending")
        self.seed = seed
        self.skip_refused = skip_refused
        self.epoch = torch.zeros((), dtype=torch.int64)
        self.epoch.share_memory_()  # type: ignore[no-untyped-call]
        self.refused = torch.full((), -1, dtype=torch.int64)
        self.refused.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.tree)

    def __getitem__(self, index: int) -> tuple[Any, int, int]:
        if self.seed is not None:
            # workers live on over epochs, and a training that goes on has to draw what it would have drawn
            torch.default_generator.manual_seed(_mixed(self.seed, int(self.epoch), _DRAWS, index))
        try:
            image, label = self.tree[index]
        except Exception as error:  # Pillow raises whatever its decoders raise
            if not self.skip_refused:
                raise DatasetError(f"{self.tree.samples[index][0]}: {error}") from error
            return self._next_readable(index, error)
        return image, label, index

    def _next_readable(self, index: int, error: Exception) -> tuple[Any, int, int]:
        """The next picture that can be opened behind the one at `index`, which raised `error`."""
        self.refused.fill_(index)
        tries = min(_MOST_TRIES, len(self))
        for step in range(1, tries):
            place = (index + step) % len(self)
            with suppress(Exception):
                image, label = self.tree[place]
                return image, label, place
        raise DatasetError(
            f"{self.tree.samples[index][0]}: {error}; so are the {tries - 1:,} pictures that follow"
        ) from error


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
    """Batches of an ImageFolder in a DataLoader: float32 [n, 3, size, size], normalised, on `device`.

    Attributes:
        batch_size: of every batch; what fills none is left out.
        samples: pictures that ImageFolder finds: it goes by the endings of their names.
        size: side of the served square, pixels.
        classes: names of the class folders.

    Args:
        seed: order and draws follow it and the epoch, see `set_epoch`; None: chance.
        only: which files are pictures, by their paths; by default their endings tell.
        skip_refused: whether the next picture stands in for one that Pillow cannot open, and class folders
            may be empty.

    Raises:
        DatasetError: a class folder has no picture by its ending; with `skip_refused`, none has.
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
        skip_refused: bool = False,
    ) -> None:
        check_choice("augment", augment, AUGMENTATIONS)
        try:
            found = _Indexed(path, recipe(augment, size), only, seed, skip_refused=skip_refused)
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
            worker_init_fn=_hide_warnings if skip_refused else None,
            persistent_workers=workers > 0,
        )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.samples // self.batch_size

    @property
    def refused(self) -> str:
        """Path of a picture that Pillow could not open so far; empty where there was none."""
        place = int(self._found.refused)
        return "" if place < 0 else str(self._found.tree.samples[place][0])

    def set_epoch(self, epoch: int) -> None:
        """Serve this epoch in the next iteration, whatever was served before, where the loader has a seed."""
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
    """Transform that makes float32 [3, size, size], normalised, of a picture of Pillow's.

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


def _hide_warnings(worker: int) -> None:
    """Keep Pillow from warning of each odd picture in each worker of each trial."""
    warnings.simplefilter("ignore")


def _mixed(*numbers: int) -> int:
    """A seed of torch's that is another one for all other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
