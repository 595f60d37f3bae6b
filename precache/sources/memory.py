"""Datasets in memory as a source: anything with `__len__` and `__getitem__`, or a mapping of splits to these.

    torchvision's ImageFolder, DatasetFolder     paths and labels are in `samples`; if the dataset has no
                                                 transform, its files are converted
    a torch Subset of one of these               labels are in the `samples` of the dataset
    a dataset of Hugging Face's library          columns are read at once; pictures stay encoded
    all others                                   every sample is read once, for its label and its fields

A sample is a tuple (picture, label), a mapping, or a picture alone. A picture may be:

    str, path                     the file of that name
    bytes                         an encoded picture
    {"bytes": ..., "path": ...}   either of these, as Hugging Face's library stores pictures
    Pillow image                  used as it is
    array                         uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4]
    tensor                        the same, or [1, h, w], [3, h, w] or [4, h, w]

The attribute `targets` is not used, since `__getitem__` may return other labels. Tensors are recognized by
their methods, so that torch need not be imported. The path of a sample is that of its file, or else its row
in 8 digits.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from precache.errors import ImageError, SettingError, SourceError
from precache.pictures.pillow import TooLargeError
from precache.pictures.reading import check_bytes, read_picture, read_with_retries, status_of
from precache.recipe import SPLIT_NAME
from precache.reporting import warn
from precache.sources.options import DATASET, SourceOptions
from precache.sources.table import RowBatch, Rows, RowSource, StoredPictures
from precache.sources.targets import ColumnInfo, unique_names

_MAX_UNREADABLE = 16  # how many of the first samples may fail until the dataset counts as broken
_PROBED_SAMPLES = 8  # samples that are read for the names of their parts
_CHANNELS = (1, 3, 4)
_EXPECTED = "expected a path, encoded bytes, a Pillow image, or a uint8 array or tensor"
_PAIR = ("image", "label")
"""Names of the columns of a dataset whose samples are tuples."""


def open_dataset(dataset: Any, options: SourceOptions) -> RowSource:
    """Open a dataset in memory, or a mapping of split names to datasets.

    Raises:
        SettingError: `dataset` is not a dataset, or a split's name is not valid.
        SourceError: a dataset has no samples.
    """
    options.check_kind(DATASET)
    has_splits = isinstance(dataset, Mapping) and all(isinstance(name, str) for name in dataset)
    datasets = dict(dataset) if has_splits else {"": dataset}
    if not datasets:
        raise SettingError(
            "a mapping without splits is not a source; expected one such as {'train': dataset}"
        )
    for split_dataset in datasets.values():
        has_rows = hasattr(split_dataset, "__len__") and hasattr(split_dataset, "__getitem__")
        if isinstance(split_dataset, type) or not has_rows:
            expected = "expected a path, or a dataset with __len__ and __getitem__"
            raise SettingError(f"{type(split_dataset).__name__} is not a source; {expected}")
    first_class = type(next(iter(datasets.values())))
    root = Path(f"{first_class.__module__.partition('.')[0]}.{first_class.__name__}")
    parts: list[Callable[[], Rows]] = []
    paths: list[Path] = []
    for split, split_dataset in datasets.items():
        check_split(split, root, options)
        name = f"{root}, split {split}" if split else str(root)
        if not len(split_dataset):
            raise SourceError("has no samples; expected one for each picture", path=name)
        parts.append(partial(open_rows, split_dataset, name, split))
        if _has_files(split_dataset):
            paths.append(Path(split_dataset.root))
    return RowSource(root, tuple(paths), tuple(parts), options)


def check_split(split: str, root: Path, options: SourceOptions) -> None:
    """Raise SettingError if a source cannot have this split; "" is none."""
    if split and not SPLIT_NAME.fullmatch(split):
        raise SettingError(
            f"{split!r} is not a valid split name", path=root, remedy="write letters and digits, as in train"
        )
    if split and options.split is not None:
        raise SettingError("has splits already", path=root, remedy=f"leave out split={options.split!r}")


def open_rows(dataset: Any, name: str, split: str) -> Rows:
    """Open one dataset as the kind that it is; `name` is its name in messages."""
    if all(hasattr(dataset, attribute) for attribute in ("features", "select_columns", "with_format")):
        return _open_hugging_face(dataset, name, split)
    if _has_files(dataset):
        return _open_files(dataset, name, split)
    return _open_samples(dataset, name, split)


def _open_files(dataset: Any, name: str, split: str) -> Rows:
    """Open a dataset whose samples are files in its folder."""
    samples, folder = _folder_samples(dataset) or [], os.fspath(dataset.root)
    columns = {
        "image": [_path_in(folder, path) for path, _ in samples],
        "label": [label for _, label in samples],
    }
    return Rows(
        name,
        [ColumnInfo("image"), ColumnInfo("label", _class_names(dataset))],
        lambda wanted: [RowBatch(columns, len(samples))],
        folder=folder,
        split=split,
        prefix=f"{split}/" if split else "",
        is_dataset=True,
    )


def _open_hugging_face(dataset: Any, name: str, split: str) -> Rows:
    """Open a dataset of Hugging Face's library, which maps its files.

    Pictures are in columns of `Image`, or may be in any if there is none.
    """
    features = dict(dataset.features or {})
    images = [column for column, feature in features.items() if _is_image(feature)]

    def read(wanted: Sequence[str]) -> Iterator[RowBatch]:
        if not wanted:
            yield RowBatch({}, len(dataset))
            return
        try:
            table = dataset.select_columns(list(wanted)).with_format("arrow")[:]
        except Exception as error:  # the library and those it uses raise nearly anything
            raise SourceError(
                f"columns {list(wanted)} cannot be read ({reason_of(error)})", path=name
            ) from error
        yield RowBatch({column: table.column(column).to_pylist() for column in wanted}, len(dataset))

    def open_pictures(column: str) -> StoredPictures:
        if (dataset.format or {}).get("type") == "custom":
            warn(f"{name}: its transform is left out: pictures are converted as they are stored")
        pictures = dataset.with_format(None).select_columns([column])
        if _is_image(features[column]):
            pictures = pictures.cast_column(column, type(features[column])(decode=False))
        return _DatasetPictures(pictures, name, column)

    columns = [
        ColumnInfo(column, _feature_classes(feature), column in images or not images)
        for column, feature in features.items()
    ]
    return Rows(name, columns, read, open_pictures, split=split, is_dataset=True)


def _open_samples(dataset: Any, name: str, split: str) -> Rows:
    """Open any dataset: a column for each part of its samples, any of which may hold the pictures."""
    count, files = len(dataset), _folder_samples(dataset)
    names = list(_typical_parts(dataset, name, count))
    if not names:
        raise SourceError("its samples are empty; expected (picture, label)", path=name)

    def read(wanted: Sequence[str]) -> Iterator[RowBatch]:
        if not wanted:
            yield RowBatch({}, count)
            return
        if files is not None and list(wanted) == ["label"]:
            yield RowBatch({"label": [label for _, label in files]}, count)
            return
        warn(f"{name}: every sample is read for its label; ImageFolder and Hugging Face datasets need not be")
        rows = [_read_values(dataset, name, row, wanted) for row in range(count)]
        unread = [row for row, values in enumerate(rows) if values is None]
        if len(unread) == count:
            raise SourceError(f"none of its {count:,} samples can be read", path=name, remedy="repair it")
        example = next(values for values in rows if values is not None)
        columns = zip(*(values or example for values in rows), strict=True)
        yield RowBatch(dict(zip(wanted, columns, strict=True)), count, unread=unread)

    classes = _class_names(dataset)
    columns = [ColumnInfo(column, classes, True) for column in names]
    open_pictures = partial(_DatasetPictures, dataset, name)
    return Rows(name, columns, read, open_pictures, split=split, is_dataset=True)


def _read_values(dataset: Any, name: str, row: int, columns: Sequence[str]) -> list[Any] | None:
    """Return the values of one sample; None if it cannot be read."""
    try:
        sample = _read_sample(dataset, name, row)
        return [_python_value(_part(sample, column)) for column in columns]
    except ImageError:
        return None
    except ValueError as error:
        raise SourceError(f"{error}, as other samples have", path=f"{name}: row {row}") from error


@dataclass(frozen=True, slots=True)
class _DatasetPictures:
    """Pictures that a dataset returns, see `StoredPictures`."""

    dataset: Any
    name: str
    column: str

    sizes = None

    def read(self, part_row: int, where: str, max_pixels: int) -> bytes | Image.Image:
        try:
            value = _part(_read_sample(self.dataset, self.name, part_row), self.column)
        except ValueError as error:
            raise ImageError(where, str(error)) from error
        return to_picture(value, where, max_pixels)


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image" and hasattr(feature, "decode")


def _feature_classes(feature: Any) -> tuple[str, ...] | None:
    """Return the names of a ClassLabel, or of a list of them; None for any other feature."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return unique_names(list(map(str, names))) if names else None


