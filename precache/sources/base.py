"""What a source of samples is, and what a scan of one finds.

A source lists its samples once, in the process that converts (`scan`), and gives the picture of one of them
wherever that is asked for (`read`): it is sent to worker processes. `precache.sources` lists those there are.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from precache.dataset import columns
from precache.dataset.columns import Column, Ints
from precache.dataset.index import Sizes, checksum_of
from precache.errors import SettingError
from precache.recipe import Recipe
from precache.sources.options import SourceOptions
from precache.storage.urls import Location, Url


@dataclass(frozen=True, slots=True)
class SampleRef:
    """One picture of a source, as scanned: all that is known of it before it is read.

    Attributes:
        id: rank in the sorted scan of files; row of a table or a dataset. In an update that of the dataset:
            a source knows its samples by `path` and `place`.
        path: what the source calls it: relative to the root of a tree, with forward slashes.
        label: index of its class; -1 where it has not just one.
        bytes: size of the file; -1 for a missing file, which is rejected when it is read.
        split: that the source puts it in, or "" where it has none.
        modified_ns: when the file was last written, as the file system counts; no part of what it is.
        place: where the source has it, a number that its `read` understands.
        original_size: width and height of the picture that this one was made of, in pixels; None: of none.
        target: what it is labelled with where that is not one class: a list of class indices, or numbers.
        fields: what else is known of it, by name, as JSON has it.
    """

    id: int
    path: str
    label: int
    bytes: int
    split: str = ""
    modified_ns: int = field(default=0, compare=False)
    place: int = 0
    original_size: tuple[int, int] | None = None
    target: Any = field(default=None, compare=False)
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class IgnoredPath:
    """Something in the source that is not a sample; `path` is that of `SampleRef`."""

    path: str
    reason: str


@dataclass(slots=True, eq=False)
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
        places: int64 [n]; default zeros.
        targets: what the samples are labelled with, where that is not one class each: `ragged` indices of
            classes, or numbers; else None.
        fields: what else is known of them, by name.
        original_sizes: int32 [n, 2], or None.
    """

    ids: Ints
    labels: Ints
    file_bytes: Ints
    modified_ns: Ints
    splits: Ints
    split_names: tuple[str, ...]
    paths: bytes
    path_ends: Ints
    places: Ints = None  # type: ignore[assignment]  # __post_init__ makes zeros of it
    targets: Column | None = None
    fields: dict[str, Column] = field(default_factory=dict)
    original_sizes: Sizes | None = None

    def __post_init__(self) -> None:
        self.split_names = tuple(self.split_names)
        if self.places is None:
            self.places = np.zeros(len(self.ids), np.int64)

    @classmethod
    def of(
        cls,
        refs: Sequence[SampleRef],
        targets: Column | None = None,
        fields: Mapping[str, Column] | None = None,
    ) -> "Samples":
        """The columns of `refs`, with these targets and fields in the place of theirs."""
        names = list(dict.fromkeys(ref.split for ref in refs))
        paths = [os.fsencode(ref.path) for ref in refs]
        return cls(
            ids=np.array([ref.id for ref in refs], np.int64),
            labels=np.array([ref.label for ref in refs], np.int64),
            file_bytes=np.array([ref.bytes for ref in refs], np.int64),
            modified_ns=np.array([ref.modified_ns for ref in refs], np.int64),
            splits=np.array([names.index(ref.split) for ref in refs], np.int64),
            split_names=tuple(names),
            paths=b"".join(paths),
            path_ends=np.cumsum([len(path) for path in paths], dtype=np.int64),
            places=np.array([ref.place for ref in refs], np.int64),
            targets=targets,
            fields=dict(fields or {}),
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
            *columns.labelled(self.targets, self.fields, index),
        )

    def select(
        self, rows: Ints, splits: Ints | None = None, split_names: Sequence[str] | None = None
    ) -> "Samples":
        """The samples at `rows`, with other splits if they are given."""
        paths = Column(np.frombuffer(self.paths, np.uint8), self.path_ends).select(rows)
        assert paths.ends is not None
        return Samples(
            ids=self.ids[rows],
            labels=self.labels[rows],
            file_bytes=self.file_bytes[rows],
            modified_ns=self.modified_ns[rows],
            splits=self.splits[rows] if splits is None else splits,
            split_names=self.split_names if split_names is None else tuple(split_names),
            paths=paths.values.tobytes(),
            path_ends=paths.ends,
            places=self.places[rows],
            targets=None if self.targets is None else self.targets.select(rows),
            fields=columns.select(self.fields, rows),
            original_sizes=None if self.original_sizes is None else self.original_sizes[rows],
        )


