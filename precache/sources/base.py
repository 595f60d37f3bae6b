"""What a source of samples is, and what a scan of one finds.

A source lists its samples once, in the process that converts (`scan`), and gives the picture of one of them
wherever that is asked for (`read`): it is sent to worker processes. `precache.sources` lists those there are.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from precache.dataset.columns import Column, Ints
from precache.dataset.index import Sizes, checksum_of
from precache.errors import SettingError
from precache.storage.urls import Location, Url


@dataclass(frozen=True, slots=True)
class SampleRef:
    """One picture of a source.

    Attributes:
        id: rank in the sorted scan of files; row of a table or a dataset. In an update that of the dataset:
            a source knows its samples by `path` and `place`.
        path: what the source calls it: relative to the root of a tree, with forward slashes.
        label: index of its class; -1 where it has not just one.
        bytes: size of the file; -1 where there is none: it is rejected when it is read.
        split: that the source puts it in, or "" where it has none.
        modified_ns: when the file was last written, as the file system counts; no part of what it is.
        place: where the source has it, a number that its `read` understands.
        original_size: width and height of the picture that this one was made of, in pixels; None: of none.
    """

    id: int
    path: str
    label: int
    bytes: int
    split: str = ""
    modified_ns: int = field(default=0, compare=False)
    place: int = 0
    original_size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class IgnoredPath:
    """Something in the source that is not a sample; `path` is as of `SampleRef`."""

    path: str
    reason: str


class Samples(Sequence[SampleRef]):
    """The samples of a source, in columns: 1,000,000 of them take some 80 MB, as objects ten times that.

    Attributes:
        ids: int64 [n], ascending.
        labels: int64 [n]; see `SampleRef` for this and what follows.
        file_bytes: int64 [n].
        modified_ns: int64 [n].
        splits: int64 [n], indices of `split_names`.
        split_names: "" alone where the source has no splits.
        paths: as the file system has them, one behind the other.
        path_ends: int64 [n], where each of them ends.
        places: int64 [n].
        targets: what the samples are labelled with, where that is not one class each: `ragged` indices of
            classes, or numbers; else None.
        fields: what else is known of them, by name.
        original_sizes: int32 [n, 2], or None, as a source that has them may set it.
    """

    def __init__(
        self,
        ids: Ints,
        labels: Ints,
        file_bytes: Ints,
        modified_ns: Ints,
        splits: Ints,
        split_names: Sequence[str],
        paths: bytes,
        path_ends: Ints,
        places: Ints | None = None,
        targets: Column | None = None,
        fields: Mapping[str, Column] | None = None,
    ) -> None:
        self.ids, self.labels, self.splits = ids, labels, splits
        self.file_bytes, self.modified_ns = file_bytes, modified_ns
        self.split_names = tuple(split_names)
        self.paths, self.path_ends = paths, path_ends
        self.places = np.zeros(len(ids), np.int64) if places is None else places
        self.targets, self.fields = targets, dict(fields or {})
        self.original_sizes: Sizes | None = None

    @classmethod
    def of(
        cls,
        refs: Sequence[SampleRef],
        targets: Column | None = None,
        fields: Mapping[str, Column] | None = None,
    ) -> "Samples":
        """The columns of `refs`, with these targets and fields."""
        names = list(dict.fromkeys(ref.split for ref in refs))
        paths = [os.fsencode(ref.path) for ref in refs]
        return cls(
            np.array([ref.id for ref in refs], np.int64),
            np.array([ref.label for ref in refs], np.int64),
            np.array([ref.bytes for ref in refs], np.int64),
            np.array([ref.modified_ns for ref in refs], np.int64),
            np.array([names.index(ref.split) for ref in refs], np.int64),
            names,
            b"".join(paths),
            np.cumsum([len(path) for path in paths], dtype=np.int64),
            np.array([ref.place for ref in refs], np.int64),
            targets,
            fields,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> SampleRef:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        start = int(self.path_ends[index - 1]) if index else 0
        path = self.paths[start : int(self.path_ends[index])]
        return SampleRef(
            int(self.ids[index]),
            os.fsdecode(path),
            int(self.labels[index]),
            int(self.file_bytes[index]),
            self.split_names[self.splits[index]],
            int(self.modified_ns[index]),
            int(self.places[index]),
            None if self.original_sizes is None else tuple(self.original_sizes[index].tolist()),
        )

    def select(
        self, rows: Ints, splits: Ints | None = None, split_names: Sequence[str] | None = None
    ) -> "Samples":
        """The samples at `rows`, with other splits if they are given."""
        paths = Column(np.frombuffer(self.paths, np.uint8), self.path_ends).select(rows)
        assert paths.ends is not None
        columns = (self.ids[rows], self.labels[rows], self.file_bytes[rows], self.modified_ns[rows])
        splits = self.splits[rows] if splits is None else splits
        names = self.split_names if split_names is None else split_names
        targets = None if self.targets is None else self.targets.select(rows)
        fields = {name: column.select(rows) for name, column in self.fields.items()}
        texts, places = paths.values.tobytes(), self.places[rows]
        selected = Samples(*columns, splits, names, texts, paths.ends, places, targets, fields)
        if self.original_sizes is not None:
            selected.original_sizes = self.original_sizes[rows]
        return selected


class Source(Protocol):
    """Where samples come from; to be pickled, for worker processes read from it.

    Attributes:
        root: what messages call it: the folder, the file or the URL.
        paths: folders, files and URLs that it reads; no conversion is written into one of them.
    """

    @property
    def root(self) -> Location:
        """See the class."""

    @property
    def paths(self) -> tuple[Location, ...]:
        """See the class."""

    def scan(self) -> "Scan":
        """List the samples.

        Raises:
            SourceError: there are none, or something cannot be read: then its `__cause__` is an OSError.
            SettingError: an option does not fit it.
        """

    def read(self, ref: SampleRef, max_pixels: int) -> "bytes | Image.Image":
        """The picture, encoded, as the scan found it; or decoded, where the source has it so.

        Raises:
            ImageError: it is not there, or no picture of `max_pixels` can be so large.
            SourceError: it cannot be read now, or is not what it was when it was scanned.
        """

    def where(self, ref: SampleRef) -> str:
        """What messages call the picture: its path, or its row or member and that of its file."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a source holds.

    Attributes:
        source: that was scanned.
        classes: their names, sorted unless the source has an order of its own; labels index them.
        samples: a tree's are sorted by split, class folder and file name.
        ignored: what is not a sample, and why.
        scanned: files, members or rows that were looked at; each is a sample or ignored.
        digest: SHA-256 (hex) over the samples' paths and sizes, targets and fields: tells two sources
            apart without reading pictures.
        warnings: what the user may not expect of it, one line each: classes without pictures, files
            left out that look like pictures, one folder under two names.
        target: one of `precache.dataset.targets.TARGETS`.
        own_ids: whether the ids are the source's own, to be kept wherever its samples go: no ranks.
        recalled: whether some of it is what an unfinished scan had found: the names are right, and a picture
            that is read has the size and the time that it says, or that is an error.
    """

    source: Source
    classes: tuple[str, ...]
    samples: Samples
    ignored: tuple[IgnoredPath, ...]
    scanned: int
    digest: str
    warnings: tuple[str, ...] = ()
    target: str = "class"
    recalled: bool = False
    own_ids: bool = False

    @property
    def root(self) -> Location:
        """As of the source."""
        return self.source.root

    @property
    def folder(self) -> Path:
        """The root of a source on disk; SettingError for one at a URL."""
        if isinstance(self.root, Url):
            raise SettingError(f"{self.root}: is a URL, and this reads folders alone; copy it first")
        return self.root


def picture_checksum(picture: bytes | Image.Image) -> int:
    """XXH3-64 of what `Source.read` gave: of the file's bytes, or of the decoded picture's."""
    return checksum_of(picture if isinstance(picture, bytes) else picture.tobytes())


def digest_of(samples: Samples, classes: Sequence[str]) -> str:
    """`Scan.digest` of any source but a tree, which makes the same of paths and sizes as it goes."""
    digest = hashlib.sha256(samples.paths)
    for numbers in (samples.ids, samples.path_ends, samples.file_bytes, samples.labels, samples.splits):
        digest.update(numbers.tobytes())
    digest.update(repr((samples.split_names, tuple(classes))).encode())
    for name, column in sorted({**samples.fields, "": samples.targets}.items()):
        if column is not None:
            digest.update(name.encode(errors="surrogateescape") + b"\0" + column.content())
    return digest.hexdigest()


def check_apart(source: Source, destination: Location) -> None:
    """Raise SettingError if one lies inside the other: the source is never written to."""
    for path in source.paths:
        if lie_apart(path, destination):
            continue
        raise SettingError(
            f"{destination}: and the source {path} lie one inside the other; choose a DST beside it"
        )


def lie_apart(one: str | os.PathLike[str] | Url, other: str | os.PathLike[str] | Url) -> bool:
    """Whether neither is the other, or lies inside it."""
    if isinstance(one, Url) and isinstance(other, Url):
        outer, inner = sorted((f"{one.key}/".lstrip("/"), f"{other.key}/".lstrip("/")))
        return one.root != other.root or not inner.startswith(outer)
    if isinstance(one, Url) or isinstance(other, Url):
        return True
    paths = {Path(os.path.realpath(path)) for path in (one, other)}
    return len(paths) == 2 and not any(paths & {*path.parents} for path in paths)
