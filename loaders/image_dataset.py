"""The samples of a split one by one, for code that is written for torchvision's ImageFolder."""

import os
from collections.abc import Callable
from functools import cached_property
from operator import index as as_index
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torchvision.datasets import VisionDataset, folder

from loaders.batch import Positions
from loaders.converting import Conversion, reconcile
from loaders.dataset import RAW, SplitData, open_split, reason_with_remedy
from loaders.read.integrity import SampleCheck
from loaders.settings import OF_IMAGES, check_given, refuse_others
from precache.dataset.converted import is_converted
from precache.errors import (
    DatasetError,
    ImageError,
    NothingFoundError,
    SettingError,
    SourceError,
    check_choice,
    shell_command,
)
from precache.formats import FORMATS
from precache.formats.base import Places
from precache.pictures import images
from precache.pictures.jpeg import Pixels, decode_jpeg
from precache.recipe import Recipe
from precache.reporting import some
from precache.sources.tree import split_of
from precache.storage.urls import Url

_LOOK_SAMPLES = 512
Picture: TypeAlias = Image.Image | torch.Tensor
T = TypeVar("T")


class UnreadablePictureError(ImageError, UnidentifiedImageError):
    """A picture of a tree cannot be decoded (also Pillow's error, which ImageFolder raises)."""


def load_picture(path: str) -> Image.Image:
    """The picture at `path`, upright and in RGB."""
    return _load(path, images.decode)


def load_tensor(path: str) -> torch.Tensor:
    """The same as uint8 [3, height, width], in channels-last memory."""
    return torch.from_numpy(_load(path, images.decode_pixels)).permute(2, 0, 1)


def _load(path: str, decode: Callable[[bytes, str], T]) -> T:
    """What `decode` makes of a file; errors are also those of ImageFolder, which scripts catch."""
    try:
        return decode(images.read_bytes(path), path)
    except ImageError as error:
        raise UnreadablePictureError(error.path, error.reason) from error
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise NothingFoundError(str(error)) from error
        raise


_LOADERS: dict[str, Callable[[str], Any]] = {"pil": load_picture, "tensor": load_tensor}


