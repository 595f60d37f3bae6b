"""A user's dataset, anything with `__len__` and `__getitem__`, or several as splits, as a source.

A sample's id is its row; with splits, the rows of the second continue those of the first. Its path is that
of its file, if it has one, else its row in 8 digits. A sample is a tuple (picture, label), a mapping, or a
picture alone, and a picture may be

    str, path                     the file of that name
    bytes                         an encoded picture
    {"bytes": ..., "path": ...}   either, as Hugging Face has it undecoded
    Pillow image                  itself
    array                         uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4]
    tensor                        the same, or [1, h, w], [3, h, w] or [4, h, w]

A tensor is known by its methods: torch is not imported. Samples are listed without decoding pictures where
that is possible; `targets` are not believed: a sample may say something else.

    torchvision's ImageFolder, DatasetFolder     paths and labels are in `samples`; without a transform, the
                                                 files are read in place of the samples
    a torch Subset of one of these               labels are in its `samples`
    datasets of Hugging Face's library           columns say all but the pictures, which stay undecoded
    all others                                   every sample is read once, for its label and its fields

Hugging Face's library (extra `hf`) is imported for `hf:FOLDER` alone, where `save_to_disk` has put a dataset;
one that is passed brings what is needed.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from precache.errors import ImageError, MissingDependencyError, SettingError, SourceError
from precache.packages import install_extra
from precache.pictures.pillow import TooLargeError, check_pixels
from precache.pictures.reading import check_bytes, read_picture, status_of, steadily
from precache.recipe import SPLIT_NAME
from precache.sources.base import ANY_SIZE, SampleRef, Samples, Scan, picture_checksum
from precache.sources.labels import Columns, Rows, unique_names
from precache.sources.options import DATASET, FOLDER_DATASET, SourceOptions

PREFIX = "hf:"
_TRIED = 16  # samples, until one can be read
_PROBED = 8  # samples that are looked at to tell two datasets apart
_CHANNELS = (1, 3, 4)
_EXPECTED = "expected a path, encoded bytes, a Pillow image, or a uint8 array or tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Where the samples of a split come from; all that a worker needs.

    Attributes:
        name: in messages.
        first: row of its first sample.
        read: picture of a row; None: the pictures are files in `folder`.
        folder: see `read`.
        prefix: of the paths of its samples.
    """

    name: str
    first: int = 0
    read: Callable[[int], Any] | None = None
    folder: str = ""
    prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """The samples of a split, in its order.

    Attributes:
        part: where they are read.
        count: of samples.
        columns: what else is known of them.
        values: of these columns, one value for each sample.
        classes: names that integer labels index; None: labels speak for themselves.
        files: the files of the pictures, relative to the folder of `part`; else None.
        unread: rows of which nothing but their number is known, for they could not be read.
        warnings: see `Scan`.
    """

    part: _Part
    count: int
    columns: Columns
    values: Mapping[Any, Sequence[Any]] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    files: Sequence[str] | None = None
    unread: frozenset[int] = frozenset()
    warnings: tuple[str, ...] = ()

    def add_to(self, rows: Rows, split: str) -> None:
        """Add its samples, of which those without a split of their own belong to `split`."""
        part, columns = self.part, self.columns
        for row in range(self.count):
            place, path = part.first + row, f"{part.first + row:08d}"
            size, modified_ns = -1 if row in self.unread else 0, 0
            if self.files is not None:
                path = self.files[row]
                size, modified_ns = status_of(os.path.join(part.folder, path)) or (-1, 0)
            own = split if columns.split is None else self.values[columns.split][row]
            rows.add(f"{part.prefix}{path}", size, modified_ns, place, own)
        for label in () if columns.label is None else self.values[columns.label]:
            rows.labels.add(label)
        for name in columns.fields:
            rows.values[name] += self.values[name]


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A dataset, or a mapping of splits to datasets, as a `Source`.

    Attributes:
        dataset: what is read; None once it was scanned: `parts` then hold what reads it.
        root: its name in messages.
        paths: see `Source`.
    """

    dataset: Any
    options: SourceOptions
    root: Path
    paths: tuple[Path, ...] = ()
    parts: tuple[_Part, ...] = ()

    def scan(self) -> Scan:
        by_split = self._listings()
        every = list(by_split.values())
        first, scanned = every[0], replace(self, dataset=None, parts=tuple(listing.part for listing in every))
        rows = Rows(scanned._row, first.columns)
        for split, listing in by_split.items():
            if listing.classes != first.classes:
                raise SourceError(f"{self.root}: split {split!r} has other classes than the others")
            if listing.columns.names != first.columns.names:
                raise SourceError(f"{self.root}: split {split!r} has other columns than the others")
            listing.add_to(rows, split)
        unread = sum(len(listing.unread) for listing in every)
        if unread == len(rows):
            raise SourceError(f"{self.root}: none of its {unread:,} samples can be read; repair it")
        warnings = [warning for listing in every for warning in listing.warnings]
        scan = rows.scan(scanned, self.options, (), warnings, first.classes)
        probed = f"{scan.digest}{scanned.probe(scan.samples)}"
        return replace(scan, digest=hashlib.sha256(probed.encode()).hexdigest())

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        part, where = self._part(ref.place), self.where(ref)
        if part.read is None and ref.bytes >= 0:
            return read_picture(where, max_pixels, (ref.bytes, ref.modified_ns))
        picture = picture_of(
            where if part.read is None else part.read(ref.place - part.first), where, max_pixels
        )
        if ref.bytes < 0:
            raise ImageError(where, "could not be read when the dataset was listed")
        return picture

    def where(self, ref: SampleRef) -> str:
        """The name for messages: the path of its file, or its row."""
        part = self._part(ref.place)
        if part.read is None:
            return os.path.join(part.folder, ref.path.removeprefix(part.prefix))
        return self._row(ref.place)

    def probe(self, samples: Samples) -> str:
        """What a few of its pictures are: labels alone do not tell two datasets apart.

        Raises:
            SourceError: one is another picture each time that it is read.
        """
        found = []
        for row in sorted({round(at) for at in np.linspace(0, len(samples) - 1, _PROBED)}):
            ref = samples[row]
            if self._part(ref.place).read is None:
                continue  # their sizes are in the digest
            try:
                once, again = (picture_checksum(self.read(ref, ANY_SIZE)) for _ in range(2))
            except ImageError:
                continue  # the conversion says what is wrong with it
            if once != again:
                raise SourceError(
                    f"{self.where(ref)}: changes each time it is read; leave out the random transform: "
                    f"loaders augment anew in each epoch"
                )
            found.append(f"{row}:{once}")
        return " ".join(found)

    def _listings(self) -> dict[str, _Listing]:
        listings: dict[str, _Listing] = {}
        first = 0
        for split, one in (self.dataset if _is_splits(self.dataset) else {"": self.dataset}).items():
            if split and not SPLIT_NAME.fullmatch(split):
                raise SettingError(
                    f"{self.root}: {split!r} is not a valid split name; write letters and digits, as in train"
                )
            if split and self.options.split is not None:
                raise SettingError(f"{self.root}: has splits already; leave out split={self.options.split!r}")
            listing = _listed(one, f"{self.root}, split {split}" if split else str(self.root), self.options)
            prefix = f"{split}/" if split and listing.files is not None else ""
            listings[split] = replace(listing, part=replace(listing.part, first=first, prefix=prefix))
            first += listing.count
        return listings

    def _part(self, place: int) -> _Part:
        return self.parts[bisect_right(self.parts, place, key=lambda part: part.first) - 1]

    def _row(self, place: int) -> str:
        part = self._part(place)
        return f"{part.name}: row {place - part.first}"


def open_object(dataset: Any, options: SourceOptions) -> DatasetSource:
    """The source that reads `dataset`, or a mapping of splits to datasets.

    Raises:
        SettingError: it is not a dataset.
    """
    every = list(dataset.values()) if _is_splits(dataset) else [dataset]
    for one in every:
        if isinstance(one, type) or not (hasattr(one, "__len__") and hasattr(one, "__getitem__")):
            expected = "expected a path, or a dataset with __len__ and __getitem__"
            raise SettingError(f"{type(one).__name__} is not a source; {expected}")
    if not every:
        raise SettingError(
            "a mapping without splits is not a source; expected one such as {'train': dataset}"
        )
    folders = [getattr(one, "root", None) for one in every if hasattr(one, "samples")]
    paths = tuple(Path(folder) for folder in folders if isinstance(folder, str | os.PathLike))
    return DatasetSource(dataset, options, Path(_name_of(every[0])), paths)


def open_saved(folder: str, options: SourceOptions) -> DatasetSource:
    """The source that reads what Hugging Face's library has saved to `folder`; raises as `_load_saved`."""
    return DatasetSource(_load_saved(folder), options, Path(folder), (Path(folder),))


