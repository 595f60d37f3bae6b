"""What a source holds and a dataset does not: pictures that cannot be decoded, and what is no sample of it.

`left_out.safetensors`, where there is any, of r rejected pictures and i paths that are ignored:

    rejected_ids                                int64 [r]      of the samples that they would be
    rejected_paths, rejected_path_ends          uint8 [sum], int64 [r]: UTF-8, and where each ends
    rejected_reasons, rejected_reason_ends      likewise
    ignored_paths, ignored_path_ends            likewise, int64 [i]
    ignored_reasons, ignored_reason_ends        likewise

It is read when somebody asks for it: who serves the samples does not.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from precache.dataset.arrays import Arrays, damaged, read_arrays, write_arrays
from precache.dataset.files import FileEntry, Held
from precache.dataset.index import name_after
from precache.errors import DatasetError
from precache.storage import atomic_write

LEFT_OUT_NAME = "left_out.safetensors"
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


def write_left_out(
    folder: Path, rejected: Sequence[Rejected], ignored: Sequence[tuple[str, str]], updates: int = 0
) -> FileEntry | None:
    """Write both into `folder`, of a dataset of so many updates; None if there is neither."""
    if not rejected and not ignored:
        return None
    arrays: Arrays = {"rejected_ids": np.array([picture.id for picture in rejected], np.int64)}
    for name, texts in (
        ("rejected_path", [picture.path for picture in rejected]),
        ("rejected_reason", [picture.reason for picture in rejected]),
        ("ignored_path", [path for path, _ in ignored]),
        ("ignored_reason", [reason for _, reason in ignored]),
    ):
        encoded = [text.encode(errors=_TEXT_ERRORS) for text in texts]
        arrays[f"{name}s"] = np.frombuffer(b"".join(encoded), np.uint8)
        arrays[f"{name}_ends"] = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return write_arrays(folder / name_after(LEFT_OUT_NAME, updates), arrays)[0]


def listed_rejected(held: Held, entry: FileEntry | None, count: int) -> Sequence[Rejected]:
    """The pictures that were rejected, in the file that `entry` of a manifest describes.

    Raises, when one is asked for:
        DatasetError: it cannot be read, or is not as it was written.
    """
    return () if entry is None else Listed(count, partial(_read_rejected, held, entry, count))


def listed_ignored(held: Held, entry: FileEntry | None, count: int) -> Sequence[tuple[str, str]]:
    """As `listed_rejected`: (path, reason) of what was ignored."""
    return () if entry is None else Listed(count, partial(_read_ignored, held, entry, count))


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


def _read_rejected(held: Held, entry: FileEntry, count: int) -> tuple[Rejected, ...]:
    arrays, texts = _read(held, entry, ("rejected_path", "rejected_reason"), count)
    ids = arrays["rejected_ids"]
    return tuple(Rejected(*about) for about in zip(*texts, ids.tolist(), strict=True))


def _read_ignored(held: Held, entry: FileEntry, count: int) -> tuple[tuple[str, str], ...]:
    paths, reasons = _read(held, entry, ("ignored_path", "ignored_reason"), count)[1]
    return tuple(zip(paths, reasons, strict=True))


def _read(held: Held, entry: FileEntry, names: tuple[str, ...], count: int) -> tuple[Arrays, list[list[str]]]:
    with held(entry) as path:
        arrays = read_arrays(path, entry)
    texts = []
    ids = arrays.get("rejected_ids")
    if ids is None or ids.dtype != np.int64 or (names[0] == "rejected_path" and ids.shape != (count,)):
        raise _not_as_written(path)
    for name in names:
        content, ends = arrays.get(f"{name}s"), arrays.get(f"{name}_ends")
        if content is None or ends is None or content.dtype != np.uint8 or ends.shape != (count,):
            raise _not_as_written(path)
        bounds = [0, *ends.tolist()]
        whole = content.tobytes()
        if bounds[-1] != len(whole) or bounds != sorted(bounds):
            raise _not_as_written(path)
        parts = (whole[start:stop] for start, stop in pairwise(bounds))
        try:
            texts.append([part.decode(errors=_TEXT_ERRORS) for part in parts])
        except UnicodeDecodeError as error:
            raise _not_as_written(path) from error
    return arrays, texts


def _not_as_written(path: Path) -> DatasetError:
    return damaged(path, "its columns are not as this project writes them")