def _parts_of(sample: Any) -> Mapping[str, Any]:
    """Return the parts of a sample by their names; one that is no mapping or tuple is a picture alone."""
    if hasattr(sample, "_asdict"):  # a named tuple
        sample = sample._asdict()
    if isinstance(sample, Mapping) and not {"bytes", "path"} >= set(sample):  # not an encoded picture
        return sample
    parts = sample if isinstance(sample, tuple | list) else (sample,)
    return dict(zip(_PAIR, parts, strict=False))


def _part(sample: Any, name: str) -> Any:
    """Return the part of a sample with this name; ValueError with a phrase if there is none."""
    with suppress(KeyError, IndexError, TypeError):
        return _parts_of(sample)[name]
    raise ValueError(f"has no {name!r}")


def _typical_parts(dataset: Any, name: str, count: int) -> Mapping[str, Any]:
    """Return the parts of the first readable sample, and those that only other samples have."""
    typical = _parts_of(_first_sample(dataset, name, count))
    for row in sorted({round(position) for position in np.linspace(0, count - 1, _PROBED_SAMPLES)}):
        with suppress(ImageError):
            typical = {**_parts_of(_read_sample(dataset, name, row)), **typical}
    return typical


def _first_sample(dataset: Any, name: str, count: int) -> Any:
    """Return the first readable sample; SourceError if it is not among the first few."""
    errors = []
    for row in range(min(count, _MAX_UNREADABLE)):
        try:
            return _read_sample(dataset, name, row)
        except ImageError as error:
            errors.append(error)
    raise SourceError(
        f"{errors[0].reason}, nor can the {len(errors) - 1} after it",
        path=errors[0].path,
        remedy="repair the dataset",
    )


