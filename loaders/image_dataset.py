"""Dataset of single samples, for code that is written for torchvision's ImageFolder."""

import io
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from operator import index as as_index
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image, ImageFile, UnidentifiedImageError
from torchvision.datasets import VisionDataset, folder

from loaders.dataset import RAW, SplitData, open_split, picture_remedy
from loaders.first_use import convert_on_first_use
from loaders.read.integrity import SampleCheck
from loaders.settings import DATASET_HINTS, explain_unknown_settings, find_recipe
from precache.dataset.columns import Ints
from precache.dataset.manifest import is_converted
from precache.errors import (
    DatasetError,
    ImageError,
    NothingFoundError,
    SettingError,
    SourceError,
    check_choice,
)
from precache.pictures import images
from precache.pictures.jpeg import Pixels, decode_jpeg
from precache.pictures.kinds import decoder_kinds
from precache.recipe import Recipe
from precache.reporting import abridge
from precache.sources.tree import split_of
from precache.storage.urls import Url

Picture: TypeAlias = Image.Image | torch.Tensor
T = TypeVar("T")


class UnreadablePictureError(ImageError, UnidentifiedImageError):
    """A picture of a tree cannot be decoded (also Pillow's error, which ImageFolder raises)."""


def load_picture(path: str) -> Image.Image:
    """Return the picture at `path`, upright and in RGB."""
    return _load(path, images.decode)


def load_tensor(path: str) -> torch.Tensor:
    """Return the picture at `path`, upright, as uint8 [3, height, width] in channels-last memory."""
    return torch.from_numpy(_load(path, images.decode_pixels)).permute(2, 0, 1)


def _load(path: str, decode: Callable[[bytes | Image.Image, str], T]) -> T:
    """Read and `decode` a file; errors are subclasses of those of ImageFolder, which scripts catch."""
    try:
        data = images.read_bytes(path)
        try:
            return decode(data, path)
        except ImageError:
            if not ImageFile.LOAD_TRUNCATED_IMAGES:
                raise
            # The program wants what there is of a damaged picture: what its own Pillow decodes.
            with suppress(Exception):
                return decode(Image.open(io.BytesIO(data), formats=decoder_kinds(data, path)), path)
            raise
    except ImageError as error:
        raise UnreadablePictureError(error.path, error.reason, remedy=error.remedy) from error
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise NothingFoundError(error.args[0], path=error.path, remedy=error.remedy) from error
        raise


_LOADERS: dict[str, Callable[[str], Any]] = {"pil": load_picture, "tensor": load_tensor}


