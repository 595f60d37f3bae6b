"""What somebody's dataset says of its samples, listed without decoding pictures where that can be.

    torchvision's ImageFolder, DatasetFolder     paths and labels are in `samples`; without a transform, the
                                                 files are read in place of the samples
    a torch Subset of one of these               labels are in its `samples`
    all others                                   every sample is read once, for its label and its fields

`targets` are not believed: a sample may say something else. Samples are tuples (picture, label), mappings, or
pictures alone.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from precache.errors import ImageError, SettingError, SourceError
from precache.pictures.reading import steadily
from precache.sources.options import SourceOptions, find_label
from precache.sources.pictures import is_tensor, reason_of

IMAGE_KEYS = ("image", "img", "picture", "path", "file")
LABEL_KEY = "label"
_TRIED = 16  # samples, until one can be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The samples of one dataset, in its order.

    Attributes:
        name: what messages call it.
        count: of samples.
        read: `(row, path) -> picture`, as `precache.sources.pictures` knows them; pickled for workers.
        classes: names that integer labels index; None: labels speak for themselves.
        labels: one each, or None.
        splits: names of splits, one each, or None.
        fields: what else is kept, by name, one value each.
        files: the files of the pictures, relative to `folder`; else None.
        folder: see `files`.
        unread: rows of which nothing but their number is known, for they could not be read.
        warnings: as of `Scan`.
    """

    name: str
    count: int
    read: Callable[[int, str], Any]
    classes: tuple[str, ...] | None = None
    labels: Sequence[Any] | None = None
    splits: Sequence[Any] | None = None
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    files: Sequence[str] | None = None
    folder: str = ""
    unread: frozenset[int] = frozenset()
    warnings: tuple[str, ...] = ()


def name_of(dataset: Any) -> str:
    """What messages call a dataset: its class."""
    kind = type(dataset)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def list_samples(dataset: Any, name: str, options: SourceOptions) -> Listing:
    """The samples of anything with `__len__` and `__getitem__` that messages call `name`.

    Raises:
        SettingError: an option names what its samples do not have.
        SourceError: it has no samples, or none can be read.
    """
    count = len(dataset)
    if not count:
        raise SourceError(f"{name}: has no samples; expected one for each picture")
    samples = _folder_samples(dataset)
    if samples is not None and _gives_files(dataset):
        options.only("a folder dataset, whose samples are files and classes", "target")
        return _list_files(dataset, name, samples)
    keys = _Keys.of(_first_sample(dataset, name, count), name, options)
    read = partial(_read_picture, dataset, name, keys)
    notes = (f"{name}: {keys.note}",) if keys.note else ()
    every = Listing(name=name, count=count, read=read, classes=_class_names(dataset), warnings=notes)
    if keys.label is None and keys.split is None and not keys.fields:
        return every
    if samples is not None:
        return replace(every, labels=[label for _, label in samples])
    return _read_all(dataset, keys, every)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where samples have what; a key of a mapping, an index of a tuple, or None: they have it not.

    Attributes:
        image: None: the sample itself is the picture.
        note: what is to be said of the label; a phrase.
    """

    image: Any = None
    label: Any = None
    split: str | None = None
    fields: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def of(cls, sample: Any, name: str, options: SourceOptions) -> "_Keys":
        options.only("a dataset", "image", "label", "target", "separator", "split", "fields")
        asked = (options.image, options.label, options.split, *options.fields)
        named = [key for key in asked if key is not None]
        sample = _plain(sample)
        if isinstance(sample, Mapping) and not {"bytes", "path"} >= set(sample):
            for key in named:
                if key not in sample:
                    raise SettingError(f"{name}: its samples have no {key!r}; have {_listed(sample)}")
            image = options.image or _image_key(sample, name)
            taken = (image, options.split, *options.fields)
            label, note = find_label(name, list(sample), options, taken, LABEL_KEY)
            return cls(image, label, options.split, options.fields, note)
        if named:
            are = "tuples (picture, label)" if isinstance(sample, tuple) else "pictures alone"
            raise SettingError(
                f"{name}: its samples are {are}, in which nothing is named {named[0]!r}; leave that out"
            )
        if not isinstance(sample, tuple):
            return cls()
        if not sample:
            raise SourceError(f"{name}: its samples are empty; expected (picture, label)")
        return cls(0, 1 if len(sample) > 1 and options.target != "none" else None)

    def get(self, sample: Any, key: Any) -> Any:
        sample = _plain(sample)
        if key is None:
            return sample
        try:
            return sample[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"has no {key!r}" if isinstance(key, str) else "is no tuple of two") from error


def _plain(sample: Any) -> Any:
    """A named tuple as a mapping, a list of picture and label as a tuple."""
    if hasattr(sample, "_asdict"):
        return sample._asdict()
    return tuple(sample) if isinstance(sample, list) else sample


def _image_key(sample: Mapping[str, Any], name: str) -> str:
    found = [key for key in IMAGE_KEYS if key in sample]
    if len(found) != 1:
        raise SettingError(
            f"{name}: {'several keys' if found else 'no key'} of its samples may be the picture; say which "
            f"with image=; there are {_listed(sample)}"
        )
    return found[0]


def _listed(keys: Mapping[Any, Any]) -> str:
    return ", ".join(repr(key) for key in list(keys)[:20]) or "none"


def _first_sample(dataset: Any, name: str, count: int) -> Any:
    """The first one that can be read, of a few."""
    errors = []
    for row in range(min(count, _TRIED)):
        try:
            return read_sample(dataset, name, row)
        except ImageError as error:
            errors.append(error)
    raise SourceError(f"{errors[0]}, nor can {len(errors) - 1} after it; repair the dataset")


def read_sample(dataset: Any, name: str, row: int) -> Any:
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
        except Exception as error:  # whatever somebody else's code raises
            raise ImageError(where, f"cannot be read ({reason_of(error)})") from error

    return steadily(act, where)


def _read_picture(dataset: Any, name: str, keys: _Keys, row: int, path: str) -> Any:
    try:
        return keys.get(read_sample(dataset, name, row), keys.image)
    except ValueError as error:
        raise ImageError(f"{name}: row {row}", str(error)) from error


def _read_all(dataset: Any, keys: _Keys, every: Listing) -> Listing:
    """Every sample, read for all but its picture; what an unread one would have, the first read one has."""
    wanted = [key for key in (keys.label, keys.split, *keys.fields) if key is not None]
    rows: list[list[Any] | None] = []
    for row in range(every.count):
        try:
            sample = read_sample(dataset, every.name, row)
            rows.append([python_value(keys.get(sample, key)) for key in wanted])
        except ImageError:
            rows.append(None)
        except ValueError as error:
            raise SourceError(f"{every.name}: row {row}: {error}, as the first sample has") from error
    filler = next(values for values in rows if values is not None)
    columns = {key: [(filler if row is None else row)[at] for row in rows] for at, key in enumerate(wanted)}
    read = f"{every.name}: all its samples were read for their labels; ImageFolder and Hugging Face's are not"
    return replace(
        every,
        labels=columns.get(keys.label),
        splits=columns.get(keys.split),
        fields={name: columns[name] for name in keys.fields},
        unread=frozenset(row for row, values in enumerate(rows) if values is None),
        warnings=(*every.warnings, read),
    )


def python_value(value: Any) -> Any:
    """Arrays and tensors as Python's numbers and lists."""
    if is_tensor(value):
        value = value.detach().cpu()
    return value.tolist() if hasattr(value, "tolist") else value


