"""Somebody's dataset, anything with `__len__` and `__getitem__`, or several as splits, as a source.

A sample's id is its row; with splits, the rows of the second one go on where those of the first one end. What
it is called is the path of its file, where it has one, else its row in 8 digits. `precache.sources.listing`
says what is read for the list, `precache.sources.pictures` what may be a picture.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from precache.dataset.columns import Column, ValueOfRowError
from precache.errors import ImageError, SettingError, SourceError
from precache.pictures.reading import read_picture
from precache.recipe import SPLIT_NAME
from precache.sources.base import SampleRef, Samples, Scan, digest_of, picture_checksum
from precache.sources.hf import is_hf, list_columns, load_saved
from precache.sources.labels import Labelled, Labels
from precache.sources.listing import Listing, list_samples, name_of
from precache.sources.options import SourceOptions
from precache.sources.pictures import picture_of

_PROBED = 8  # samples that are looked at to tell two datasets apart
_ANY_SIZE = 1 << 60


@dataclass(frozen=True, slots=True)
class _Part:
    """Where the samples of a split come from; all that a worker needs.

    Attributes:
        first: row of its first sample.
        read: see `Listing`.
        prefix: of the paths of its samples.
    """

    name: str
    first: int
    read: Callable[[int, str], Any]
    folder: str
    files: bool
    prefix: str


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A dataset, or a mapping of splits to datasets, as a `Source`.

    Attributes:
        dataset: what is read; None once it was scanned: `parts` then hold what reads it.
        root: what messages call it.
        paths: see `Source`.
    """

    dataset: Any
    options: SourceOptions
    root: Path
    paths: tuple[Path, ...] = ()
    parts: tuple[_Part, ...] = ()

    def scan(self) -> Scan:
        """See `precache.sources.base.Source`."""
        listings = self._listings()
        first = next(iter(listings.values()))
        for split, listing in listings.items():
            if listing.classes != first.classes:
                raise SourceError(f"{self.root}: the classes of split {split!r} are not those of the others")
        parts = tuple(_parts(listings))
        scanned = replace(self, dataset=None, parts=parts)
        samples, labelled = _samples(listings, parts, self.options)
        warnings = [warning for listing in listings.values() for warning in listing.warnings]
        warnings += [f"{self.root}: the labels {note}" for note in labelled.notes]
        unread = sum(len(listing.unread) for listing in listings.values())
        if unread == len(samples):
            raise SourceError(f"{self.root}: none of its {unread:,} samples can be read; repair it")
        digest = digest_of(samples, labelled.classes) + scanned.probe(samples)
        return Scan(
            scanned,
            labelled.classes,
            samples,
            (),
            len(samples),
            hashlib.sha256(digest.encode()).hexdigest(),
            tuple(warnings),
            labelled.target,
        )

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        """What the sample has for a picture."""
        part = self._part(ref)
        where = self.where(ref)
        path = ref.path.removeprefix(part.prefix)
        if part.files and ref.bytes >= 0:
            as_scanned = (ref.bytes, ref.modified_ns)
            return read_picture(os.path.join(part.folder, path), max_pixels, as_scanned)
        picture = picture_of(part.read(ref.place - part.first, path), where, max_pixels)
        if ref.bytes < 0:
            raise ImageError(where, "could not be read when the dataset was listed")
        return picture

    def where(self, ref: SampleRef) -> str:
        """Path of its file, or its row."""
        part = self._part(ref)
        if part.files:
            return os.path.join(part.folder, ref.path.removeprefix(part.prefix))
        return f"{part.name}: row {ref.place - part.first}"

    def probe(self, samples: Samples) -> str:
        """What a few of its pictures are: labels alone do not tell two datasets apart.

        Raises:
            SourceError: one is another picture each time that it is read.
        """
        found = []
        for row in sorted({round(at) for at in np.linspace(0, len(samples) - 1, _PROBED)}):
            ref = samples[row]
            if self._part(ref).files:
                continue  # their sizes are in the digest
            try:
                once, again = (picture_checksum(self.read(ref, _ANY_SIZE)) for _ in range(2))
            except ImageError:
                continue  # the conversion says what is wrong with it
            if once != again:
                raise SourceError(
                    f"{self.where(ref)}: is another picture each time that it is read; leave out the random "
                    f"transform: loaders draw anew in each epoch"
                )
            found.append(f"{row}:{once}")
        return " ".join(found)

    def _listings(self) -> dict[str, Listing]:
        listings = {}
        for split, one in (self.dataset if _is_splits(self.dataset) else {"": self.dataset}).items():
            if split and not SPLIT_NAME.fullmatch(split):
                raise SettingError(
                    f"{self.root}: {split!r} is no name of a split; write letters and digits, such as train"
                )
            if split and self.options.split is not None:
                raise SettingError(f"{self.root}: has splits already; leave out split={self.options.split!r}")
            name = f"{self.root}, split {split}" if split else str(self.root)
            listings[split] = (list_columns if is_hf(one) else list_samples)(one, name, self.options)
        return listings

    def _part(self, ref: SampleRef) -> _Part:
        return self.parts[bisect_right(self.parts, ref.place, key=lambda part: part.first) - 1]