def _is_splits(dataset: Any) -> bool:
    return isinstance(dataset, Mapping) and all(isinstance(name, str) for name in dataset)


def picture_of(value: Any, where: str, max_pixels: int) -> bytes | Image.Image:
    """The picture that `value` is, see the module; as `Source.read` gives it.

    Raises:
        ImageError: it is not a picture; names `where`.
        SourceError: it is a file that cannot be read now.
    """
    if isinstance(value, Mapping):
        content = value.get("bytes")
        value = value.get("path") if content is None else content
    if isinstance(value, str | os.PathLike):
        return _file(value, where, max_pixels)
    if isinstance(value, bytes | bytearray | memoryview):
        check_bytes(where, len(value), max_pixels)
        return bytes(value)
    if isinstance(value, Image.Image):
        return _loaded(value, where, max_pixels)
    if _is_tensor(value):
        return _image(_channels_last(value.detach().cpu().numpy()), where)
    if isinstance(value, np.ndarray):
        return _image(value, where)
    what = "has no picture" if value is None else f"has {type(value).__name__} {value!r:.60}, not a picture"
    raise ImageError(where, f"{what}; {_EXPECTED}")


def _file(path: str | os.PathLike[str], where: str, max_pixels: int) -> bytes:
    name = os.fsdecode(path)
    if status_of(name) is None:
        raise ImageError(where, f"its picture {name!r:.200} is not a file")
    return read_picture(name, max_pixels)