class Source(Protocol):
    """Where samples come from. It must be picklable, since worker processes read from it.

    Optional attributes and methods, which most sources lack:

    - `reads_at_a_time`, an integer: how many pictures to request at a time from a slow storage;
    - `read_mask(ref, max_pixels)`, see `precache.sources.masks.ReadMask`, where its pictures have masks;
    - `prepare(scan, recipe, options)`: the scan and the options, adapted to the recipe, see `prepared`.

    Attributes:
        root: its name in messages: the folder, the file or the URL.
        paths: folders, files and URLs that it reads; no conversion may write into them.
    """

    @property
    def root(self) -> Location:
        """See `root` of the class."""

    @property
    def paths(self) -> tuple[Location, ...]:
        """See `paths` of the class."""

    def scan(self) -> "Scan":
        """List the samples.

        Raises:
            SourceError: there are none, or something cannot be read; then its `__cause__` is an OSError.
            SettingError: an option does not fit it.
        """

    def read(self, ref: SampleRef, max_pixels: int) -> "bytes | Image.Image":
        """The picture as the scan found it: encoded, or decoded if the source stores it decoded.

        Raises:
            ImageError: it is not there, or no picture of `max_pixels` can be so large.
            SourceError: it cannot be read now, or has changed since it was scanned.
        """

    def where(self, ref: SampleRef) -> str:
        """The name of the picture for messages: its path, or its row or member and the path of its file."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a source holds.

    Attributes:
        source: the source that was scanned.
        classes: their names, sorted unless the source has an order of its own; labels index them.
        samples: a tree's are sorted by split, class folder and file name.
        ignored: what is not a sample, and why.
        scanned: files, members or rows that were looked at; each is a sample or ignored.
        digest: SHA-256 (hex) over the samples' paths and sizes, targets and fields: tells two sources
            apart without reading pictures.
        warnings: one line each: classes without pictures, files
            left out that look like pictures, one folder under two names.
        target: one of `precache.dataset.columns.TARGETS`.
        own_ids: whether the ids come from the source and are kept, rather than being ranks in the scan.
    """

    source: Source
    classes: tuple[str, ...]
    samples: Samples
    ignored: tuple[IgnoredPath, ...]
    scanned: int
    digest: str
    warnings: tuple[str, ...] = ()
    target: str = "class"
    own_ids: bool = False

    @property
    def root(self) -> Location:
        """The name of the source for messages."""
        return self.source.root

    @property
    def folder(self) -> Path:
        """The root of a source on disk; SettingError for one at a URL."""
        if isinstance(self.root, Url):
            raise SettingError(f"{self.root}: is a URL, and this reads folders alone; copy it first")
        return self.root


def prepared(scan: Scan, recipe: Recipe, options: SourceOptions) -> tuple[Scan, SourceOptions]:
    """The scan, and the options, as `recipe` takes them; the same ones where the source has no `prepare`.

    Raises:
        SettingError: it cannot be converted so.
    """
    prepare = getattr(scan.source, "prepare", None)
    return (scan, options) if prepare is None else prepare(scan, recipe, options)


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
    """Raise SettingError if source and destination overlap: the source is never written to."""
    for path in source.paths:
        if lie_apart(path, destination):
            continue
        raise SettingError(f"{destination} and the source {path} overlap; choose a DST beside it")


def lie_apart(one: str | os.PathLike[str] | Url, other: str | os.PathLike[str] | Url) -> bool:
    """Whether the two are different, and neither is inside the other."""
    if isinstance(one, Url) and isinstance(other, Url):
        outer, inner = sorted((f"{one.key}/".lstrip("/"), f"{other.key}/".lstrip("/")))
        return one.root != other.root or not inner.startswith(outer)
    if isinstance(one, Url) or isinstance(other, Url):
        return True
    paths = {Path(os.path.realpath(path)) for path in (one, other)}
    return len(paths) == 2 and not any(paths & {*path.parents} for path in paths)
