"""Datasets of Hugging Face's library as rows, with pictures that stay encoded.

The library (extra `hf`) is imported only to open `hf:FOLDER`, a dataset that `save_to_disk` wrote; a dataset
object that is passed needs no import. The library maps its files, so that single rows are read in any order.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from precache.errors import MissingDependencyError, SourceError
from precache.packages import install_command
from precache.reporting import warn
from precache.sources.dataset import read_picture_value
from precache.sources.labels import unique_names
from precache.sources.picture_values import reason_of
from precache.sources.rows import Row, StoredPictures, TableColumn

PREFIX = "hf:"
_BATCH_ROWS = 65_536


def is_dataset(dataset: Any) -> bool:
    """Return whether `dataset` is a dataset of Hugging Face's library with columns, not a streamed one."""
    return all(hasattr(dataset, name) for name in ("features", "select_columns", "with_format", "__len__"))


@dataclass(frozen=True, slots=True)
class HuggingFaceReader:
    """Reader of the rows of a dataset of Hugging Face's library, see `RowReader`."""

    dataset: Any
    name: str

    counts_lines = False
    is_text = False

    def columns(self) -> list[TableColumn]:
        """Return the columns; pictures are in columns of `Image`, or may be in any if there is none."""
        features = dict(self.dataset.features or {})
        images = [name for name, feature in features.items() if _is_image(feature)]
        columns = []
        for name, feature in features.items():
            open_pictures = None
            if name in images or not images:
                open_pictures = partial(self._open_pictures, name)
            columns.append(TableColumn(name, _class_names(feature), open_pictures))
        return columns

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        if not names:
            for number in range(len(self.dataset)):
                yield Row(number, ())
            return
        plain = self.dataset.with_format(None).select_columns(list(names))
        for start in range(0, len(plain), _BATCH_ROWS):
            try:
                columns = plain[start : start + _BATCH_ROWS]
            except Exception as error:  # the library and those it uses raise nearly anything
                raise SourceError(
                    f"columns {list(names)} cannot be read ({reason_of(error)})", path=self.name
                ) from error
            for offset, values in enumerate(zip(*(columns[name] for name in names), strict=True)):
                yield Row(start + offset, values)

    def _open_pictures(self, name: str) -> StoredPictures:
        if (self.dataset.format or {}).get("type") == "custom":
            warn(f"{self.name}: its transform is left out: pictures are converted as they are stored")
        pictures, feature = self.dataset.with_format(None).select_columns([name]), self.dataset.features[name]
        if _is_image(feature):
            pictures = pictures.cast_column(name, type(feature)(decode=False))
        return StoredPictures(partial(read_picture_value, pictures, self.name, name))


def load_saved(folder: str) -> Any:
    """Load what `save_to_disk` wrote to `folder`: a dataset, or a mapping of split names to datasets.

    Raises:
        MissingDependencyError: the library is not installed.
        SourceError: there is no such dataset, or it is damaged.
    """
    if not os.path.isdir(folder):
        raise SourceError("no such folder; expected one that datasets' save_to_disk wrote", path=folder)
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "needs the extra 'hf'",
            path=f"{PREFIX}{folder}",
            remedy=f"install it with: {install_command('hf')}",
        ) from error
    try:
        loaded = datasets.load_from_disk(folder)
        for dataset in loaded.values() if isinstance(loaded, Mapping) else [loaded]:
            dataset.data.validate(full=True)  # damaged offsets would crash the process when they are used
    except Exception as error:  # the library and those it uses raise nearly anything
        raise SourceError(
            f"not what save_to_disk wrote, or damaged ({reason_of(error)})",
            path=folder,
            remedy="save it again",
        ) from error
    return loaded


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image" and hasattr(feature, "decode")


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Return the names of a ClassLabel, or of a list of them; None for any other feature."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return unique_names(list(map(str, names))) if names else None
