"""A user's dataset, anything with `__len__` and `__getitem__`, as rows; torchvision's folders are files.

A sample is a tuple (picture, label), a mapping, or a picture alone; see `precache.sources.picture_values` for
what a picture may be. Samples are listed without decoding pictures where that is possible; `targets` are not
believed: a sample may say something else.

    torchvision's ImageFolder, DatasetFolder     paths and labels are in `samples`; without a transform, the
                                                 files are read in place of the samples
    a torch Subset of one of these               labels are in its `samples`
    all others                                   every sample is read once, for its label and its fields

A sample's path is that of its file, if it has one, else its row in 8 digits.
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

_TRIED = 16  # samples, until one can be read
_PROBED = 8  # samples that are looked at for the names of their parts
_PAIR = ("image", "label")
"""What the parts of a sample that have no names are called."""


@dataclass(frozen=True, slots=True)
class FolderReader:
    """The files of a torchvision dataset of folders that gives them as they are.

    Attributes:
        samples: path and label of each.
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
            values = {"image": _within(self.folder, path), "label": label}
            yield Row(number, [values[name] for name in names])

    @property
    def folder(self) -> str:
        """The folder that it reads."""
        folder: str = os.fspath(self.dataset.root)
        return folder


@dataclass(frozen=True, slots=True)
class DatasetReader:
    """The samples of any dataset.

    Attributes:
        labels: the label of each sample, where that is known; else every sample is read for it.
    """

    dataset: Any
    name: str
    labels: Sequence[Any] | None = None

    counts_lines = False
    is_text = False

    def columns(self) -> list[TableColumn]:
        """The parts of its usual sample; any of them may hold pictures."""
        usual = _usual_sample(self.dataset, self.name, len(self.dataset))
        names = list(usual) if _has_names(usual) else list(_PAIR[: len(_parts_of(usual))])
        if not names:
            raise SourceError(f"{self.name}: its samples are empty; expected (picture, label)")
        classes = _class_names(self.dataset)
        return [TableColumn(name, classes, partial(self._pictures, name)) for name in names]

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """The rows; one that cannot be read gets the values of another one."""
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
            values = [self._values(row, names) for row in range(len(self.dataset))]
            readable = [found for found in values if found is not None]
            if not readable:
                raise SourceError(f"{self.name}: none of its {len(values):,} samples can be read; repair it")
            for number, found in enumerate(values):
                if found is None:
                    yield Row(number, readable[0], unread=True)
                else:
                    yield Row(number, found)

    def _pictures(self, column: str) -> StoredPictures:
        return StoredPictures(partial(read_picture_of, self.dataset, self.name, column))

    def _values(self, row: int, names: Sequence[str]) -> list[Any] | None:
        """The values of one sample; None where it cannot be read."""
        try:
            sample = _read_sample(self.dataset, self.name, row)
            return [_python_value(_value_of(sample, name)) for name in names]
        except ImageError:
            return None
        except ValueError as error:
            raise SourceError(f"{self.name}: row {row}: {error}, as other samples have") from error


def reader_of(dataset: Any, name: str) -> FolderReader | DatasetReader:
    """The reader of a dataset that messages call `name`."""
    samples = _folder_samples(dataset)
    if samples is None:
        return DatasetReader(dataset, name)
    if _gives_files(dataset):
        return FolderReader(dataset, name, samples)
    return DatasetReader(dataset, name, [label for _, label in samples])


def _value_of(sample: Any, name: str) -> Any:
    """The part of a sample that is called so; ValueError, a phrase, where it has none."""
    sample = _plain(sample)
    if _has_names(sample):
        with suppress(KeyError, IndexError, TypeError):
            return sample[name]
    elif name in _PAIR:
        parts, place = _parts_of(sample), _PAIR.index(name)
        if place < len(parts):
            return parts[place]
    raise ValueError(f"has no {name!r}")


def _plain(sample: Any) -> Any:
    """A named tuple as a mapping, a list of picture and label as a tuple."""
    if hasattr(sample, "_asdict"):
        return sample._asdict()
    return tuple(sample) if isinstance(sample, list) else sample


def _has_names(sample: Any) -> bool:
    """Whether it is a mapping of names to parts, and not a picture that Hugging Face has undecoded."""
    return isinstance(sample, Mapping) and not {"bytes", "path"} >= set(sample)


def _parts_of(sample: Any) -> tuple[Any, ...]:
    """The parts of a sample without names: those of a tuple; anything else is the picture alone."""
    return sample if isinstance(sample, tuple) else (sample,)


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
            raise ImageError(where, f"cannot be read ({reason_of(error)})") from error
        except Exception as error:  # other people's code may raise anything
            raise ImageError(where, f"cannot be read ({reason_of(error)})") from error

    return read_with_retries(act, where)


def read_picture_of(dataset: Any, name: str, column: str, row: int) -> Any:
    """What a sample has for its picture; raises as `StoredPictures.read`."""
    try:
        return _value_of(_read_sample(dataset, name, row), column)
    except ValueError as error:
        raise ImageError(f"{name}: row {row}", str(error)) from error


def _python_value(value: Any) -> Any:
    """Arrays and tensors as Python's numbers and lists."""
    if is_tensor(value):
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