def open_object(dataset: Any, options: SourceOptions) -> DatasetSource:
    """The source that reads `dataset`, or a mapping of splits to datasets.

    Raises:
        SettingError: it is no dataset.
    """
    every = list(dataset.values()) if _is_splits(dataset) else [dataset]
    for one in every:
        if isinstance(one, type) or not (hasattr(one, "__len__") and hasattr(one, "__getitem__")):
            expected = "expected a path, or a dataset with __len__ and __getitem__"
            raise SettingError(f"{type(one).__name__} is no source; {expected}")
    if not every:
        raise SettingError("a mapping without splits is no source; expected one such as {'train': dataset}")
    folders = [getattr(one, "root", None) for one in every if hasattr(one, "samples")]
    paths = tuple(Path(folder) for folder in folders if isinstance(folder, str | os.PathLike))
    return DatasetSource(dataset, options, Path(name_of(every[0])), paths)


def open_saved(folder: str, options: SourceOptions) -> DatasetSource:
    """The source that reads what Hugging Face's library has saved to `folder`; raises as `load_saved`."""
    return DatasetSource(load_saved(folder), options, Path(folder), (Path(folder),))


def _is_splits(dataset: Any) -> bool:
    return isinstance(dataset, Mapping) and all(isinstance(name, str) for name in dataset)


def _parts(listings: Mapping[str, Listing]) -> Iterator[_Part]:
    firsts = accumulate((listing.count for listing in listings.values()), initial=0)
    for first, (split, listing) in zip(firsts, listings.items(), strict=False):
        prefix = f"{split}/" if split and listing.files is not None else ""
        yield _Part(listing.name, first, listing.read, listing.folder, listing.files is not None, prefix)


def _samples(
    listings: Mapping[str, Listing], parts: Sequence[_Part], options: SourceOptions
) -> tuple[Samples, Labelled]:
    """All samples, and what they are labelled with."""
    refs = [
        ref
        for part, (split, listing) in zip(parts, listings.items(), strict=True)
        for ref in _refs(part, split, listing)
    ]
    every = list(listings.values())
    labels = _joined([listing.labels for listing in every])
    row = _Rows(parts)
    try:
        labelled = _labelled(labels, every[0].classes, options, len(refs))
    except ValueOfRowError as error:
        raise row.error(error, "label") from error
    fields = {}
    for name in every[0].fields:
        try:
            fields[name] = Column.of(_joined([listing.fields[name] for listing in every]) or ())
        except ValueOfRowError as error:
            raise row.error(error, repr(name)) from error
    refs = [replace(ref, label=int(label)) for ref, label in zip(refs, labelled.labels, strict=True)]
    return Samples.of(refs, labelled.targets, fields), labelled


@dataclass(frozen=True, slots=True)
class _Rows:
    parts: Sequence[_Part]

    def error(self, error: ValueOfRowError, column: str) -> SourceError:
        """What is wrong with a row, in one line."""
        part = self.parts[bisect_right(self.parts, error.row, key=lambda part: part.first) - 1]
        return SourceError(f"{part.name}: row {error.row - part.first}: {column}: {error.reason}")


def _joined(columns: Sequence[Sequence[Any] | None]) -> list[Any] | None:
    return None if columns[0] is None else [value for column in columns for value in column or ()]


def _refs(part: _Part, split: str, listing: Listing) -> Iterator[SampleRef]:
    splits = listing.splits or [split] * listing.count
    for at in range(listing.count):
        row = part.first + at
        size, modified_ns = (-1 if at in listing.unread else 0), 0
        path = f"{row:08d}"
        if listing.files is not None:
            path = listing.files[at]
            size, modified_ns = _status(os.path.join(listing.folder, path))
        name = splits[at]
        if listing.splits is not None and (not isinstance(name, str) or not SPLIT_NAME.fullmatch(name)):
            raise SourceError(f"{part.name}: row {at}: {name!r:.60} is no name of a split, such as train")
        yield SampleRef(row, f"{part.prefix}{path}", -1, size, name, modified_ns, row)


def _status(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return -1, 0
    return status.st_size, status.st_mtime_ns


def _labelled(
    labels: Sequence[Any] | None, classes: tuple[str, ...] | None, options: SourceOptions, count: int
) -> Labelled:
    """What the samples are labelled with, by the names that the dataset has for its classes.

    Raises:
        ValueOfRowError: one is unlike the others, or no class that there is.
    """
    if labels is None or options.target == "none":
        return Labelled("none", (), np.full(count, -1))
    collected = Labels()
    for label in labels:
        collected.add(label)
    labelled = collected.labelled(options.target, options.separator, cells=False)
    if classes is None or labelled.target not in ("class", "classes"):
        return labelled
    by_name = {name: index for index, name in enumerate(classes)}
    numbers = not any(isinstance(part, str) for label in labels for part in _parts_of(label))
    by_name |= {str(index): index for index in range(len(classes))} if numbers else {}
    index_of = np.array([by_name.get(name, -1) for name in labelled.classes], np.int64)
    if (index_of < 0).any():
        number = int(np.argmin(index_of))
        strange, row = labelled.classes[number], _first_row(labelled, number)
        raise ValueOfRowError(
            row,
            f"{strange} is no class; expected 0 to {len(classes) - 1}, or one of {', '.join(classes)[:80]} "
            f"(a dataset without labels is converted with target='none')",
        )
    targets = labelled.targets
    if targets is not None:
        targets = Column(index_of[targets.values], targets.ends)
        return replace(labelled, classes=classes, targets=targets, notes=())
    return replace(labelled, classes=classes, labels=index_of[labelled.labels], notes=())


def _first_row(labelled: Labelled, number: int) -> int:
    """Of a sample of this class."""
    if labelled.targets is None or labelled.targets.ends is None:
        return int(np.argmax(labelled.labels == number))
    place = np.argmax(labelled.targets.values == number)
    return int(np.searchsorted(labelled.targets.ends, place, side="right"))


def _parts_of(label: Any) -> Sequence[Any]:
    return label if isinstance(label, list | tuple) else [label]
