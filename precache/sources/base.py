"""What a source of samples is, and what a scan of one finds.

A source lists its samples once, in the process that converts (`scan`), and gives the picture of one of them
wherever that is asked for (`read`): it is sent to worker processes. `precache.sources` lists those there are.
"""

import hashlib
import os
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice, repeat
from pathlib import Path
from typing import Any, Protocol, TypeAlias, overload

import numpy as np
from PIL import Image

from precache.dataset import columns
from precache.dataset.columns import Column, Ints
from precache.dataset.index import Checksums, Sizes, checksum_of
from precache.errors import ImageError, SettingError
from precache.pictures.kinds import decoder_remedy, unreadable_extensions
from precache.recipe import Recipe
from precache.reporting import quantity, warn
from precache.sources.options import SourceOptions
from precache.storage.urls import Location, Url

ANY_SIZE = 1 << 60
"""Of a picture that was as large when it was converted."""
_FILE_SYSTEM = (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
_PATHS = 4096  # that are text at a time


@dataclass(frozen=True, slots=True)
class SampleRef:
    """One picture of a source, as scanned: all that is known of it before it is read.

    Attributes:
        id: rank in the sorted scan of files; row of a table or a dataset. In an update that of the dataset:
            a source knows its samples by `path` and `place`.
        path: what the source calls it: relative to the root of a tree, with forward slashes.
        label: index of its class; -1 where it has not just one.
        bytes: size of the file; -1 for a missing file, which is rejected when it is read, and where sizes
            were not asked for.
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


class Paths(Sequence[str]):
    """Paths that are text only while they are looked at: 1,000,000 of them take 40 MB rather than 110.

    Args:
        content: the paths as the file system has them, one behind the other.
        ends: int64 [n], where each of them ends.
        above: what each is given to begin with.
        rows: which of them these are, in this order; None: all.
    """

    def __init__(self, content: bytes, ends: Ints, above: str = "", rows: Ints | None = None) -> None:
        self._content, self._above = content, above
        starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(ends) else ends
        self._starts, self._ends = (starts, ends) if rows is None else (starts[rows], ends[rows])

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self._decode(self._starts[index], self._ends[index])
        return self._above + os.fsdecode(self._content[self._starts[index] : self._ends[index]])

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _PATHS):
            yield from self[start : start + _PATHS]

    def _decode(self, starts: Ints, ends: Ints) -> list[str]:
        """Decode as `os.fsdecode` does, in half the time."""
        content, above, how = self._content, self._above, _FILE_SYSTEM
        places = zip(starts.tolist(), ends.tolist(), strict=True)
        return [above + content[start:end].decode(*how) for start, end in places]


@dataclass(slots=True, eq=False)
class Samples(Sequence[SampleRef]):
    """The samples of a source, in columns: 1,000,000 of them take some 80 MB, as objects ten times that.

    Attributes:
        ids: int64 [n], ascending.
        labels: int64 [n]; see `SampleRef` for this and what follows.
        file_bytes: int64 [n]; -1, where sizes were not asked for.
        modified_ns: int64 [n]; 0 likewise.
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
        listed = SampleList()
        for ref in refs:
            listed.add(ref.path, ref.bytes, ref.modified_ns, ref.place, ref.split)
        samples = listed.samples(np.array([ref.label for ref in refs], np.int64), targets, fields)
        samples.ids = np.array([ref.id for ref in refs], np.int64)
        return samples

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
            None if self.targets is None else self.targets.value(index),
            columns.row_values(self.fields, index) if self.fields else {},
        )

    def list_paths(self, above: str = "", rows: Ints | None = None) -> Paths:
        """Paths of the samples, or of those at `rows`, each below `above`."""
        return Paths(self.paths, self.path_ends, above, rows)

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
            fields=columns.select_rows(self.fields, rows),
            original_sizes=None if self.original_sizes is None else self.original_sizes[rows],
        )


