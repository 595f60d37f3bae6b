"""What is compared: loaders that serve the same training pictures, each in its own way."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

import loaders
from bench.measure.candidates import CHOICES, READS
from bench.measure.imagefolder import NAME as IMAGEFOLDER
from bench.measure.imagefolder import ImageFolderLoader
from bench.measure.settings import LAST
from loaders.augment import RandomAugmentation
from loaders.augment.device import BatchAugmentation
from loaders.backends import choose_backend
from loaders.batch import Batch
from loaders.dataset import RAW, SplitData, open_split
from precache.errors import DatasetError, SettingError, check_choice
from precache.storage.urls import Location, locate

AUGMENT = ("auto", "cpu", "device")
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)=(.*)", re.DOTALL)
_OPTION = ",augment="
_ON_TREE = tuple(name for name in CHOICES if READS[name][0] == RAW or name == "dali")
_TRAIN, _VAL = "train", "val"


class Feed(AbstractContextManager[Any], Protocol):
    """What a training needs of a loader."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Serve it next."""

    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One source of training pictures.

    Attributes:
        name: in tables and files.
        backend: of `bench.measure.arm.CHOICES`, or auto.
        path: of what it reads.
        augment: where pictures are cropped and mirrored: by the loader's own choice, by its threads, or by
            the arithmetic that a GPU does, on whichever device trains.
        digest: of what `path` holds, from `find_pictures` on.
    """

    name: str
    backend: str
    path: Location
    augment: str = "auto"
    digest: str = ""

    @property
    def told(self) -> dict[str, str]:
        """JSON: what must be the same for a training to go on, and backend and folder in words."""
        more = "" if self.augment == "auto" else f", augment {self.augment}"
        return {
            "backend": self.backend,
            "augment": self.augment,
            "data": self.digest,
            "described": f"{self.backend} on {self.path.name}{more}",
        }


@dataclass(frozen=True, slots=True)
class Pictures:
    """Which pictures of the raw tree are trained with, and which the model is tried on.

    Attributes:
        tree: all of it.
        train: int64 [n], positions in `tree`.
        val: likewise.
    """

    tree: SplitData
    train: npt.NDArray[np.int64]
    val: npt.NDArray[np.int64]

    @property
    def digest(self) -> str:
        """Of both, with the classes, hex."""
        told = [
            [[self.tree.path_at(at), int(self.tree.labels[at])] for at in part.tolist()]
            for part in (self.train, self.val)
        ]
        return hashlib.sha256(json.dumps([self.tree.classes, told]).encode()).hexdigest()

    def files(self, positions: npt.NDArray[np.int64]) -> list[str]:
        """Paths of the pictures at these positions."""
        return [self.tree.files[position] for position in positions.tolist()]

    def labels(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [n]: their classes."""
        labels: npt.NDArray[np.int64] = np.asarray(self.tree.labels[positions])
        return labels


Open = Callable[[int], Feed]
"""From the seed of a training to what feeds it."""


def parse_arm(text: str, tree: Path) -> Arm:
    """`NAME=BACKEND:PATH,augment=cpu`, of which all but PATH may be left out; or BACKEND alone, on `tree`.

    Raises:
        SettingError: an unknown backend, or augment.
    """
    named = _NAME.fullmatch(text)
    name, rest = (named[1], named[2]) if named else ("", text)
    rest, _, augment = rest.partition(_OPTION)
    check_choice("augment", augment or "auto", AUGMENT)
    backend, colon, path = rest.partition(":")
    if colon and not path.startswith("//"):
        check_choice("backend", backend, CHOICES)
    elif rest in _ON_TREE:
        backend, path = rest, str(tree)
    else:
        backend, path = "auto", rest
    if not path:
        raise SettingError(
            f"arm {text!r}: names no folder; write NAME=BACKEND:FOLDER, such as crop=shards:data/shards"
        )
    place = locate(path)
    return Arm(
        name=name or (rest if rest in _ON_TREE else place.name),
        backend=backend,
        path=place,
        augment=augment or "auto",
    )


def find_pictures(tree: Path, arms: Sequence[Arm]) -> tuple[list[Arm], Pictures]:
    """The arms, with their backends and digests; and the pictures that all of them train with.

    Raises:
        SettingError: two arms of one name, or no arm says which pictures are trained with.
        DatasetError: an arm trains with other pictures, other labels, or cannot read its folder.
    """
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise SettingError(
                f"two arms are called {name!r}; give each a name of its own: NAME=BACKEND:FOLDER"
            )
    whole = open_split(tree, _TRAIN)
    known = {whole.path_at(position): position for position in range(len(whole))}
    found: list[Arm] = []
    splits: dict[str, tuple[Arm, npt.NDArray[np.int64]]] = {}
    for arm in arms:
        opened, places = _open(arm, whole, known)
        found.append(replace(arm, backend=_backend(arm, opened.kind), digest=opened.digest))
        for split, positions in places.items():
            first, expected = splits.setdefault(split, (arm, positions))
            _check_same(whole, split, (first, expected), (arm, positions))
    if not splits:
        raise SettingError(
            f"no arm says which pictures of {tree} train and which validate; add a folder that was converted "
            f"with --splits, which has the splits {_TRAIN} and {_VAL}"
        )
    return found, Pictures(whole, splits[_TRAIN][1], splits[_VAL][1])


