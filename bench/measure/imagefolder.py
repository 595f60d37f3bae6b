"""torchvision's ImageFolder in a DataLoader, by torchvision's own training recipe: the usual baseline.

The recipe is that of references/classification in torchvision's repository: `presets.py` with its default
backend, PIL, and `train.py`: decode with Pillow, RandomResizedCrop, RandomHorizontalFlip, normalise,
`DataLoader(num_workers=N, pin_memory=True)`, copies by `.to(device)`; `recipes.py` has the transforms of each
name. Nothing of it is made faster here.
Three things differ: batches are full, as in all trials; workers live on from epoch to epoch; and a picture
that Pillow cannot open is left out, where a training would stop. `find_faults` lists such pictures.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset

from bench.measure.recipes import make_mix, make_transform, mix_samples
from bench.report.gain import TODAY_BACKEND
from loaders.batch import Batch
from loaders.settings import AugmentName
from precache.errors import DatasetError, check_choice
from precache.pictures.kinds import IMAGE_FOLDER_EXTENSIONS
from precache.reporting import abridge, quantity
from precache.sources.base import Scan

NAME = TODAY_BACKEND
AUGMENTATIONS = tuple(name for name in get_args(AugmentName) if name != "crop")
_MAX_TRIES = 1000  # pictures in a row that cannot be opened before an epoch fails


def _is_listed(path: str) -> bool:
    return path.lower().endswith(IMAGE_FOLDER_EXTENSIONS)


@dataclass(frozen=True, slots=True)
class ImageFolderFaults:
    """Pictures and classes at which a training with ImageFolder stops, where a trial goes on.

    Attributes:
        empty_classes: names of class folders in which ImageFolder lists no picture.
        files: reasons why pictures that it lists cannot be opened, by their paths below the tree.
        tried: number of pictures that were opened, or could not be.
    """

    empty_classes: tuple[str, ...]
    files: dict[str, str]
    tried: int

    def sentences(self) -> list[str]:
        """Return a sentence for each kind of fault; empty where there is none."""
        sentences = []
        if self.empty_classes:
            sentences.append(
                f"ImageFolder itself refuses this tree: it knows no picture in "
                f"{quantity(len(self.empty_classes), 'class folder')} ({abridge(list(self.empty_classes))})."
            )
        if self.files:
            path, reason = next(iter(self.files.items()))
            sentences.append(
                f"A training with ImageFolder stops at a picture that Pillow cannot open: "
                f"{len(self.files):,} of {self.tried:,} that were tried, the first is {path} ({reason})."
            )
        return sentences


def find_faults(scan: Scan, paths: Sequence[str]) -> ImageFolderFaults:
    """Find pictures and classes at which a training with ImageFolder stops.

    Pictures are tried among `paths` and among all files that the scan left out.

    Args:
        scan: scan of a tree on disk; if the tree has splits, only that of training counts.
        paths: paths below the tree of the pictures to try.
    """
    samples, prefix = scan.samples, ""
    rows = np.arange(len(samples))
    if "train" in samples.split_names:
        rows = np.flatnonzero(samples.splits == samples.split_names.index("train"))
        prefix = f"{samples[int(rows[0])].path.split('/')[0]}/"
    root = scan.root / prefix
    ignored_paths = [ignored.path for ignored in scan.ignored]
    ignored_in_classes = [path for path in ignored_paths if path.removeprefix(prefix).count("/")]
    tried = [path for path in (*paths, *ignored_in_classes) if path.startswith(prefix) and _is_listed(path)]
    filled_classes = {path.removeprefix(prefix).split("/")[0] for path in tried}
    labels, starts = np.unique(samples.labels[rows], return_index=True)
    for label, start in zip(labels, starts, strict=True):
        for row in rows[start:]:  # pictures of a class are neighbours, and most often the first one is listed
            if samples.labels[row] != label:
                break
            path = samples[int(row)].path
            if _is_listed(path):
                filled_classes.add(path.removeprefix(prefix).split("/")[0])
                break
    ignored_names = {path.removeprefix(prefix) for path in ignored_paths}  # ignored folders are no classes
    folders = sorted(
        entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name not in ignored_names
    )
    reasons = {path: _find_open_error(f"{scan.root}/{path}") for path in tried}
    return ImageFolderFaults(
        tuple(name for name in folders if name not in filled_classes),
        {path: reason for path, reason in reasons.items() if reason},
        len(tried),
    )


def _load_regular(path: str) -> Any:
    """Load a picture as torchvision's `pil_loader` does; OSError for a pipe, on which that would wait."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("not a regular file")
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