class SampleList:
    """Samples while a source lists them, one after the other: some 50 bytes each, and their paths.

    Attributes:
        file_bytes, modified_ns, places: as of `Samples`, so far.
        split_of: number of each split, by its name.
    """

    def __init__(self) -> None:
        self._paths, self._path_ends = bytearray(), array("q")
        self.file_bytes, self.modified_ns, self.places, self._splits = (array("q") for _ in range(4))
        self.split_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.places)

    def path(self, row: int) -> str:
        """The path of a sample."""
        return os.fsdecode(bytes(self._paths[self._path_ends[row - 1] if row else 0 : self._path_ends[row]]))

    def add(
        self, path: str, file_bytes: int = 0, modified_ns: int = 0, place: int = 0, split: str = ""
    ) -> None:
        """Add a sample; see `SampleRef`."""
        self._paths += os.fsencode(path)
        self._path_ends.append(len(self._paths))
        self.file_bytes.append(file_bytes)
        self.modified_ns.append(modified_ns)
        self.places.append(place)
        self._splits.append(self.split_of.setdefault(split, len(self.split_of)))

    def add_listed(self, paths: Sequence[str], statuses: Iterable[tuple[int, int, int]], split: str) -> None:
        """Add samples: their paths, and size, time of the last write and place of each, see `SampleRef`."""
        if not paths:
            return
        encoded = os.fsencode("\0".join(paths)).split(b"\0")  # no name of a file has a NUL
        self._path_ends.extend(accumulate(map(len, encoded[1:]), initial=len(self._paths) + len(encoded[0])))
        self._paths += b"".join(encoded)
        columns = zip(*statuses, strict=True)
        for column, values in zip((self.file_bytes, self.modified_ns, self.places), columns, strict=True):
            column.extend(values)
        number = self.split_of.setdefault(split, len(self.split_of))
        self._splits.extend(repeat(number, len(paths)))

    def samples(
        self, labels: Ints, targets: Column | None = None, fields: Mapping[str, Column] | None = None
    ) -> Samples:
        """All of them; ids are their ranks, splits are sorted, and nothing can be added any more."""
        names = sorted(self.split_of)
        rank = np.empty(len(names), np.int64)
        rank[[self.split_of[name] for name in names]] = np.arange(len(names))
        return Samples(
            ids=np.arange(len(self)),
            labels=labels,
            file_bytes=np.frombuffer(self.file_bytes, np.int64),
            modified_ns=np.frombuffer(self.modified_ns, np.int64),
            splits=rank[np.frombuffer(self._splits, np.int64)],
            split_names=tuple(names),
            paths=bytes(self._paths),
            path_ends=np.frombuffer(self._path_ends, np.int64),
            places=np.frombuffer(self.places, np.int64),
            targets=targets,
            fields=dict(fields or {}),
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


def warn_of_undecodable(scan: "Scan") -> None:
    """Warn of pictures that will be left out, by their names, because a decoder is missing."""
    samples = scan.samples
    paths, counts = np.frombuffer(samples.paths, np.uint8), Counter[str]()
    for suffix, kind in unreadable_extensions().items():
        ends = samples.path_ends[samples.path_ends >= len(suffix)]
        named = np.ones(len(ends), bool)
        for place, letter in enumerate(reversed(suffix.encode()), 1):
            named &= (paths[ends - place] | 0x20) == letter  # in lower case
        counts[kind] += int(named.sum())
    for kind, count in (+counts).items():
        pictures = quantity(count, "picture is", "pictures are")
        warn(
            f"{scan.root}: {pictures} named as {kind}, for which this Pillow has no decoder, and will be "
            f"left out; {decoder_remedy(kind)}"
        )


@dataclass(frozen=True, slots=True)
class Scan:
    """What a source holds.

    Attributes:
        source: the source that was scanned.
        classes: their names, sorted unless the source has an order of its own; labels index them.
        samples: a tree's are sorted by split, class, folder and file name.
        ignored: what is not a sample, and why.
        scanned: files, members or rows that were looked at; each is a sample or ignored.
        digest: SHA-256 (hex) over the samples' paths and sizes, targets and fields: tells two sources
            apart without reading pictures. Of a tree whose sizes were not asked for, over the paths alone.
        warnings: one line each: classes without pictures, files left out that look like pictures, one
            folder under two names, folders that may be splits, or classes.
        target: one of `precache.dataset.columns.TARGETS`.
        own_ids: whether the ids come from the source and are kept, rather than being ranks in the scan.
        deeper: pictures of a tree that lie in a folder of their class folder.
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
    deeper: int = 0

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


Read: TypeAlias = Callable[[], "bytes | Image.Image"]
"""As `Source.read` of one picture."""


def picture_readers(source: Source, refs: Sequence[SampleRef], max_pixels: int) -> Iterator[Read]:
    """A `Read` of each picture in turn; a source with `reads_at_a_time` reads so many ahead."""
    at_a_time = getattr(source, "reads_at_a_time", 0)
    if not at_a_time:
        yield from (partial(source.read, ref, max_pixels) for ref in refs)
        return
    with ThreadPoolExecutor(at_a_time) as pool:
        waiting = iter(refs)
        under_way = deque(pool.submit(source.read, ref, max_pixels) for ref in islice(waiting, at_a_time))
        try:
            while under_way:
                yield under_way.popleft().result
                under_way.extend(pool.submit(source.read, ref, max_pixels) for ref in islice(waiting, 1))
        finally:
            pool.shutdown(cancel_futures=True)


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


def changed_pictures(scan: Scan, rows: Ints, modified_ns: Ints, checksums: Checksums) -> Iterator[str]:
    """As `changed_rows`: the pictures, as messages call them."""
    for row in changed_rows(scan, rows, modified_ns, checksums):
        yield scan.source.where(scan.samples[row])


def changed_rows(scan: Scan, rows: Ints, modified_ns: Ints, checksums: Checksums) -> Iterator[int]:
    """Those of `rows` of the scan's samples whose pictures are not what they were, although their sizes are.

    A picture that was last written at the time on record is taken for the same. One with another time, as in
    a copy of the tree, is read and its bytes are compared.

    Args:
        modified_ns: int64 [len(rows)], when they had last been written.
        checksums: uint64 [len(rows)], XXH3-64 of the files then; 0 of those that could not be read.

    Raises:
        SourceError: one cannot be read.
    """
    for place in np.flatnonzero(scan.samples.modified_ns[rows] != modified_ns).tolist():
        ref = scan.samples[int(rows[place])]
        if checksums[place] and _checksum_now(scan, ref) != checksums[place]:
            yield int(rows[place])


def _checksum_now(scan: Scan, ref: SampleRef) -> int | None:
    """Checksum of the picture, whatever its size is now; None where it cannot be read any more."""
    try:
        return picture_checksum(scan.source.read(ref, ANY_SIZE))
    except ImageError:
        return None


def check_no_overlap(source: Source, destination: Location) -> None:
    """Raise SettingError if source and destination overlap: the source is never written to."""
    for path in source.paths:
        if paths_overlap(path, destination):
            continue
        raise SettingError(f"{destination} and the source {path} overlap; choose a DST beside it")


def paths_overlap(one: str | os.PathLike[str] | Url, other: str | os.PathLike[str] | Url) -> bool:
    """Whether the two are different, and neither is inside the other."""
    if isinstance(one, Url) and isinstance(other, Url):
        outer, inner = sorted((f"{one.key}/".lstrip("/"), f"{other.key}/".lstrip("/")))
        return one.root != other.root or not inner.startswith(outer)
    if isinstance(one, Url) or isinstance(other, Url):
        return True
    paths = {Path(os.path.realpath(path)) for path in (one, other)}
    return len(paths) == 2 and not any(paths & {*path.parents} for path in paths)
