"""What a user's dataset says of its samples, listed without decoding pictures where that is possible.

    torchvision's ImageFolder, DatasetFolder     paths and labels are in `samples`; without a transform, the
                                                 files are read in place of the samples
    a torch Subset of one of these               labels are in its `samples`
    datasets of Hugging Face's library           columns say all but the pictures, which stay undecoded
    all others                                   every sample is read once, for its label and its fields

`targets` are not believed: a sample may say something else. Samples are tuples (picture, label), mappings, or
pictures alone. Hugging Face's library (extra `hf`) is imported for `hf:FOLDER` alone, where `save_to_disk`
has put a dataset; one that is passed brings what is needed.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from precache.errors import ImageError, MissingDependencyError, SettingError, SourceError
from precache.packages import install_extra
from precache.pictures.reading import steadily
from precache.sources.labels import find_label
from precache.sources.options import DATASET, FOLDER_DATASET, SourceOptions

PREFIX = "hf:"
IMAGE_KEYS = ("image", "img", "picture", "path", "file")
LABEL_KEY = "label"
_TRIED = 16  # samples, until one can be read
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The samples of one dataset, in its order.

    Attributes:
        name: its name in messages.
        count: of samples.
        read: `(row, path) -> picture`, as `precache.sources.dataset` knows them; pickled for workers.
        classes: names that integer labels index; None: labels speak for themselves.
        labels: one for each sample, or None.
        splits: names of splits, one for each sample, or None.
        fields: what else is kept, by name, one value for each sample.
        files: the files of the pictures, relative to `folder`; else None.
        folder: see `files`.
        unread: rows of which nothing but their number is known, for they could not be read.
        warnings: see `Scan`.
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
    """The name of a dataset for messages: its class."""
    kind = type(dataset)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def list_samples(dataset: Any, name: str, options: SourceOptions) -> Listing:
    """The samples of anything with `__len__` and `__getitem__` whose name in messages is `name`.

    Raises:
        SettingError: an option names what its samples do not have.
        SourceError: it has no samples, or none can be read.
    """
    count = len(dataset)
    if not count:
        raise SourceError(f"{name}: has no samples; expected one for each picture")
    samples = _folder_samples(dataset)
    if samples is not None and _gives_files(dataset):
        options.only(FOLDER_DATASET)
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
    """Where in a sample each value is: a key of a mapping, an index of a tuple, or None where there is none.

    Attributes:
        image: None: the sample itself is the picture.
        note: a warning about which values are the labels; empty where there is nothing to say.
    """

    image: Any = None
    label: Any = None
    split: str | None = None
    fields: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def of(cls, sample: Any, name: str, options: SourceOptions) -> "_Keys":
        options.only(DATASET)
        asked = (options.image, options.label, options.split, *options.fields)
        named = [key for key in asked if key is not None]
        sample = _plain(sample)
        if isinstance(sample, Mapping) and not {"bytes", "path"} >= set(sample):
            for key in named:
                if key not in sample:
                    raise SettingError(f"{name}: its samples have no {key!r}; they have {_listed(sample)}")
            image = options.image or _image_key(sample, name)
            taken = (image, options.split, *options.fields)
            label, note = find_label(name, list(sample), options, taken, LABEL_KEY)
            return cls(image, label, options.split, options.fields, note)
        if named:
            are = "tuples (picture, label)" if isinstance(sample, tuple) else "pictures alone"
            raise SettingError(
                f"{name}: its samples are {are}, which have no names, got {named[0]!r}; leave it out"
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
            raise ValueError(f"has no {key!r}" if isinstance(key, str) else "is not a pair") from error


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
    """The first readable sample among the first few."""
    errors = []
    for row in range(min(count, _TRIED)):
        try:
            return read_sample(dataset, name, row)
        except ImageError as error:
            errors.append(error)
    raise SourceError(f"{errors[0]}, nor can the {len(errors) - 1} after it; repair the dataset")


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
        except Exception as error:  # other people's code may raise anything
            raise ImageError(where, f"cannot be read ({reason_of(error)})") from error

    return steadily(act, where)


def _read_picture(dataset: Any, name: str, keys: _Keys, row: int, path: str) -> Any:
    try:
        return keys.get(read_sample(dataset, name, row), keys.image)
    except ValueError as error:
        raise ImageError(f"{name}: row {row}", str(error)) from error


def _read_all(dataset: Any, keys: _Keys, every: Listing) -> Listing:
    """Read every sample for its label and fields; one that cannot be read gets those of another."""
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
    others = "ImageFolder and Hugging Face datasets need not be"
    note = f"{every.name}: every sample was read for its label; {others}"
    return replace(
        every,
        labels=columns.get(keys.label),
        splits=columns.get(keys.split),
        fields={name: columns[name] for name in keys.fields},
        unread=frozenset(row for row, values in enumerate(rows) if values is None),
        warnings=(*every.warnings, note),
    )


def python_value(value: Any) -> Any:
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


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """`names`, those that are there twice followed by their index: ImageNet has two cranes."""
    times = Counter(names)
    return tuple(f"{name} {index}" if times[name] > 1 else name for index, name in enumerate(names))


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


def is_tensor(value: Any) -> bool:
    """Whether `value` is what torch calls a tensor."""
    return all(hasattr(value, name) for name in ("detach", "cpu", "numpy", "shape"))


def reason_of(error: Exception) -> str:
    """The text of an error of other people's code, on one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:200]}" if text else name