def _find_open_error(path: str) -> str:
    """Return why ImageFolder cannot open the picture; empty where it can."""
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


class _IndexedDataset(Dataset[Any]):
    """Pictures of an ImageFolder, each with its label and its index in ImageFolder's sorted list.

    An index is no sample id of this project.

    Attributes:
        tree: the ImageFolder.
        skipped_index: int64 [], in shared memory: index of a picture that could not be opened; -1 for none.
    """

    def __init__(self, path: Path, transform: Callable[[Any], torch.Tensor]) -> None:
        from torchvision.datasets import ImageFolder  # imports torch's compiler: as slow as importing torch

        self.tree = ImageFolder(str(path), transform, loader=_load_regular, allow_empty=True)
        if not len(self.tree):
            raise FileNotFoundError("it knows no picture here by its ending")
        self.skipped_index = torch.full((), -1, dtype=torch.int64)
        self.skipped_index.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.tree)

    def __getitem__(self, index: int) -> tuple[Any, int, int]:
        try:
            image, label = self.tree[index]
        except Exception as error:  # Pillow raises whatever its decoders raise
            return self._next_readable(index, error)
        return image, label, index

    def _next_readable(self, index: int, error: Exception) -> tuple[Any, int, int]:
        """Return the next picture that can be opened after the one at `index`, which raised `error`."""
        self.skipped_index.fill_(index)
        tries = min(_MAX_TRIES, len(self))
        for step in range(1, tries):
            next_index = (index + step) % len(self)
            with suppress(Exception):
                image, label = self.tree[next_index]
                return image, label, next_index
        raise DatasetError(
            f"{error}; so are the {tries - 1:,} pictures that follow", path=self.tree.samples[index][0]
        ) from error


class ImageFolderLoader:
    """Batches of an ImageFolder in a DataLoader: float32 [n, 3, size, size], normalised, on `device`.

    Attributes:
        batch_size: samples of every batch; an epoch leaves out those that fill none.
        samples: number of pictures that ImageFolder lists, by the endings of their names.
        size: side of the served square, pixels.

    Raises:
        DatasetError: ImageFolder lists no picture.
        SettingError: unknown `augment`.
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
    ) -> None:
        check_choice("augment", augment, AUGMENTATIONS)
        try:
            dataset = _IndexedDataset(path, make_transform(augment, size, floats=True))
        except FileNotFoundError as error:
            raise DatasetError(f"ImageFolder refuses it ({error})", path=path) from error
        self.batch_size, self.size = batch_size, size
        self.samples = len(dataset)
        self._device = device
        self._dataset = dataset
        mix = make_mix(augment, len(dataset.tree.classes))
        self._loader: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            drop_last=True,
            collate_fn=None if mix is None else partial(mix_samples, mix),
            worker_init_fn=_hide_warnings,
            persistent_workers=workers > 0,
        )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.samples // self.batch_size

    @property
    def skipped_path(self) -> str:
        """Path of a picture that Pillow could not open so far; empty where there was none."""
        index = int(self._dataset.skipped_index)
        return "" if index < 0 else str(self._dataset.tree.samples[index][0])

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch; DatasetError for a picture that Pillow cannot decode."""
        assert self._loader is not None, "closed"
        try:
            for images, labels, indices in self._loader:
                yield Batch(images, labels, indices).to(self._device)
        except DatasetError as error:
            if error.path is not None:
                raise
            # torch has made the error of a worker again from its text and traceback
            path, _, reason = str(error).partition(": ")
            raise DatasetError(reason, path=path) from error

    def close(self) -> None:
        """End the workers."""
        self._loader = None  # DataLoader ends them when it is deleted

    def __enter__(self) -> "ImageFolderLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _hide_warnings(worker: int) -> None:
    """Keep Pillow from printing a warning for each odd picture in each worker of each trial."""
    warnings.simplefilter("ignore")