def _read_sample(dataset: Any, name: str, row: int) -> Any:
    """Return `dataset[row]`.

    Raises:
        ImageError: the dataset raises an error; this one names the row.
        SourceError: memory, a disk or a network fails.
    """
    where = f"{name}: row {row}"

    def get_row() -> Any:
        try:
            return dataset[row]
        except MemoryError as error:
            raise SourceError(
                "not enough memory to read it", path=where, remedy="use fewer --workers"
            ) from error
        except OSError as error:
            if error.errno is not None and not isinstance(error, FileNotFoundError | IsADirectoryError):
                raise
            raise ImageError(where, f"cannot be read ({reason_of(error)})") from error
        except Exception as error:  # other people's code may raise anything
            raise ImageError(where, f"cannot be read ({reason_of(error)})") from error

    return read_with_retries(get_row, where)


def _python_value(value: Any) -> Any:
    """Return arrays and tensors as Python's numbers and lists, other values as they are."""
    if is_tensor(value):
        value = value.detach().cpu()
    return value.tolist() if hasattr(value, "tolist") else value


def _class_names(dataset: Any) -> tuple[str, ...] | None:
    """Return the dataset's `classes`, with synonyms joined and an index behind each repeated name."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset  # the whole dataset of a Subset
    classes = getattr(dataset, "classes", None)
    if not isinstance(classes, list | tuple) or not classes:
        return None
    names = [", ".join(map(str, name)) if isinstance(name, tuple | list) else str(name) for name in classes]
    return unique_names(names)


def _folder_samples(dataset: Any) -> list[tuple[str, Any]] | None:
    """Return path and label of each sample of a torchvision DatasetFolder, or of a torch Subset of one.

    None for any other dataset, also for a subclass whose own `__getitem__` may return other labels.
    """
    getter = getattr(type(dataset), "__getitem__", None)
    samples = None
    if _is_defined_in(getter, "torch.utils.data.dataset") and hasattr(dataset, "indices"):
        all_samples = _folder_samples(dataset.dataset)
        if all_samples is not None:
            with suppress(IndexError, TypeError):  # an index that does not exist is rejected when it is read
                samples = [all_samples[index] for index in dataset.indices]
    elif _is_defined_in(getter, "torchvision.datasets.folder") and dataset.target_transform is None:
        samples = dataset.samples
    return samples if isinstance(samples, list) and len(samples) == len(dataset) else None


def _is_defined_in(function: Any, module: str) -> bool:
    """Return whether the code of `function` is in this module; `functools.wraps` copies `__module__`."""
    return getattr(function, "__globals__", {}).get("__name__") == module


def _has_files(dataset: Any) -> bool:
    """Return whether the samples are pictures in files, which the dataset returns without a transform."""
    return (
        _folder_samples(dataset) is not None
        and _is_defined_in(getattr(dataset, "loader", None), "torchvision.datasets.folder")
        and getattr(dataset, "transform", None) is None
        and getattr(dataset, "transforms", None) is None
        and isinstance(getattr(dataset, "root", None), str | os.PathLike)
    )


def _path_in(root: str, path: str) -> str:
    """Return `path` relative to `root`, with slashes; an absolute path if it lies outside."""
    relative = os.path.relpath(path, root)
    return os.path.abspath(path) if relative.startswith("..") else relative.replace(os.sep, "/")


def to_picture(value: Any, where: str, max_pixels: int) -> bytes | Image.Image:
    """Return the picture in `value`, as `Source.read` returns it.

    Args:
        where: name of the row in messages.

    Raises:
        ImageError: `value` is not a picture.
        SourceError: `value` names a file that cannot be read now.
    """
    if isinstance(value, Mapping):
        content = value.get("bytes")
        value = value.get("path") if content is None else content
    if isinstance(value, str | os.PathLike):
        return _read_file(value, where, max_pixels)
    if isinstance(value, bytes | bytearray | memoryview):
        check_bytes(where, len(value), max_pixels)
        return bytes(value)
    if isinstance(value, Image.Image):
        return _load(value, where, max_pixels)
    if is_tensor(value):
        return _image_from_array(_channels_last(value.detach().cpu().numpy()), where)
    if isinstance(value, np.ndarray):
        return _image_from_array(value, where)
    reason = f"has {type(value).__name__} {value!r:.60}, not a picture"
    if value is None:
        reason = "has no picture"
    raise ImageError(where, f"{reason}; {_EXPECTED}")


def _read_file(path: str | os.PathLike[str], where: str, max_pixels: int) -> bytes:
    name = os.fsdecode(path)
    if status_of(name) is None:
        raise ImageError(where, f"its picture {name!r:.200} is not a file")
    return read_picture(name, max_pixels)


def _load(image: Image.Image, where: str, max_pixels: int) -> Image.Image:
    """Decode the pixels of an image, which Pillow does not do when it opens a file, and return it."""
    if math.prod(image.size) > max_pixels:
        raise ImageError(where, str(TooLargeError(*image.size, max_pixels)))
    try:
        image.load()
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        raise ImageError(where, f"cannot be decoded ({reason_of(error)})") from error
    return image


def _channels_last(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Move the channels of a tensor to the end; a shape that may be either is torch's, channels first."""
    return np.moveaxis(array, 0, -1) if array.ndim == 3 and array.shape[0] in _CHANNELS else array


def _image_from_array(array: npt.NDArray[Any], where: str) -> Image.Image:
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS)
    if array.dtype != np.uint8 or not fits or not array.size:
        raise ImageError(
            where,
            f"is {array.dtype} {[*array.shape]}; expected uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4], "
            f"or a tensor with the channels first",
            remedy="leave out the transform that changes it",
        )
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def is_tensor(value: Any) -> bool:
    """Return whether `value` has the methods of a torch tensor."""
    return all(hasattr(value, name) for name in ("detach", "cpu", "numpy", "shape"))


def reason_of(error: Exception) -> str:
    """Return type and message of an exception of other libraries, or of a user's code, on one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:200]}" if text else name