def is_hf(dataset: Any) -> bool:
    """Whether it is a dataset of that library, with columns; a streamed one is none."""
    return all(hasattr(dataset, name) for name in ("features", "select_columns", "with_format", "__len__"))


def load_saved(folder: str) -> Any:
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
            f"{folder}: not what save_to_disk wrote, or damaged ({reason_of(error)}); save it again"
        ) from error
    return loaded


def list_columns(dataset: Any, name: str, options: SourceOptions) -> Listing:
    """The samples of a dataset whose name in messages is `name`, by its columns; no picture is decoded.

    Raises:
        SettingError: an option names a column that it does not have.
        SourceError: it has no samples, or a column cannot be read.
    """
    options.only(DATASET)
    features = dict(dataset.features or {})
    if not len(dataset):
        raise SourceError(f"{name}: has no samples; expected one for each picture")
    image = _image_column(features, name, options)
    taken = (image, options.split, *options.fields)
    label, note = find_label(name, list(features), options, taken, LABEL_KEY)
    wanted = [key for key in (label, options.split, *options.fields) if key is not None]
    for key in wanted:
        if key not in features:
            raise SettingError(f"{name}: has no column {key!r}; has {_listed(features)}")
    warnings = [f"{name}: {note}"] if note else []
    if (dataset.format or {}).get("type") == "custom":
        warnings.append(f"{name}: its transform is left out: pictures are converted as they are stored")
    plain = dataset.with_format(None)
    columns = _columns(plain, wanted, name)
    return Listing(
        name=name,
        count=len(plain),
        read=_PictureReader(_undecoded(plain, image), image, name),
        classes=None if label is None else _feature_names(features[label]),
        labels=None if label is None else columns[label],
        splits=None if options.split is None else columns[options.split],
        fields={key: columns[key] for key in options.fields},
        warnings=tuple(warnings),
    )


@dataclass(frozen=True, slots=True)
class _PictureReader:
    """Reads one picture, as bytes or as the path of a file."""

    dataset: Any
    column: str
    name: str

    def __call__(self, row: int, path: str) -> Any:
        value = read_sample(self.dataset, self.name, row)[self.column]
        if value is None:
            raise ImageError(f"{self.name}: row {row}", "has no picture")
        return value


def _image_column(features: Mapping[str, Any], name: str, options: SourceOptions) -> str:
    if options.image is not None:
        if options.image not in features:
            raise SettingError(f"{name}: has no column {options.image!r}; has {_listed(features)}")
        return options.image
    found = [key for key, feature in features.items() if _is_image(feature)]
    found = found or [key for key in IMAGE_KEYS if key in features]
    if len(found) != 1:
        which = "several columns" if found else "no column"
        raise SettingError(
            f"{name}: {which} may be the pictures; say which with image=; has {_listed(features)}"
        )
    return found[0]


def _undecoded(dataset: Any, image: str) -> Any:
    only = dataset.select_columns([image])
    feature = only.features[image]
    return only.cast_column(image, type(feature)(decode=False)) if _is_image(feature) else only


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image" and hasattr(feature, "decode")


def _columns(dataset: Any, names: list[str], name: str) -> dict[str, list[Any]]:
    if not names:
        return {}
    try:
        columns: dict[str, list[Any]] = dataset.select_columns(list(dict.fromkeys(names)))[:]
    except Exception as error:  # of many libraries
        raise SourceError(
            f"{name}: columns {names} cannot be read ({type(error).__name__}: {error!s:.200})"
        ) from error
    return columns


def _feature_names(feature: Any) -> tuple[str, ...] | None:
    """The class names of a ClassLabel, or of a list of them."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return unique_names(list(map(str, names))) if names else None