def _loaded(image: Image.Image, where: str, max_pixels: int) -> Image.Image:
    """`image` once its pixels are there: one that is opened only decodes them when it is asked to."""
    try:
        check_pixels(*image.size, max_pixels)
        image.load()
    except TooLargeError as error:
        raise ImageError(where, str(error)) from error
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        raise ImageError(where, f"cannot be decoded ({_reason_of(error)})") from error
    return image


def _channels_last(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A tensor's [channels, h, w] as [h, w, channels]; where either is possible, torch means the first."""
    return np.moveaxis(array, 0, -1) if array.ndim == 3 and array.shape[0] in _CHANNELS else array


def _image(array: npt.NDArray[Any], where: str) -> Image.Image:
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS)
    if array.dtype != np.uint8 or not fits or not array.size:
        raise ImageError(
            where,
            f"is {array.dtype} {[*array.shape]}; expected uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4], "
            f"or a tensor with the channels first; leave out the transform that changes it",
        )
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _name_of(dataset: Any) -> str:
    """The name of a dataset for messages: its class."""
    kind = type(dataset)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _listed(dataset: Any, name: str, options: SourceOptions) -> _Listing:
    """The samples of a dataset whose name in messages is `name`.

    Raises:
        SettingError: an option names what its samples do not have.
        SourceError: it has no samples, or none can be read.
    """
    count = len(dataset)
    if not count:
        raise SourceError(f"{name}: has no samples; expected one for each picture")
    if _is_hf(dataset):
        return _list_columns(dataset, name, options)
    samples = _folder_samples(dataset)
    if samples is not None and _gives_files(dataset):
        options.only(FOLDER_DATASET)
        root = os.fspath(dataset.root)
        files = [_within(root, path) for path, _ in samples]
        return _Listing(
            part=_Part(name=name, folder=root),
            count=count,
            columns=Columns(label=None if options.target == "none" else "label"),
            values={"label": [label for _, label in samples]},
            classes=_class_names(dataset),
            files=files,
        )
    columns = _columns_of(_usual_sample(dataset, name, count), name, options)
    part = _Part(name=name, read=partial(_read_picture, dataset, name, columns.image))
    notes = (f"{name}: {columns.note}",) if columns.note else ()
    classes = _class_names(dataset)
    listing = _Listing(part=part, count=count, columns=columns, classes=classes, warnings=notes)
    if samples is not None and columns.names:
        return replace(listing, values={columns.label: [label for _, label in samples]})
    return _read_all(dataset, listing) if columns.names else listing


