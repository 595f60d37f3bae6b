"""Datasets with `__len__` and `__getitem__` as rows; those of torchvision's folders are read as files.

A sample is a tuple (picture, label), a mapping, or a picture alone; `precache.sources.picture_values` lists
what a picture may be. Labels are found without decoding pictures if possible. The attribute `targets` is not
used, since `__getitem__` may return other labels.

    torchvision's ImageFolder, DatasetFolder     paths and labels are in `samples`; if the dataset has no
                                                 transform, its files are converted
    a torch Subset of one of these               labels are in the `samples` of the dataset
    all others                                   every sample is read once, for its label and its fields

The path of a sample is that of its file, or else its row in 8 digits.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from precache.errors import ImageError, SourceError
from precache.pictures.reading import read_with_retries
from precache.reporting import warn
from precache.sources.labels import unique_names
from precache.sources.picture_values import is_tensor, reason_of
from precache.sources.rows import Row, StoredPictures, TableColumn

_MAX_UNREADABLE = 16  # how many of the first samples may fail until the dataset counts as broken
_PROBED_SAMPLES = 8  # samples that are read for the names of their parts
_PAIR = ("image", "label")
"""Names of the columns of a dataset whose samples are tuples."""


@dataclass(frozen=True, slots=True)
class FolderReader:
    """Reader of the files of a torchvision folder dataset without transforms, see `RowReader`.

    Attributes:
        samples: path and label of each sample.
    """

    dataset: Any
    name: str
    samples: Sequence[tuple[str, Any]]

    counts_lines = False
    is_text = False

    def columns(self) -> list[TableColumn]:
        return [TableColumn("image"), TableColumn("label", _class_names(self.dataset))]

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        for number, (path, label) in enumerate(self.samples):
            values = {"image": _path_in(self.folder, path), "label": label}
            yield Row(number, [values[name] for name in names])

    @property
    def folder(self) -> str:
        """Root folder of the dataset."""
        folder: str = os.fspath(self.dataset.root)
        return folder


@dataclass(frozen=True, slots=True)
class DatasetReader:
    """Reader of the samples of any dataset, see `RowReader`.

    Attributes:
        labels: label of each sample; None if every sample must be read for it.
    """

    dataset: Any
    name: str
    labels: Sequence[Any] | None = None

    counts_lines = False
    is_text = False

    def columns(self) -> list[TableColumn]:
        """Return a column for each part of the samples; any of them may hold the pictures."""
        sample = _typical_sample(self.dataset, self.name, len(self.dataset))
        names = list(sample) if _has_names(sample) else list(_PAIR[: len(_tuple_parts(sample))])
        if not names:
            raise SourceError("its samples are empty; expected (picture, label)", path=self.name)
        classes = _class_names(self.dataset)
        return [TableColumn(name, classes, partial(self._open_pictures, name)) for name in names]

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """Yield the rows; one that cannot be read has the values of another one, and is marked so."""
        if not names:
            for number in range(len(self.dataset)):
                yield Row(number, ())
        elif self.labels is not None and list(names) == ["label"]:
            for number, label in enumerate(self.labels):
                yield Row(number, [label])
        else:
            warn(
                f"{self.name}: every sample is read for its label; ImageFolder and Hugging Face datasets "
                f"need not be"
            )
            values_of_rows = [self._read_values(row, names) for row in range(len(self.dataset))]
            readable = [values for values in values_of_rows if values is not None]
            if not readable:
                raise SourceError(
                    f"none of its {len(values_of_rows):,} samples can be read",
                    path=self.name,
                    remedy="repair it",
                )
            for number, values in enumerate(values_of_rows):
                if values is None:
                    yield Row(number, readable[0], unread=True)
                else:
                    yield Row(number, values)

    def _open_pictures(self, column: str) -> StoredPictures:
        return StoredPictures(partial(read_picture_value, self.dataset, self.name, column))

    def _read_values(self, row: int, names: Sequence[str]) -> list[Any] | None:
        """Return the values of one sample; None if it cannot be read."""
        try:
            sample = _read_sample(self.dataset, self.name, row)
            return [_python_value(_part(sample, name)) for name in names]
        except ImageError:
            return None
        except ValueError as error:
            raise SourceError(f"{error}, as other samples have", path=f"{self.name}: row {row}") from error


def open_dataset_reader(dataset: Any, name: str) -> FolderReader | DatasetReader:
    """Return the reader of a dataset; `name` is its name in messages."""
    samples = _folder_samples(dataset)
    if samples is None:
        return DatasetReader(dataset, name)
    if _returns_files(dataset):
        return FolderReader(dataset, name, samples)
    return DatasetReader(dataset, name, [label for _, label in samples])


def _part(sample: Any, name: str) -> Any:
    """Return the part of a sample with this name; ValueError with a phrase if there is none."""
    sample = _plain_sample(sample)
    if _has_names(sample):
        with suppress(KeyError, IndexError, TypeError):
            return sample[name]
    elif name in _PAIR:
        parts, position = _tuple_parts(sample), _PAIR.index(name)
        if position < len(parts):
            return parts[position]
    raise ValueError(f"has no {name!r}")


def _plain_sample(sample: Any) -> Any:
    """Return a named tuple as a mapping, a list as a tuple, and any other sample as it is."""
    if hasattr(sample, "_asdict"):
        return sample._asdict()
    return tuple(sample) if isinstance(sample, list) else sample


def _has_names(sample: Any) -> bool:
    """Return whether a sample is a mapping of names to parts, not an encoded picture of Hugging Face."""
    return isinstance(sample, Mapping) and not {"bytes", "path"} >= set(sample)


def _tuple_parts(sample: Any) -> tuple[Any, ...]:
    """Return the parts of a sample without names; a sample that is no tuple is a picture alone."""
    return sample if isinstance(sample, tuple) else (sample,)


def _typical_sample(dataset: Any, name: str, count: int) -> Any:
    """Return the first readable sample, completed by keys, or a label, that only other samples have."""
    typical = _plain_sample(_first_sample(dataset, name, count))
    for row in sorted({round(position) for position in np.linspace(0, count - 1, _PROBED_SAMPLES)}):
        with suppress(ImageError):
            sample = _plain_sample(_read_sample(dataset, name, row))
            if isinstance(typical, Mapping) and isinstance(sample, Mapping):
                typical = {**sample, **typical}
            elif isinstance(typical, tuple) and isinstance(sample, tuple) and len(sample) > len(typical):
                typical = sample
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


def read_picture_value(dataset: Any, name: str, column: str, row: int) -> Any:
    """Return the value of a sample in the column of pictures; raises as `StoredPictures.read` does."""
    try:
        return _part(_read_sample(dataset, name, row), column)
    except ValueError as error:
        raise ImageError(f"{name}: row {row}", str(error)) from error


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


def _returns_files(dataset: Any) -> bool:
    """Return whether a folder dataset returns its files' pictures without a transform."""
    return (
        _is_defined_in(getattr(dataset, "loader", None), "torchvision.datasets.folder")
        and getattr(dataset, "transform", None) is None
        and getattr(dataset, "transforms", None) is None
        and isinstance(getattr(dataset, "root", None), str | os.PathLike)
    )


def _path_in(root: str, path: str) -> str:
    """Return `path` relative to `root`, with slashes; an absolute path if it lies outside."""
    relative = os.path.relpath(path, root)
    return os.path.abspath(path) if relative.startswith("..") else relative.replace(os.sep, "/")