class ImageDataset(folder.ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """A split of a raw tree or a converted folder, by index: a drop-in for torchvision's `ImageFolder`.

    `dataset[i]` is (picture, label): a Pillow image (RGB, L or RGBA) or, with `decode="tensor"`, uint8
    [channels, height, width] in channels-last memory, after `transform`; the label after `target_transform`.
    The order is that of ImageFolder over the tree, by ascending ids, whatever the pictures are read from.
    A picture of a raw tree has its full size, turned upright as EXIF says; one of a converted folder has the
    size that is stored. Samples of no one class each have the tensor that `loaders.transfer` says.

    A sample of a converted folder is compared with its checksum when this process first reads it. No file
    but the mapped index stays open between two samples, so it may be pickled, forked and used by several
    threads; another process maps the index itself. Of a URL each
    shard is fetched, whole, when a sample of it is first asked for; worker processes that fetch must not be
    forked: `DataLoader(..., multiprocessing_context="forkserver")`.

    What a script or a subclass changes counts as it does for ImageFolder: `dataset[i]` is what `loader` makes
    of the path in `samples[i]`, and the label there; `find_classes` and `make_dataset` may be overridden.

    Args:
        root: as `path` of `loaders.build`, one; or that of a split: `data/shards/val` of the folder
            `data/shards`, as scripts join it for a tree.
        transform: of the picture.
        target_transform: of the label.
        loader: makes a picture of a tree of its path; default: what `decode` says. None is for a converted
            folder, whose pictures are stored decoded.
        is_valid_file: says of the path of each file of a tree whether it is a sample; default: pictures are.
            The tree is then listed as ImageFolder does it, and ids are numbers of these samples.
        allow_empty: class folders of a tree without pictures are classes; `precache convert` leaves them out.
        split: as of `loaders.build`.
        decode: `"pil"` or `"tensor"`.
        precache, recipe: as of `loaders.build`; each process that reads looks every 512 samples whether the
            shards are finished; a new worker of a DataLoader at its first.
        splits, class_depth: as of `loaders.build`, of a raw tree.

    Attributes:
        root: as given.
        classes: class names.
        class_to_idx: class name -> label.
        samples: list of (path, label), the path that of the file in a raw tree, or relative to the source of
            a converted folder. Of the latter it is made when it is first asked for.
        imgs: the same list, as ImageFolder has it.
        targets: list of what each sample is labelled with: a class, a list of classes, a number, or a list of
            numbers.
        loader: makes a picture of a path in `samples`.
        ids: int64 [n], the samples' ids, ascending; of a converted set of more than a million a column,
            indexed like an array. The order of such a set takes 8 bytes a sample.
        transform, target_transform: as given; may be set anew.

    Raises:
        SettingError: no such split, `decode` is unknown, or a setting is one of torchvision's datasets, with
            the name of the one here. TypeError: a setting that is known nowhere.
        NothingFoundError: there is no data at `root`, or a class has no picture; a FileNotFoundError, too.
        DatasetError, SourceError: what is there cannot be read; or, when a sample is read, its file is
            missing or damaged. SampleError: the sample is; it names file, id and source. ImageError: a
            picture of a raw tree cannot be decoded.
    """

    make_dataset = staticmethod(folder.make_dataset)
    _data: SplitData | None = None  # of a converted folder
    _conversion: Conversion | None = None

    @refuse_others(OF_IMAGES, {})
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
        check_given(root, precache, recipe, splits)
        check_choice("decode", decode, _LOADERS)
        recipe, splits = reconcile(recipe, splits)
        place = str(root) if isinstance(root, Url) else root
        VisionDataset.__init__(self, place, transform=transform, target_transform=target_transform)
        self.extensions = folder.IMG_EXTENSIONS if is_valid_file is None else None
        self._split, self._decode, self._kind = split, decode, RAW
        self._class_depth = 1 if class_depth is None else class_depth
        self.loader: Callable[..., Any] = _LOADERS[decode] if loader is None else loader
        if is_valid_file is not None or type(self).make_dataset is not folder.make_dataset:
            given: dict[str, object] = {"precache": precache, "splits": splits, "class_depth": class_depth}
            self._list_as_image_folder(is_valid_file, allow_empty, given)
            return
        chooses = type(self).find_classes is not ImageDataset.find_classes
        of_tree: dict[str, Any] = {
            "splits": splits,
            "split_seed": recipe.seed,
            "class_depth": class_depth,
            "allow_empty": allow_empty or chooses,
        }
        data = self._open(root if isinstance(root, Url) else self.root, of_tree)
        split, self._kind = self._split, data.kind
        self.classes = list(data.classes)
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        if chooses:
            data = self._choose_classes(data, allow_empty)
        if loader is not None and (data.kind != RAW or precache is not None):
            raise _no_files("loader", self.root)
        if precache is not None:
            self._conversion = Conversion(data, split, precache, recipe)
            self._own_loader, self._asked, self._process = self.loader, 0, 0
        if data.kind == RAW:
            self._top, self.samples = _list_files(data, self.root)
            self.imgs, self.targets = self.samples, [label for _, label in self.samples]
            self.ids = data.ids.values
        else:
            modes = (1, 3, 4) if data.dtype == np.uint8 else (1,)
            if decode == "pil" and data.channels not in modes:
                raise SettingError(
                    f"decode 'pil': {root} holds {data.dtype} pictures of {data.channels} channels, "
                    f"which Pillow has no mode for; use 'tensor'"
                )
            self._data = data = data.select(np.argsort(data.ids[:]))
            self.loader = StoredPictures(data, decode)

    def _open(self, root: str | os.PathLike[str] | Url, of_tree: dict[str, Any]) -> SplitData:
        """The split; of a converted folder its path may name it, `data/shards/val`, as in the tree."""
        try:
            return open_split(root, self._split, **of_tree)
        except NothingFoundError:
            above, name = os.path.split(os.path.normpath(self.root))
            if self._split != "train" or not is_converted(Path(above)):
                raise
        try:
            data = open_split(above, name, **of_tree)
        except SettingError as error:  # it has no such split
            raise NothingFoundError(f"{self.root}: {error}") from error
        self._split = name
        return data

    def _list_as_image_folder(
        self, is_valid_file: Callable[[str], bool] | None, allow_empty: bool, given: dict[str, object]
    ) -> None:
        """List a tree as ImageFolder does, by a rule of the caller's, in the place of `open_split`.

        Args:
            given: settings of the other way, by name.

        Raises:
            SettingError: one of them is given; or there is no tree.
            NothingFoundError: a class has no file that the rule takes.
        """
        rule = "make_dataset" if is_valid_file is None else "is_valid_file"
        for name, value in given.items():
            if value is not None:
                raise SettingError(
                    f"{name} {value!r}: {rule} lists the files of a tree; leave one of them out"
                )
        top = _split_folder(self.root, self._split, rule)
        options = {"is_valid_file": is_valid_file, "allow_empty": allow_empty}
        try:
            self.classes, self.class_to_idx = folder.find_classes(top)
            self.classes, self.class_to_idx = self.find_classes(top)
            self.samples = self.imgs = self.make_dataset(
                top, self.class_to_idx, extensions=self.extensions, **options
            )
        except FileNotFoundError as error:
            raise NothingFoundError(f"{top}: {error}") from error
        self.targets = [label for _, label in self.samples]
        self.ids = np.arange(len(self.samples))

    def find_classes(self, directory: str | os.PathLike[str]) -> tuple[list[str], dict[str, int]]:
        """Class names, and name -> label. A subclass may name some of them, or label them otherwise."""
        return list(self.classes), dict(self.class_to_idx)

    def _choose_classes(self, data: SplitData, allow_empty: bool) -> SplitData:
        """The samples of the classes that `find_classes` names, labelled as it says.

        Raises:
            NothingFoundError: it names no class that there is; or one without a picture, and `allow_empty` is
                not given.
        """
        own = self.classes
        root = os.fspath(self.root)
        self.classes, self.class_to_idx = self.find_classes(
            _folder_of(data, root) if data.kind == RAW else root
        )
        if self.class_to_idx.keys().isdisjoint(own):
            raise NothingFoundError(
                f"{self.root}: find_classes names none of its classes ({some([*map(repr, own)])}); choose "
                f"from what super().find_classes(directory) returns"
            )
        new_labels = np.array([self.class_to_idx.get(name, -1) for name in own], np.int64)
        labels = data.labels[:]
        # by the last, -1, what is of no class
        chosen = np.flatnonzero(np.append(new_labels, -1)[labels] >= 0)
        filled = {own[label] for label in np.unique(labels[chosen]).tolist()}
        empty = [repr(name) for name in self.class_to_idx if name not in filled]
        if empty and not allow_empty:
            raise NothingFoundError(
                f"{self.root}: find_classes names classes without a picture: {some(empty)}; leave them out, "
                f"or give allow_empty=True"
            )
        return data.select(chosen).relabel(tuple(self.classes), new_labels)

    # Of a tree, and once somebody assigns them, these are attributes as any other.

    @cached_property
    def samples(self) -> list[tuple[str, Any]]:
        """See the class."""
        assert self._data is not None
        return [(self._data.path_at(place), label) for place, label in enumerate(self._data.targets())]

    @cached_property
    def imgs(self) -> list[tuple[str, Any]]:
        """See the class."""
        return self.samples

    @cached_property
    def ids(self) -> Positions:
        """See the class."""
        assert self._data is not None
        return self._data.ids.values

    @cached_property
    def targets(self) -> list[Any]:
        """See the class."""
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
        loader = self._look()
        stored = isinstance(loader, StoredPictures)
        if stored and self._data is not None and "samples" not in vars(self):
            picture, label = loader.read(position), self._target(position)
        else:
            path, label = self.samples[position]
            try:
                picture = loader(path, position) if stored else loader(path)
            except UnreadablePictureError as error:
                reason = reason_with_remedy(
                    error, self.root, self._class_depth, "'precache convert' leaves it out"
                )
                raise UnreadablePictureError(error.path, reason) from error
        if self._data is not None:
            label = self._as_tensor(label)
        if self.transform is not None:
            picture = self.transform(picture)
        if self.target_transform is not None:
            label = self.target_transform(label)
        return picture, label

    def extra_repr(self) -> str:
        """What a repr says beside the number of samples, the root and the transforms."""
        return f"Split: {self._split} ({self._kind}), {len(self.classes):,} classes"

    def _look(self) -> Any:
        """What reads the pictures: `loader`, which becomes that of the shards once they are finished."""
        conversion = self._conversion
        if conversion is None or self.loader is not self._own_loader:
            return self.loader
        if self._process != os.getpid():  # a worker that was forked looks at its first sample
            self._process, self._asked = os.getpid(), 0
        if self._asked % _LOOK_SAMPLES == 0 and (stored := conversion.found()) is not None:
            self.loader, self._conversion = StoredPictures(stored, self._decode, self._top), None
        self._asked += 1
        return self.loader

    def _target(self, position: int) -> Any:
        """The label of the sample at `position`, in the form that `targets` has."""
        assert self._data is not None
        if (targets := self._data.index.targets) is None:
            return int(self._data.labels[position])
        return targets.value(position)

    def _as_tensor(self, label: Any) -> Any:
        """The label as a batch has it, see `loaders.transfer`: a class is as it is."""
        assert self._data is not None
        if (targets := self._data.index.targets) is None:
            return label
        if targets.kind == "ragged":
            is_of = np.zeros(len(self.classes), np.float32)
            is_of[label] = 1
            return torch.from_numpy(is_of)
        with np.errstate(over="ignore"):  # beyond 32 bits it is infinite
            return torch.from_numpy(np.array(label, np.float64).astype(np.float32))


class StoredPictures:
    """Reads the pictures of a converted split, by position, or by their paths, as ImageFolder's `loader`.

    Args:
        top: what the paths begin with before those in the source.
    """

    def __init__(self, data: SplitData, decode: str, top: str = "") -> None:
        self._data, self._decode, self._top = data, decode, top
        self._check = SampleCheck(data, "first-read")
        self._places: dict[int, Places] = {}  # of the shards read so far
        self._positions: dict[str, int] = {}  # of all paths, once one was not where it was thought to be

    def __call__(self, path: str, position: int = -1) -> Picture:
        """Read the picture of this path, which perhaps is that of the sample at `position`."""
        name = os.fspath(path).removeprefix(self._top)
        if not (0 <= position < len(self._data) and self._data.path_at(position) == name):
            position = self._find(name)
        return self.read(position)

    def _find(self, name: str) -> int:
        if not self._positions:
            self._positions = {self._data.path_at(place): place for place in range(len(self._data))}
        if len(self._positions) < len(self._data):
            raise DatasetError(
                f"{self._data.path}: several of its samples are called alike, so that none is found by its "
                f"path; leave `samples` as it is, and choose samples by torch.utils.data.Subset"
            )
        if name not in self._positions:
            raise NothingFoundError(
                f"{name}: no sample of {self._data.path} in this split has this path; expected one of those "
                f"in `samples` of an ImageDataset of it"
            )
        return self._positions[name]

    def read(self, position: int) -> Picture:
        """Read the picture of the sample at `position`, and compare it."""
        pixels = self._read(position)
        if self._decode == "tensor":
            return torch.from_numpy(pixels).permute(2, 0, 1)
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def _read(self, position: int) -> Pixels:
        """[height, width, channels]."""
        data = self._data
        (shard,), (row,) = (of.tolist() for of in data.locate(np.array([position])))

        def read(path: Path) -> bytes | Pixels:
            if shard not in self._places:
                self._places[shard] = _find_samples(shard, path, data, self._check)
            sample = data.read_sample(position, path, self._places[shard][row])
            self._check.compare(position, sample.data, sample.damage)
            return sample.data

        # with its index where that is still to be read
        content = data.read(shard, read, with_index=shard not in self._places)
        if isinstance(content, bytes):
            return decode_jpeg(content, f"{data.files[shard]}: sample {data.ids[position]}", data.channels)
        return content.view(data.dtype).reshape(*data.shapes_at(np.array([position]))[0], data.channels)


def _no_files(name: str, root: object) -> SettingError:
    """What to raise of a setting for the files of a tree where others than these are read."""
    instead = {
        "loader": "a function given as transform gets each picture",
        "is_valid_file": "torch.utils.data.Subset chooses samples",
        "make_dataset": "torch.utils.data.Subset chooses samples",
    }[name]
    return SettingError(
        f"{name} is for the files of a tree, and of {root} pictures are read that are stored decoded; leave "
        f"it out: {instead}"
    )


def _split_folder(root: str | os.PathLike[str], split: str, rule: str) -> str:
    """The folder of a tree that the class folders of the split lie in.

    Raises:
        SettingError: it is not known which, or `root` is converted.
        NothingFoundError: there is no folder.
    """
    here = os.fspath(root)
    try:
        data = open_split(root, split)
    except NothingFoundError:  # of what we know as pictures
        if not os.path.isdir(root):
            raise
        names = [entry.name for entry in os.scandir(root) if entry.is_dir()]
        if not names or not all(map(split_of, names)):
            return here
    else:
        if data.kind != RAW:
            raise _no_files(rule, root)
        if len(data):
            return _folder_of(data, here)
    raise SettingError(
        f"{rule}: {root} has no pictures that tell the splits; give the folder of {split} as root"
    )


def _folder_of(data: SplitData, root: str) -> str:
    """The folder of a tree that the class folders of a split lie in: that of the split, or the root."""
    for position in (0, len(data) - 1) if data.classes else ():  # one class may be called as the split is
        path = data.path_at(position)
        if not path.startswith(f"{data.classes[data.labels[position]]}/"):
            return os.path.join(root, path.partition("/")[0])
    return root


def _list_files(data: SplitData, root: str | os.PathLike[str]) -> tuple[str, list[tuple[str, int]]]:
    """What all paths of a tree begin with, as ImageFolder has them, and (path, label) of each sample."""
    above, top = f"{data.path}/", os.path.join(root, "")
    if Path(top) != data.path:  # it was given as a file:// URL
        top = above
    paths = data.files if top == above else [top + file[len(above) :] for file in data.files]
    return top, list(zip(paths, data.labels.tolist(), strict=True))


def _find_samples(shard: int, path: Path, data: SplitData, check: SampleCheck) -> Places:
    """Where the samples of the shard at `path` lie, which is as long as it was written.

    Raises:
        DatasetError: it is not, or its index names places that are not in it.
    """
    check.compare_size(shard)
    places = FORMATS[data.kind].find_samples(path)
    samples, most = data.whole.shard_samples[shard], data.shard_bytes[shard]
    if len(places) != samples or (places > most).any():
        raise DatasetError(
            f"{data.files[shard]}: its index names {len(places):,} samples up to byte "
            f"{places.max(initial=0):,}, it has {samples:,} in {most:,} bytes; "
            f"run: {shell_command('precache verify', data.path)}"
        )
    return places
