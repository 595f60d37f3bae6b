"""What a source holds and a dataset does not: pictures that cannot be decoded, and what is no picture.

Of r rejected pictures and i paths that are ignored, `precache.dataset.index` has, where there are any:

    rejected:ids                       int64 [r]   of the samples that they would be
    rejected:paths, rejected:reasons   text
    ignored:paths, ignored:reasons     text

They are read when somebody asks for them: who serves the samples does not.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from precache.dataset.columns import Column
from precache.dataset.index import Array, IndexFile, columns_of, damaged
from precache.storage import atomic_write

REJECTED_NAME = "rejected.csv"
_TEXT_ERRORS = "surrogatepass"  # names of files may be no Unicode
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rejected:
    """A picture that cannot be decoded, so that it is left out.

    Attributes:
        path: relative to the source tree, with forward slashes.
        reason: what is wrong with it.
        id: of the sample that it would be; -1 if it was read from the list that `precache check` writes.
        bytes: size of the file when it was tried; -1 if it comes from a conversion, which has no such record.
        modified_ns: when the file had last been written then, as the file system counts; or -1, likewise.
    """

    path: str
    reason: str
    id: int = field(default=-1, compare=False)
    bytes: int = -1
    modified_ns: int = -1

    def to_json(self) -> dict[str, Any]:
        """As journals hold it."""
        return {"id": self.id, "path": self.path, "reason": self.reason}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "Rejected":
        """What `to_json` gave; TypeError or KeyError if `entry` is something else."""
        if len(entry) != 3:
            raise TypeError(f"id, path and reason are expected, got {', '.join(map(str, entry))}")
        return cls(path=entry["path"], reason=entry["reason"], id=entry["id"])


class Listed(Sequence[T]):
    """So many of something, read when one of them is asked for; equal to a tuple of the same."""

    def __init__(self, count: int, read: Callable[[], tuple[T, ...]]) -> None:
        self._count, self._read = count, read
        self._all: tuple[T, ...] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> T: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[T, ...]: ...

    def __getitem__(self, number: int | slice) -> T | tuple[T, ...]:
        return self._known()[number]

    def __iter__(self) -> Iterator[T]:
        return iter(self._known())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | Listed):
            return NotImplemented
        return len(self) == len(other) and self._known() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._known())

    def __repr__(self) -> str:
        return repr(self._known())

    def _known(self) -> tuple[T, ...]:
        if self._all is None:
            self._all = self._read() if self._count else ()
        return self._all


def left_out_arrays(rejected: Sequence[Rejected], ignored: Sequence[tuple[str, str]]) -> dict[str, Array]:
    """Both as columns of the index."""
    arrays: dict[str, Array] = {}
    if rejected:
        arrays["rejected:ids"] = np.array([picture.id for picture in rejected], np.int64)
        arrays |= _texts("rejected", [(picture.path, picture.reason) for picture in rejected])
    return arrays | (_texts("ignored", ignored) if ignored else {})


def listed_rejected(file: IndexFile, count: int) -> Sequence[Rejected]:
    """The pictures that were rejected.

    Raises, when one is asked for:
        IndexFileError: they cannot be read, or are not as they were written.
    """
    return Listed(count, partial(_read_rejected, file, count))


def listed_ignored(file: IndexFile, count: int) -> Sequence[tuple[str, str]]:
    """As `listed_rejected`: (path, reason) of what was ignored."""
    return Listed(count, partial(_read_texts, file, "ignored", count))


def write_rejected(folder: Path, rejected: Sequence[Rejected]) -> None:
    """Write `rejected.csv` into `folder`, for people; the dataset has the same. None if none is."""
    if not rejected:
        return
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("id", "path", "reason"))
    writer.writerows((sample.id, sample.path, sample.reason) for sample in rejected)
    with atomic_write(folder / REJECTED_NAME) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))


def _texts(section: str, pairs: Sequence[tuple[str, str]]) -> dict[str, Array]:
    columns = {}
    for name, texts in zip(("paths", "reasons"), zip(*pairs, strict=True), strict=True):
        encoded = [text.encode(errors=_TEXT_ERRORS) for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        columns[f"{section}:{name}"] = Column(np.frombuffer(b"".join(encoded), np.uint8), ends)
    return columns_of(columns)


def _read_rejected(file: IndexFile, count: int) -> tuple[Rejected, ...]:
    texts, ids = _read_texts(file, "rejected", count), file.read("rejected:ids", np.int64)
    if len(ids) != count:
        raise damaged(file.path, f"it has {len(ids):,} ids of {count:,} rejected pictures")
    return tuple(Rejected(*text, number) for text, number in zip(texts, ids.tolist(), strict=True))


def _read_texts(file: IndexFile, section: str, count: int) -> tuple[tuple[str, str], ...]:
    columns = [file.read_text(f"{section}:{name}") for name in ("paths", "reasons")]
    if any(len(column) != count for column in columns):
        raise damaged(file.path, f"its columns {section} are not of {count:,} rows")
    try:
        paths, reasons = (
            [column.array(row).tobytes().decode(errors=_TEXT_ERRORS) for row in range(count)]
            for column in columns
        )
    except UnicodeDecodeError as error:
        raise damaged(file.path, f"its columns {section} are no text") from error
    return tuple(zip(paths, reasons, strict=True))
