"""Datasets of Hugging Face's library: what its columns say, pictures undecoded.

The library (extra `hf`) is imported for `hf:FOLDER` alone, where `save_to_disk` has put a dataset; one that
is passed brings what is needed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precache.errors import ImageError, MissingDependencyError, SettingError, SourceError
from precache.packages import install_extra
from precache.sources.listing import IMAGE_KEYS, LABEL_KEY, Listing, read_sample, unique_names
from precache.sources.options import SourceOptions, find_label
from precache.sources.pictures import reason_of

PREFIX = "hf:"


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
    """The samples of a dataset that messages call `name`, by its columns; no picture is decoded.

    Raises:
        SettingError: an option names a column that it does not have.
        SourceError: it has no samples, or a column cannot be read.
    """
    options.only("a dataset", "image", "label", "target", "separator", "split", "fields")
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
        read=_Pictures(_undecoded(plain, image), image, name),
        classes=None if label is None else _class_names(features[label]),
        labels=None if label is None else columns[label],
        splits=None if options.split is None else columns[options.split],
        fields={key: columns[key] for key in options.fields},
        warnings=tuple(warnings),
    )


@dataclass(frozen=True, slots=True)
class _Pictures:
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


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Of a ClassLabel, or of a list of them."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return unique_names(list(map(str, names))) if names else None


def _listed(features: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in list(features)[:20])