def opener(
    arm: Arm, pictures: Pictures, *, batch_size: int, size: int, workers: int, device: torch.device
) -> Open:
    """What opens the arm's loader for a training."""
    if arm.backend == IMAGEFOLDER:
        files = frozenset(pictures.files(pictures.train))
        root = Path(next(iter(files))).parent.parent

        def open_imagefolder(seed: int) -> Feed:
            loader = ImageFolderLoader(
                root,
                batch_size=batch_size,
                size=size,
                workers=workers,
                device=device,
                augment="train",
                shuffle=True,
                seed=seed,
                only=files.__contains__,
            )
            if loader.samples != len(files) or loader.classes != pictures.tree.classes:
                loader.close()
                raise DatasetError(
                    f"{root}: ImageFolder finds {loader.samples:,} of the {len(files):,} training "
                    f"pictures; move pictures that lie deeper than their class folder"
                )
            return loader

        return open_imagefolder
    data = open_split(arm.path, _TRAIN)
    is_raw = data.kind == RAW

    def open_ours(seed: int) -> Feed:
        if arm.augment == "device" and data.varies:  # a function would be given the middle of each
            raise SettingError(
                f"augment: {arm.path} holds pictures of varying size, and a device crops those of one size; "
                f"leave out augment=device, or convert with --fit crop"
            )
        augment: Any = "train"
        if arm.augment == "device" and device.type == "cpu":
            augment = BatchAugmentation(RandomAugmentation(), seed, size)
        return loaders.build(
            arm.path,
            backend=arm.backend,
            batch_size=batch_size,
            size=size,
            dtype="float32",
            seed=seed,
            augment=augment,
            last=LAST,
            device="cpu" if arm.augment == "cpu" else device,
            subset=pictures.tree.ids[pictures.train] if is_raw else None,
            reading=loaders.Reading(workers=workers),
        )

    return open_ours


def _open(
    arm: Arm, whole: SplitData, known: dict[str, int]
) -> tuple[SplitData, dict[str, npt.NDArray[np.int64]]]:
    """What the arm reads, and of a converted folder the positions in the tree of what its splits hold."""
    opened = open_split(arm.path, _TRAIN)
    if opened.kind == RAW:
        if opened.digest != whole.digest:
            raise DatasetError(
                f"{arm.path}: is another tree than {whole.path}; an arm on pictures reads that one"
            )
        return opened, {}
    try:
        splits = {_TRAIN: opened, _VAL: open_split(arm.path, _VAL)}
    except SettingError as error:
        raise DatasetError(
            f"{arm.path}: {error}; convert with --splits FILE, of lines path,{_TRAIN} and path,{_VAL}"
        ) from error
    return opened, {split: _positions(data, whole, known) for split, data in splits.items()}


def _positions(data: SplitData, whole: SplitData, known: dict[str, int]) -> npt.NDArray[np.int64]:
    """Ascending, in the tree, of the samples of a converted split."""
    apart = sorted({*data.classes} ^ {*whole.classes})
    if apart:
        raise DatasetError(
            f"{data.path}: has not the classes of {whole.path}, {apart[0]!r} is of one alone; name the tree "
            f"that it was converted from"
        )
    labels = np.asarray(data.labels[:])
    found = []
    for position in range(len(data)):
        path = data.path_at(position)
        at = known.get(path)
        if at is None:
            raise DatasetError(
                f"{data.path}: was made of {path}, which {whole.path} lacks; name the tree that "
                f"it was converted from"
            )
        if whole.labels[at] != labels[position]:
            raise DatasetError(
                f"{data.path}: {path} is labelled {data.classes[labels[position]]!r}, in {whole.path} "
                f"{whole.classes[whole.labels[at]]!r}; convert it again"
            )
        found.append(at)
    return np.sort(np.array(found, np.int64))


def _check_same(
    whole: SplitData,
    split: str,
    first: tuple[Arm, npt.NDArray[np.int64]],
    other: tuple[Arm, npt.NDArray[np.int64]],
) -> None:
    apart = np.setxor1d(first[1], other[1])
    if len(apart):
        raise DatasetError(
            f"{other[0].path}: its split {split} holds {len(other[1]):,} pictures, that of "
            f"{first[0].path} {len(first[1]):,}, and {whole.path_at(int(apart[0]))} is in one of them alone; "
            f"convert both with the same --splits"
        )


def _backend(arm: Arm, kind: str) -> str:
    if arm.backend != IMAGEFOLDER:
        return choose_backend(arm.backend, kind, arm.path)
    if kind != RAW:
        raise DatasetError(f"{arm.path}: holds {kind}, {IMAGEFOLDER} reads a tree of pictures; name that")
    return arm.backend
