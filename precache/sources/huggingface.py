"""Datasets of Hugging Face's library as rows: columns say all but the pictures, which stay undecoded.

The library (extra `hf`) is imported for `hf:FOLDER` alone, where `save_to_disk` has put a dataset; one that
is passed brings what is needed. Its files are mapped, and any row of them is read by itself.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from precache.errors import MissingDependencyError, SourceError
from precache.packages import install_command
from precache.reporting import warn
from precache.sources.dataset import read_picture_of
from precache.sources.labels import unique_names
from precache.sources.picture_values import reason_of
from precache.sources.rows import Row, StoredPictures, TableColumn

PREFIX = "hf:"
_BATCH_ROWS = 65_536


def is_dataset(dataset: Any) -> bool:
    """Whether it is a dataset of that library, with columns; a streamed one is none."""
    return all(hasattr(dataset, name) for name in ("features", "select_columns", "with_format", "__len__"))


@dataclass(frozen=True, slots=True)
class HuggingFaceReader:
    """The rows of a dataset of Hugging Face's library."""

    dataset: Any
    name: str

    counts_lines = False
    is_text = False

    def columns(self) -> list[TableColumn]:
        """The columns; those of pictures hold them, or where there are none, any may."""
        features = dict(self.dataset.features or {})
        images = [name for name, feature in features.items() if _is_image(feature)]
        return [
            TableColumn(
                name,
                _class_names(feature),
                partial(self._pictures, name) if name in (images or features) else None,
            )
            for name, feature in features.items()
        ]

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        if not names:
            for number in range(len(self.dataset)):
                yield Row(number, ())
            return
        plain = self.dataset.with_format(None).select_columns(list(names))
        for start in range(0, len(plain), _BATCH_ROWS):
            try:
                columns = plain[start : start + _BATCH_ROWS]
            except Exception as error:  # of many libraries
                raise SourceError(
                    f"{self.name}: columns {list(names)} cannot be read ({reason_of(error)})"
                ) from error
            for place, values in enumerate(zip(*(columns[name] for name in names), strict=True)):
                yield Row(start + place, values)

    def _pictures(self, name: str) -> StoredPictures:
        if (self.dataset.format or {}).get("type") == "custom":
            warn(f"{self.name}: its transform is left out: pictures are converted as they are stored")
        pictures, feature = self.dataset.with_format(None).select_columns([name]), self.dataset.features[name]
        if _is_image(feature):
            pictures = pictures.cast_column(name, type(feature)(decode=False))
        return StoredPictures(partial(read_picture_of, pictures, self.name, name))


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
            f"{PREFIX}{folder}: needs the extra 'hf'; install it with: {install_command('hf')}"
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


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image" and hasattr(feature, "decode")


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """The names of a ClassLabel, or of a list of them."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return unique_names(list(map(str, names))) if names else None
