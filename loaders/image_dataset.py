"""The samples of a split one by one, for code that is written for torchvision's ImageFolder."""

import os
from collections.abc import Callable
from functools import cached_property
from operator import index as as_index
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from loaders.converting import Conversion, reconcile
from loaders.dataset import RAW, SplitData, open_split
from loaders.read.integrity import SampleCheck
from loaders.settings import OF_IMAGES, check_given, refuse_others
from loaders.transfer import labels_of
from precache.errors import DatasetError, ImageError, SettingError, check_choice, shell_command
from precache.formats import FORMATS
from precache.formats.base import Places
from precache.pictures import images
from precache.pictures.jpeg import Pixels, decode_jpeg
from precache.recipe import Recipe
from precache.storage.urls import Url

_LOOK_SAMPLES = 512


class ImageDataset(Dataset[tuple[Any, Any]]):
    """A split of a raw tree or a converted folder, by index: a drop-in for torchvision's `ImageFolder`.

    `dataset[i]` is (picture, label): a Pillow image (RGB, L or RGBA) or, with `decode="tensor"`, uint8
    [channels, height, width] in channels-last memory, after `transform`; the label after `target_transform`.
    A picture of a raw tree has its full size, turned upright as EXIF says; one of a converted folder has the
    size that is stored. Samples of no one class each have the tensor that `loaders.transfer` says.

    A sample of a converted folder is compared with its checksum when this process first reads it. No file
    stays open between two samples, so it may be pickled, forked and used by several threads. Of a URL each
    shard is fetched, whole, when a sample of it is first asked for; worker processes that fetch must not be
    forked: `DataLoader(..., multiprocessing_context="forkserver")`.

    Args:
        path: as of `loaders.build`; one.
        split: as of `loaders.build`.
        transform: of the picture.
        target_transform: of the label.
        decode: `"pil"` or `"tensor"`.
        precache, recipe: as of `loaders.build`; each process that reads looks every 512 samples whether the
            shards are finished; a new worker of a DataLoader at its first.
        splits, class_depth: as of `loaders.build`, of a raw tree.

    Attributes:
        root: `path`.
        classes: class names.
        class_to_idx: class name -> label.
        ids: int64 [n], the samples' ids; of a set of more than a million a column, indexed like an array.
        transform, target_transform: as given; may be set anew.

    Raises:
        SettingError: no such split, `decode` is unknown, or a setting is one of torchvision's datasets, with
        the name of the one here. TypeError: a setting that is known nowhere.
        DatasetError, SourceError: `path` holds neither; or, when a sample is read, its file is missing or
            damaged. SampleError: the sample is; it names file, id and source. ImageError: a picture of a raw
            tree cannot be decoded.
    """

    @refuse_others(OF_IMAGES, {})
    def __init__(
        self,
        path: str | os.PathLike[str] | Url,
        split: str = "train",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        decode: Literal["pil", "tensor"] = "pil",
        precache: str | os.PathLike[str] | None = None,
        recipe: Recipe | None = None,
        *,
        splits: str | os.PathLike[str] | None = None,
        class_depth: int | None = None,
    ) -> None:
        check_given(path, precache, recipe, splits)
        check_choice("decode", decode, ("pil", "tensor"))
        recipe, splits = reconcile(recipe, splits)
        self._data = data = open_split(
            path, split, splits=splits, split_seed=recipe.seed, class_depth=class_depth
        )
        self._conversion = None
        if precache is not None:
            self._conversion = Conversion(data, split, precache, recipe, class_depth=class_depth)
        self._asked = 0  # samples
        modes = (1, 3, 4) if data.dtype == np.uint8 else (1,)
        if decode == "pil" and data.channels not in modes:
            raise SettingError(
                f"decode 'pil': {path} holds {data.dtype} pictures of {data.channels} channels, "
                f"which Pillow has no mode for; use 'tensor'"
            )
        self._split, self._decode = split, decode
        # together, since other threads read where the shards take the tree's place
        self._read_from = data, SampleCheck(data, "first-read")
        self._places: dict[int, Places] = {}  # of the shards read so far
        self.root = str(path) if isinstance(path, Url) else os.fspath(path)
        self.classes = list(data.classes)
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        self.ids = data.ids if data.ids.in_pieces else data.ids.values
        self.transform, self.target_transform = transform, target_transform

    @cached_property
    def targets(self) -> list[Any]:
        """What each sample is labelled with: a class, a list of classes, a number, or a list of numbers."""
        return self._data.targets()

    @cached_property
    def samples(self) -> list[tuple[str, Any]]:
        """(path, label) of each sample: of the file in a raw tree, or relative to a dataset's source."""
        if self._data.kind == RAW:
            return list(zip(self._data.files, self.targets, strict=True))
        return [(self._data.path_at(place), label) for place, label in enumerate(self.targets)]

    imgs = property(lambda self: self.samples)  # ImageFolder has both names

    def __len__(self) -> int:
        return len(self._data.ids)

    def __getitem__(self, index: SupportsIndex) -> tuple[Any, Any]:
        try:
            position = range(len(self))[as_index(index)]
        except IndexError:
            raise IndexError(f"{self.root}: sample {index} of {len(self):,}") from None
        picture: Any = self._read(position)
        label: Any = int(self._data.labels[position])
        if self._data.index is not None and self._data.index.targets is not None:
            label = labels_of(self._data, np.array([position]))[0]
        if self.transform is not None:
            picture = self.transform(picture)
        if self.target_transform is not None:
            label = self.target_transform(label)
        return picture, label

    def __repr__(self) -> str:
        return (
            f"<loaders.ImageDataset {self._data.kind} {self.root}: {self._split}, {len(self):,} samples, "
            f"{len(self.classes):,} classes>"
        )

    def _look(self) -> tuple[SplitData, SampleCheck]:
        """What samples are read from: the shards in the place of the tree, once they are finished."""
        if (conversion := self._conversion) is not None:
            if self._asked % _LOOK_SAMPLES == 0 and (stored := conversion.found()) is not None:
                self._read_from, self._conversion = (stored, SampleCheck(stored, "first-read")), None
            self._asked += 1
        return self._read_from

    def _read(self, position: int) -> Image.Image | torch.Tensor:
        data, check = self._look()
        if data.kind != RAW:
            pixels = self._stored(position, data, check)
        else:
            path = data.files[position]
            try:
                content = images.read_bytes(path)
                if self._decode == "pil":
                    return images.decode(content, path)
                pixels = images.decode_pixels(content, path)
            except ImageError as error:
                raise data.with_remedy(error, "'precache convert' leaves it out") from error
        if self._decode == "tensor":
            return torch.from_numpy(pixels).permute(2, 0, 1)
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def _stored(self, position: int, data: SplitData, check: SampleCheck) -> Pixels:
        """Read and compare; [height, width, channels]."""
        (shard,), (row,) = (of.tolist() for of in data.locate(np.array([position])))

        def read(path: Path) -> bytes | Pixels:
            if shard not in self._places:
                self._places[shard] = _find(shard, path, data, check)
            sample = data.read_sample(position, path, self._places[shard][row])
            check.compare(position, sample.data, sample.damage)
            return sample.data

        # with its index where that is still to be read
        content = data.read(shard, read, with_index=shard not in self._places)
        if isinstance(content, bytes):
            return decode_jpeg(content, f"{data.files[shard]}: sample {data.ids[position]}")
        return content.view(data.dtype).reshape(*data.shapes_at(np.array([position]))[0], data.channels)


def _find(shard: int, path: Path, data: SplitData, check: SampleCheck) -> Places:
    """Where the samples of the shard at `path` lie, which is as long as it was written.

    Raises:
        DatasetError: it is not, or its index names places that are not in it.
    """
    check.open_file(shard)
    places = FORMATS[data.kind].find_samples(path)
    samples, most = data.whole.shard_samples[shard], data.shard_bytes[shard]
    if len(places) != samples or (places > most).any():
        raise DatasetError(
            f"{data.files[shard]}: its index names {len(places):,} samples up to byte "
            f"{places.max(initial=0):,}, it has {samples:,} in {most:,} bytes; "
            f"run: {shell_command('precache verify', data.path)}"
        )
    return places