def _class_names(dataset: Any) -> tuple[str, ...] | None:
    """Its `classes`; names that several have get their number, synonyms are joined."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset  # that a Subset takes some samples of
    found = getattr(dataset, "classes", None)
    if not isinstance(found, list | tuple) or not found:
        return None
    names = [", ".join(map(str, name)) if isinstance(name, tuple | list) else str(name) for name in found]
    return unique_names(names)


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """`names`, those that are there twice with their index behind them: ImageNet has two cranes."""
    times = Counter(names)
    return tuple(f"{name} {index}" if times[name] > 1 else name for index, name in enumerate(names))


def _folder_samples(dataset: Any) -> list[tuple[str, Any]] | None:
    """(path, label) of each sample, where the `__getitem__` of torchvision's DatasetFolder gives that label.

    Of the folder, or of a torch Subset of it; None for anything else.
    """
    getter, found = getattr(type(dataset), "__getitem__", None), None
    if _is_from(getter, "torch.utils.data.dataset") and hasattr(dataset, "indices"):
        whole = _folder_samples(dataset.dataset)
        with suppress(IndexError, TypeError):  # a sample that it has not is a reject when it is read
            found = whole and [whole[index] for index in dataset.indices]
    elif _is_from(getter, "torchvision.datasets.folder") and dataset.target_transform is None:
        found = dataset.samples
    return found if isinstance(found, list) and len(found) == len(dataset) else None


def _is_from(function: Any, module: str) -> bool:
    """Whether it is written there; its `__module__` is that of another where `functools.wraps` has set it."""
    return getattr(function, "__globals__", {}).get("__name__") == module


def _gives_files(dataset: Any) -> bool:
    """Whether the pictures of a folder dataset are its files as they are."""
    return (
        _is_from(getattr(dataset, "loader", None), "torchvision.datasets.folder")
        and getattr(dataset, "transform", None) is getattr(dataset, "transforms", None) is None
        and isinstance(getattr(dataset, "root", None), str | os.PathLike)
    )


def _list_files(dataset: Any, name: str, samples: Sequence[tuple[str, Any]]) -> Listing:
    root = os.fspath(dataset.root)
    files = [_within(root, path) for path, _ in samples]
    classes = _class_names(dataset)
    return Listing(
        name=name,
        count=len(files),
        read=_read_file,
        classes=classes,
        labels=[label for _, label in samples],
        files=files,
        folder=root,
    )


def _within(root: str, path: str) -> str:
    relative = os.path.relpath(path, root)
    return os.path.abspath(path) if relative.startswith("..") else relative.replace(os.sep, "/")


def _read_file(row: int, path: str) -> str:
    return path