def _list_columns(dataset: Any, name: str, options: SourceOptions) -> _Listing:
    """The samples of a dataset of Hugging Face's library, by its columns; no picture is decoded."""
    features = dict(dataset.features or {})
    columns = _columns_of(features, name, options)
    notes = [f"{name}: {columns.note}"] if columns.note else []
    if (dataset.format or {}).get("type") == "custom":
        notes.append(f"{name}: its transform is left out: pictures are converted as they are stored")
    plain, image = dataset.with_format(None), columns.image
    try:
        values: dict[str, list[Any]] = plain.select_columns(columns.names)[:] if columns.names else {}
    except Exception as error:  # of many libraries
        raise SourceError(f"{name}: columns {columns.names} cannot be read ({_reason_of(error)})") from error
    pictures = plain.select_columns([image])
    if _is_image(features[image]):
        pictures = pictures.cast_column(image, type(features[image])(decode=False))
    return _Listing(
        part=_Part(name=name, read=partial(_read_picture, pictures, name, image)),
        count=len(plain),
        columns=columns,
        values=values,
        classes=None if columns.label is None else _feature_names(features[columns.label]),
        warnings=tuple(notes),
    )


def _columns_of(sample: Any, name: str, options: SourceOptions) -> Columns:
    """Where in a sample each value is: a key of a mapping, an index of a tuple, or None: itself."""
    options.only(DATASET)
    sample = _plain(sample)
    if isinstance(sample, Mapping) and not {"bytes", "path"} >= set(sample):
        pictures = [key for key, feature in sample.items() if _is_image(feature)]
        return Columns.of(name, list(sample), options, pictures, usual="label")
    asked = (options.image, options.label, options.split, *options.fields)
    if named := [key for key in asked if key is not None]:
        are = "tuples (picture, label)" if isinstance(sample, tuple) else "pictures alone"
        raise SettingError(
            f"{name}: its samples are {are}, which have no names, got {named[0]!r}; leave it out"
        )
    if not isinstance(sample, tuple):
        return Columns()
    if not sample:
        raise SourceError(f"{name}: its samples are empty; expected (picture, label)")
    return Columns(0, 1 if len(sample) > 1 and options.target != "none" else None)


def _get(sample: Any, key: Any) -> Any:
    sample = _plain(sample)
    if key is None:
        return sample
    try:
        return sample[key]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"has no {key!r}" if isinstance(key, str) else "is not a pair") from error


def _plain(sample: Any) -> Any:
    """A named tuple as a mapping, a list of picture and label as a tuple."""
    if hasattr(sample, "_asdict"):
        return sample._asdict()
    return tuple(sample) if isinstance(sample, list) else sample


def _usual_sample(dataset: Any, name: str, count: int) -> Any:
    """The first readable sample, with what some others have and it lacks: a key, or the label of a pair."""
    usual = _plain(_first_sample(dataset, name, count))
    for row in sorted({round(at) for at in np.linspace(0, count - 1, _PROBED)}):
        with suppress(ImageError):
            other = _plain(_read_sample(dataset, name, row))
            if isinstance(usual, Mapping) and isinstance(other, Mapping):
                usual = {**other, **usual}
            elif isinstance(usual, tuple) and isinstance(other, tuple) and len(other) > len(usual):
                usual = other
    return usual


def _first_sample(dataset: Any, name: str, count: int) -> Any:
    """The first readable sample among the first few."""
    errors = []
    for row in range(min(count, _TRIED)):
        try:
            return _read_sample(dataset, name, row)
        except ImageError as error:
            errors.append(error)
    raise SourceError(f"{errors[0]}, nor can the {len(errors) - 1} after it; repair the dataset")


def _read_sample(dataset: Any, name: str, row: int) -> Any:
    """`dataset[row]`.

    Raises:
        ImageError: it raises; names its row.
        SourceError: memory, a disk or a network fails.
    """
    where = f"{name}: row {row}"

    def act() -> Any:
        try:
            return dataset[row]
        except MemoryError as error:
            raise SourceError(f"{where}: not enough memory to read it; use fewer --workers") from error
        except OSError as error:
            if error.errno is not None and not isinstance(error, FileNotFoundError | IsADirectoryError):
                raise
            raise ImageError(where, f"cannot be read ({_reason_of(error)})") from error
        except Exception as error:  # other people's code may raise anything
            raise ImageError(where, f"cannot be read ({_reason_of(error)})") from error

    return steadily(act, where)


def _read_picture(dataset: Any, name: str, key: Any, row: int) -> Any:
    try:
        return _get(_read_sample(dataset, name, row), key)
    except ValueError as error:
        raise ImageError(f"{name}: row {row}", str(error)) from error