class ImageDataset(folder.ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """Dataset over a split of a raw tree or converted folder: a drop-in for torchvision's `ImageFolder`.

    `dataset[i]` is (picture, label). The picture is a Pillow image (RGB or L) or, with
    `decode="tensor"`, uint8 [channels, height, width] in channels-last memory, after `transform`; the label
    comes after `target_transform`. Samples and order are those of ImageFolder over the tree, by ascending
    ids, for raw and converted data alike; pictures that it does not list, such as GIFs, are left out. A
    picture of a raw tree has its full size, turned upright as EXIF says; a damaged one raises, unless the
    program sets Pillow's `ImageFile.LOAD_TRUNCATED_IMAGES`. One of a converted folder has the size that is
    stored. The label is the class as an int, if each sample has one
    class; otherwise a tensor, see `loaders.transfer`.

    A sample of a converted folder is compared with its checksum when this process first reads it. No file
    except the mapped index stays open between two samples, so the dataset may be pickled, forked and used by
    several threads; another process maps the index itself. A shard at a URL is fetched, whole, when one of
    its samples is first read; worker processes that fetch must not be forked:
    `DataLoader(..., multiprocessing_context="forkserver")`.

    Scripts and subclasses may change it like ImageFolder: `dataset[i]` is `loader(path)` for the path in
    `samples[i]`, with the label there, and `find_classes` and `make_dataset` may be overridden.

    Args:
        root: one path as for `loaders.build`; or that of a split, as scripts join it for a tree:
            `data/shards/val` for split `val` of the folder `data/shards`.
        transform: function applied to each picture.
        target_transform: function applied to each label.
        loader: function that makes a picture of a path in a raw tree; default: one that `decode` names. It is
            refused for a converted folder, whose pictures are stored decoded.
        is_valid_file: function that says for the path of each file in a raw tree whether it is a sample;
            default: pictures are. The tree is then listed by ImageFolder, and ids number these samples.
        allow_empty: whether class folders of a raw tree without pictures are classes; `precache convert`
            leaves them out.
        split: name of the split, see `loaders.build`.
        decode: `"pil"` or `"tensor"`.
        precache: folder into which the raw tree is converted on first use, see `loaders.build`; the dataset
            is then that of this folder.
        recipe: recipe for `precache`, see `loaders.build`.
        splits: splits of a raw tree that has none, see `loaders.build`.
        class_depth: depth of the class folders of a raw tree, see `loaders.build`.

    Attributes:
        root: the path, as given.
        classes: class names.
        class_to_idx: class name -> label.
        samples: list of (path, label); the path is that of the file in a raw tree, or relative to the source
            of a converted folder, for which the list is made when it is first read.
        imgs: the same list, under ImageFolder's other name.
        targets: list of each sample's label: a class, a list of classes, a number, or a list of numbers.
        loader: function that makes a picture of a path in `samples`.
        ids: int64 [n], the samples' ids, ascending; for converted data of more than a million samples a
            column, indexed like an array. Its order takes 8 bytes per sample.
        transform: function applied to each picture; may be replaced.
        target_transform: function applied to each label; may be replaced.

    Raises:
        SettingError: there is no such split, `decode` is unknown, or a setting belongs to another dataset of
            torchvision; the message names the one to give here.
        TypeError: a setting is unknown.
        NothingFoundError: there is no data at `root`, or a class has no picture; also a FileNotFoundError.
        DatasetError, SourceError: the data cannot be read; or, when a sample is read, its file is missing or
            damaged.
        SampleError: a sample that is read is damaged; names its file, id and source.
        ImageError: a picture of a raw tree that is read cannot be decoded.
    """

    make_dataset = staticmethod(folder.make_dataset)
    _data: SplitData | None = None  # only for a converted folder

    @explain_unknown_settings(DATASET_HINTS, {})
    def __init__(  # noqa: PLR0913 (each one a choice of the caller)
        self,
        root: str | os.PathLike[str] | Url,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        loader: Callable[[str], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        *,
        split: str = "train",
        decode: Literal["pil", "tensor"] = "pil",
        precache: str | os.PathLike[str] | None = None,
        recipe: Recipe | None = None,
        splits: str | os.PathLike[str] | None = None,
        class_depth: int | None = None,
    ) -> None:
        check_choice("decode", decode, _LOADERS)
        recipe, splits = find_recipe(root, precache, recipe, splits)
        rule = ""
        if is_valid_file is not None:
            rule = "is_valid_file"
        elif type(self).make_dataset is not folder.make_dataset:
            rule = "make_dataset"
        for name, value in (("precache", precache), ("splits", splits), ("class_depth", class_depth)):
            if rule and value is not None:
                raise SettingError(
                    f"{name} {value!r}: {rule} lists the files of a tree", remedy="leave one of them out"
                )
        if precache is not None:
            if loader is not None:
                raise _tree_setting_error("loader", precache)
            root = convert_on_first_use(root, precache, recipe, splits, class_depth)
            splits = class_depth = None  # the folder has them
        shown_root = str(root) if isinstance(root, Url) else root
        VisionDataset.__init__(self, shown_root, transform=transform, target_transform=target_transform)
        self.extensions = folder.IMG_EXTENSIONS if is_valid_file is None else None
        self._split, self._decode, self._kind = split, decode, RAW
        self._class_depth = 1 if class_depth is None else class_depth
        self.loader: Callable[..., Any] = _LOADERS[decode] if loader is None else loader
        if rule:
            self._list_as_image_folder(is_valid_file, allow_empty, rule)
            return
        has_own_classes = type(self).find_classes is not ImageDataset.find_classes
        tree_options: dict[str, Any] = {
            "splits": splits,
            "split_seed": recipe.seed,
            "class_depth": class_depth,
            "image_folder_only": True,
            "empty_classes": "keep" if allow_empty or has_own_classes else "refuse",
        }
        data = self._open(root if isinstance(root, Url) else self.root, tree_options)
        self._kind = data.kind
        self.classes = list(data.classes)
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        if has_own_classes:
            data = self._choose_classes(data, allow_empty)
        if loader is not None and data.kind != RAW:
            raise _tree_setting_error("loader", self.root)
        if data.kind == RAW:
            self.samples = self.imgs = _list_files(data, self.root)
            self.targets = [label for _, label in self.samples]
            self.ids = data.ids.values
        else:
            self._data = data = data.select(np.argsort(data.ids[:]))
            self.loader = StoredPictures(data, decode)
            if decode == "tensor":
                data.warn_if_rounded()

    def _open(self, root: str | os.PathLike[str] | Url, tree_options: dict[str, Any]) -> SplitData:
        """Open the split; the last part of `root` may name it, `data/shards/val`, as in the tree."""
        try:
            return open_split(root, self._split, **tree_options)
        except NothingFoundError:
            parent, name = os.path.split(os.path.normpath(self.root))
            if self._split != "train" or not is_converted(Path(parent)):
                raise
        try:
            data = open_split(parent, name, **tree_options)
        except SettingError as error:  # there is no split of this name
            raise NothingFoundError(str(error), path=self.root) from error
        self._split = name
        return data

    def _list_as_image_folder(
        self, is_valid_file: Callable[[str], bool] | None, allow_empty: bool, rule: str
    ) -> None:
        """List a raw tree as ImageFolder does, by a function of the caller's, and set the attributes.

        Args:
            rule: name of that function, for messages.

        Raises:
            SettingError: there is no tree.
            NothingFoundError: a class has no file that is a sample by the rule.
        """
        top = _split_folder(self.root, self._split, rule)
        try:
            self.classes, self.class_to_idx = folder.find_classes(top)
            self.classes, self.class_to_idx = self.find_classes(top)
            self.samples = self.imgs = self.make_dataset(
                top,
                self.class_to_idx,
                extensions=self.extensions,
                is_valid_file=is_valid_file,
                allow_empty=allow_empty,
            )
        except FileNotFoundError as error:
            raise NothingFoundError(str(error), path=top) from error
        self.targets = [label for _, label in self.samples]
        self.ids = np.arange(len(self.samples))

    def find_classes(self, directory: str | os.PathLike[str]) -> tuple[list[str], dict[str, int]]:
        """Return class names, and name -> label; a subclass may return fewer, or other labels."""
        return list(self.classes), dict(self.class_to_idx)

    def _choose_classes(self, data: SplitData, allow_empty: bool) -> SplitData:
        """Return the samples of the classes that `find_classes` names, with its labels.

        Raises:
            NothingFoundError: it names no class of the data; or one without a picture, and `allow_empty` is
                False.
        """
        own_classes = self.classes
        root = os.fspath(self.root)
        self.classes, self.class_to_idx = self.find_classes(
            _class_parent(data, root) if data.kind == RAW else root
        )
        if self.class_to_idx.keys().isdisjoint(own_classes):
            raise NothingFoundError(
                f"find_classes names none of its classes ({abridge([*map(repr, own_classes)])})",
                path=self.root,
                remedy="choose from what super().find_classes(directory) returns",
            )
        new_labels = np.array([self.class_to_idx.get(name, -1) for name in own_classes], np.int64)
        labels = data.labels[:]
        # the appended -1 is for label -1, of samples without a class
        chosen = np.flatnonzero(np.append(new_labels, -1)[labels] >= 0)
        filled = {own_classes[label] for label in np.unique(labels[chosen]).tolist()}
        empty = [repr(name) for name in self.class_to_idx if name not in filled]
        if empty and not allow_empty:
            raise NothingFoundError(
                f"find_classes names classes without a picture: {abridge(empty)}",
                path=self.root,
                remedy="leave them out, or give allow_empty=True",
            )
        return data.select(chosen).relabel(tuple(self.classes), new_labels)

    # For a raw tree, and once a script assigns them, these are plain attributes.

    @cached_property
    def samples(self) -> list[tuple[str, Any]]:
        """List of (path, label); see the class."""
        assert self._data is not None
        return [(self._data.path_at(position), label) for position, label in enumerate(self._data.targets())]

    @cached_property
    def imgs(self) -> list[tuple[str, Any]]:
        """List of (path, label), the same as `samples`."""
        return self.samples

    @cached_property
    def ids(self) -> Ints:
        """Sample ids, ascending; see the class."""
        assert self._data is not None
        return self._data.ids.values

    @cached_property
    def targets(self) -> list[Any]:
        """Labels of the samples; see the class."""
        assert self._data is not None
        return self._data.targets()

    def __len__(self) -> int:
        if self._data is None or "samples" in vars(self):
            return len(self.samples)
        return len(self._data)

    def __getitem__(self, index: SupportsIndex) -> tuple[Any, Any]:
        try:
            position = range(len(self))[as_index(index)]
        except IndexError:
            raise IndexError(f"{getattr(self, 'root', '')}: sample {index} of {len(self):,}") from None
        loader: Any = self.loader
        is_stored = isinstance(loader, StoredPictures)
        if is_stored and self._data is not None and "samples" not in vars(self):
            picture, label = loader.read(position), self._label_at(position)
        else:
            path, label = self.samples[position]
            try:
                picture = loader(path, position) if is_stored else loader(path)
            except UnreadablePictureError as error:
                remedy = picture_remedy(
                    error, self.root, self._class_depth, "'precache convert' leaves it out"
                )
                raise UnreadablePictureError(error.path, error.reason, remedy=remedy) from error
        if self._data is not None:
            label = self._to_tensor(label)
        if self.transform is not None:
            picture = self.transform(picture)
        if self.target_transform is not None:
            label = self.target_transform(label)
        return picture, label

    def extra_repr(self) -> str:
        """Return the line of the dataset's repr that ImageFolder does not have: split and classes."""
        return f"Split: {self._split} ({self._kind}), {len(self.classes):,} classes"

    def _label_at(self, position: int) -> Any:
        """Return the label of the sample at `position`, in the form that `targets` has."""
        assert self._data is not None
        if (targets := self._data.index.targets) is None:
            return int(self._data.labels[position])
        return targets.row_value(position)

    def _to_tensor(self, label: Any) -> Any:
        """Return the label in the form of a batch, see `loaders.transfer`; a single class stays an int."""
        assert self._data is not None
        if (targets := self._data.index.targets) is None:
            return label
        if targets.kind == "ragged":
            has_class = np.zeros(len(self.classes), np.float32)
            has_class[label] = 1
            return torch.from_numpy(has_class)
        with np.errstate(over="ignore"):  # a value beyond float32 becomes infinite
            return torch.from_numpy(np.array(label, np.float64).astype(np.float32))


class StoredPictures:
    """Reads the pictures of a converted split by position, or by path as ImageFolder's `loader`.

    Args:
        decode: `"pil"` or `"tensor"`.
    """

    def __init__(self, data: SplitData, decode: str) -> None:
        self._data, self._decode = data, decode
        self._check = SampleCheck(data, "first-read")
        self._measured: set[int] = set()  # shards whose size was compared with the manifest
        self._positions: dict[str, int] = {}  # for all paths, once a path was not that of its position

    def __call__(self, path: str, position: int = -1) -> Picture:
        """Read the picture with this path; `position` is a guess where it is."""
        name = os.fspath(path)
        if not (0 <= position < len(self._data) and self._data.path_at(position) == name):
            position = self._find(name)
        return self.read(position)

    def _find(self, name: str) -> int:
        """Return the position of the sample whose path relative to the source is `name`."""
        data = self._data
        if not self._positions:
            self._positions = {data.path_at(position): position for position in range(len(data))}
        if len(self._positions) < len(data):
            raise DatasetError(
                "several of its samples are called alike, so that none is found by its path",
                path=data.path,
                remedy="leave `samples` as it is, and choose samples by torch.utils.data.Subset",
            )
        if name not in self._positions:
            raise NothingFoundError(
                f"no sample of {data.path} in this split has this path; expected one of those "
                f"in `samples` of an ImageDataset of it",
                path=name,
            )
        return self._positions[name]

    def read(self, position: int) -> Picture:
        """Read the picture of the sample at `position`, and compare it with its checksum."""
        pixels = self._read_pixels(position)
        if self._decode == "tensor":
            return torch.from_numpy(pixels).permute(2, 0, 1)
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def _read_pixels(self, position: int) -> Pixels:
        """Return the pixels of the sample at `position`, [height, width, channels]."""
        data = self._data
        shard = int(data.locate(np.array([position]))[0][0])

        def read_content(path: Path) -> bytes | Pixels:
            if shard not in self._measured:
                self._check.compare_size(shard)
                self._measured.add(shard)
            sample = data.read_sample(position, path)
            self._check.compare(position, sample.data, sample.damage)
            return sample.data

        content = data.read(shard, read_content)
        if isinstance(content, bytes):
            return decode_jpeg(content, f"{data.files[shard]}: sample {data.ids[position]}", data.channels)
        return content.reshape(*data.shapes_at(np.array([position]))[0], data.channels)


def _tree_setting_error(name: str, root: object) -> SettingError:
    """Return the error for a setting that is for the files of a raw tree, when stored pictures are read."""
    if name == "loader":
        alternative = "a function given as transform gets each picture"
    else:
        alternative = "torch.utils.data.Subset chooses samples"
    return SettingError(
        f"{name} is for the files of a tree, and of {root} pictures are read that are stored decoded",
        remedy=f"leave it out: {alternative}",
    )


def _split_folder(root: str | os.PathLike[str], split: str, rule: str) -> str:
    """Return the folder of a raw tree in which the class folders of `split` lie.

    Args:
        rule: name of the caller's function that lists the files, for messages.

    Raises:
        SettingError: it cannot be told from the pictures, or `root` is converted.
        NothingFoundError: there is no folder.
    """
    top = os.fspath(root)
    try:
        data = open_split(root, split)
    except NothingFoundError:  # the samples may be files that are no pictures for `open_split`
        if not os.path.isdir(root):
            raise
        names = [entry.name for entry in os.scandir(root) if entry.is_dir()]
        if not names or not all(map(split_of, names)):
            return top
    else:
        if data.kind != RAW:
            raise _tree_setting_error(rule, root)
        if len(data):
            return _class_parent(data, top)
    raise SettingError(
        f"{rule}: {root} has no pictures that tell the splits", remedy=f"give the folder of {split} as root"
    )


def _class_parent(data: SplitData, root: str) -> str:
    """Return the folder in which the class folders of a split lie: the split's folder, or `root`."""
    if not data.classes:
        return root
    for position in (0, len(data) - 1):  # one class may have the name of the split
        path = data.path_at(position)
        if not path.startswith(f"{data.classes[data.labels[position]]}/"):
            return os.path.join(root, path.partition("/")[0])
    return root


def _list_files(data: SplitData, root: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """Return (path, label) of each sample, with the path as ImageFolder writes it."""
    data_top, top = f"{data.path}/", os.path.join(root, "")
    if Path(top) != data.path:  # `root` is a file:// URL
        top = data_top
    paths = data.files if top == data_top else [top + file[len(data_top) :] for file in data.files]
    return list(zip(paths, data.labels.tolist(), strict=True))