def _read_all(dataset: Any, listing: _Listing) -> _Listing:
    """Read every sample for its label and fields; one that cannot be read gets those of another."""
    name, columns, rows = listing.part.name, listing.columns, list[list[Any] | None]()
    for row in range(listing.count):
        try:
            sample = _read_sample(dataset, name, row)
            rows.append([_python_value(_get(sample, key)) for key in columns.names])
        except ImageError:
            rows.append(None)
        except ValueError as error:
            raise SourceError(f"{name}: row {row}: {error}, as other samples have") from error
    filler = next(values for values in rows if values is not None)
    values = zip(*(filler if row is None else row for row in rows), strict=True)
    others = "ImageFolder and Hugging Face datasets need not be"
    return replace(
        listing,
        values=dict(zip(columns.names, map(list, values), strict=True)),
        unread=frozenset(row for row, found in enumerate(rows) if found is None),
        warnings=(*listing.warnings, f"{name}: every sample was read for its label; {others}"),
    )


def _python_value(value: Any) -> Any:
    """Arrays and tensors as Python's numbers and lists."""
    if _is_tensor(value):
        value = value.detach().cpu()
    return value.tolist() if hasattr(value, "tolist") else value


def _class_names(dataset: Any) -> tuple[str, ...] | None:
    """Its `classes`; synonyms are joined, and a name that several classes have is followed by their index."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset  # that a Subset takes some samples of
    found = getattr(dataset, "classes", None)
    if not isinstance(found, list | tuple) or not found:
        return None
    names = [", ".join(map(str, name)) if isinstance(name, tuple | list) else str(name) for name in found]
    return unique_names(names)


def _folder_samples(dataset: Any) -> list[tuple[str, Any]] | None:
    """(path, label) of each sample, where the `__getitem__` of torchvision's DatasetFolder gives that label.

    Of the folder, or of a torch Subset of it; None for anything else.
    """
    getter, found = getattr(type(dataset), "__getitem__", None), None
    if _is_from(getter, "torch.utils.data.dataset") and hasattr(dataset, "indices"):
        whole = _folder_samples(dataset.dataset)
        with suppress(IndexError, TypeError):  # a sample that is not there is rejected when it is read
            found = whole and [whole[index] for index in dataset.indices]
    elif _is_from(getter, "torchvision.datasets.folder") and dataset.target_transform is None:
        found = dataset.samples
    return found if isinstance(found, list) and len(found) == len(dataset) else None


def _is_from(function: Any, module: str) -> bool:
    """Whether its code is in that module; `functools.wraps` may have set its `__module__` to another one."""
    return getattr(function, "__globals__", {}).get("__name__") == module


def _gives_files(dataset: Any) -> bool:
    """Whether the pictures of a folder dataset are its files as they are."""
    return (
        _is_from(getattr(dataset, "loader", None), "torchvision.datasets.folder")
        and getattr(dataset, "transform", None) is getattr(dataset, "transforms", None) is None
        and isinstance(getattr(dataset, "root", None), str | os.PathLike)
    )


def _within(root: str, path: str) -> str:
    relative = os.path.relpath(path, root)
    return os.path.abspath(path) if relative.startswith("..") else relative.replace(os.sep, "/")


def _is_tensor(value: Any) -> bool:
    """Whether `value` is what torch calls a tensor."""
    return all(hasattr(value, name) for name in ("detach", "cpu", "numpy", "shape"))


def _reason_of(error: Exception) -> str:
    """The text of an error of other people's code, on one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:200]}" if text else name


def _is_hf(dataset: Any) -> bool:
    """Whether it is a dataset of that library, with columns; a streamed one is none."""
    return all(hasattr(dataset, name) for name in ("features", "select_columns", "with_format", "__len__"))


def _load_saved(folder: str) -> Any:
    """What `save_to_disk` wrote to `folder`: a dataset, or a mapping of splits to datasets.

    Raises:
        MissingDependencyError: the library is not installed.
        SourceError: there is no such dataset, or it is damaged.
    """
    if not os.path.isdir(folder):
        raise SourceError(f"{folder}: no such folder; expected one that datasets' save_to_disk wrote")
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"{PREFIX}{folder}: needs the extra 'hf'; install it with: {install_extra('hf')}"
        ) from error
    try:
        loaded = datasets.load_from_disk(folder)
        for one in loaded.values() if isinstance(loaded, Mapping) else [loaded]:
            one.data.validate(full=True)  # offsets that point elsewhere would end the process
    except Exception as error:  # of many libraries
        raise SourceError(
            f"{folder}: not what save_to_disk wrote, or damaged ({_reason_of(error)}); save it again"
        ) from error
    return loaded


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image" and hasattr(feature, "decode")


def _feature_names(feature: Any) -> tuple[str, ...] | None:
    """The class names of a ClassLabel, or of a list of them."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return unique_names(list(map(str, names))) if names else None
