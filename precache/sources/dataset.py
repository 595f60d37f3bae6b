"""A user's dataset, anything with `__len__` and `__getitem__`, or several as splits, as a source.

A sample's id is its row; with splits, the rows of the second continue those of the first. Its path is that
of its file, if it has one, else its row in 8 digits. `precache.sources.listing` lists the samples. The
picture of a sample may be

    str, path                     the file of that name
    bytes                         an encoded picture
    {"bytes": ..., "path": ...}   either, as Hugging Face has it undecoded
    Pillow image                  itself
    array                         uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4]
    tensor                        the same, or [1, h, w], [3, h, w] or [4, h, w]

A tensor is known by its methods: torch is not imported.
"""

import hashlib
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from precache.dataset.columns import Column, ValueOfRowError
from precache.errors import ImageError, SettingError, SourceError
from precache.pictures.pillow import TooLargeError, check_pixels
from precache.pictures.reading import check_bytes, read_picture
from precache.recipe import SPLIT_NAME
from precache.sources.base import SampleRef, Samples, Scan, digest_of, picture_checksum
from precache.sources.labels import Labelled, Labels
from precache.sources.listing import (
    Listing,
    is_hf,
    is_tensor,
    list_columns,
    list_samples,
    load_saved,
    name_of,
    reason_of,
)
from precache.sources.options import SourceOptions

_PROBED = 8  # samples that are looked at to tell two datasets apart
_ANY_SIZE = 1 << 60
_CHANNELS = (1, 3, 4)
_EXPECTED = "expected a path, encoded bytes, a Pillow image, or a uint8 array or tensor"


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
        root: its name in messages.
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
                raise SourceError(f"{self.root}: split {split!r} has other classes than the others")
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
        """The picture of the sample."""
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
        """The name for messages: the path of its file, or its row."""
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
                    f"{self.where(ref)}: changes each time it is read; leave out the random transform: "
                    f"loaders augment anew in each epoch"
                )
            found.append(f"{row}:{once}")
        return " ".join(found)

    def _listings(self) -> dict[str, Listing]:
        listings = {}
        for split, one in (self.dataset if _is_splits(self.dataset) else {"": self.dataset}).items():
            if split and not SPLIT_NAME.fullmatch(split):
                raise SettingError(
                    f"{self.root}: {split!r} is not a valid split name; write letters and digits, as in train"
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
        SettingError: it is not a dataset.
    """
    every = list(dataset.values()) if _is_splits(dataset) else [dataset]
    for one in every:
        if isinstance(one, type) or not (hasattr(one, "__len__") and hasattr(one, "__getitem__")):
            expected = "expected a path, or a dataset with __len__ and __getitem__"
            raise SettingError(f"{type(one).__name__} is not a source; {expected}")
    if not every:
        raise SettingError(
            "a mapping without splits is not a source; expected one such as {'train': dataset}"
        )
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
            raise SourceError(
                f"{part.name}: row {at}: {name!r:.60} is not a valid split name; write one such as train"
            )
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
        return Labelled.with_nothing(count)
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
            f"{strange} is not a class; expected 0 to {len(classes) - 1}, or one of "
            f"{', '.join(classes)[:80]} (a dataset without labels is converted with target='none')",
        )
    targets = labelled.targets
    if targets is not None:
        targets = Column(index_of[targets.values], targets.ends)
        return replace(labelled, classes=classes, targets=targets, notes=())
    return replace(labelled, classes=classes, labels=index_of[labelled.labels], notes=())


def _first_row(labelled: Labelled, number: int) -> int:
    """The first row of a sample of this class."""
    if labelled.targets is None or labelled.targets.ends is None:
        return int(np.argmax(labelled.labels == number))
    place = np.argmax(labelled.targets.values == number)
    return int(np.searchsorted(labelled.targets.ends, place, side="right"))


def _parts_of(label: Any) -> Sequence[Any]:
    return label if isinstance(label, list | tuple) else [label]


def picture_of(value: Any, where: str, max_pixels: int) -> bytes | Image.Image:
    """The picture that `value` is, see the module; as `Source.read` gives it.

    Raises:
        ImageError: it is not a picture; names `where`.
        SourceError: it is a file that cannot be read now.
    """
    if isinstance(value, Mapping):
        content = value.get("bytes")
        value = value.get("path") if content is None else content
    if isinstance(value, str | os.PathLike):
        return _file(value, where, max_pixels)
    if isinstance(value, bytes | bytearray | memoryview):
        check_bytes(where, len(value), max_pixels)
        return bytes(value)
    if isinstance(value, Image.Image):
        return _loaded(value, where, max_pixels)
    if is_tensor(value):
        return _image(_channels_last(value.detach().cpu().numpy()), where)
    if isinstance(value, np.ndarray):
        return _image(value, where)
    raise ImageError(where, f"has no picture but {_shown(value)}; {_EXPECTED}")


def _file(path: str | os.PathLike[str], where: str, max_pixels: int) -> bytes:
    name = os.fsdecode(path)
    try:
        regular = stat.S_ISREG(os.stat(name).st_mode)
    except (OSError, ValueError):  # a NUL in it
        regular = False
    if not regular:
        raise ImageError(where, f"its picture {name!r:.200} is not a file")
    return read_picture(name, max_pixels)


def _loaded(image: Image.Image, where: str, max_pixels: int) -> Image.Image:
    """`image` once its pixels are there: one that is opened only decodes them when it is asked to."""
    try:
        check_pixels(*image.size, max_pixels)
        image.load()
    except TooLargeError as error:
        raise ImageError(where, str(error)) from error
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        raise ImageError(where, f"cannot be decoded ({reason_of(error)})") from error
    return image


def _channels_last(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A tensor's [channels, h, w] as [h, w, channels]; where either is possible, torch means the first."""
    return np.moveaxis(array, 0, -1) if array.ndim == 3 and array.shape[0] in _CHANNELS else array


def _image(array: npt.NDArray[Any], where: str) -> Image.Image:
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS)
    if array.dtype != np.uint8 or not fits or not array.size:
        raise ImageError(
            where,
            f"is {array.dtype} {[*array.shape]}; expected uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4], "
            f"or a tensor with the channels first; leave out the transform that changes it",
        )
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.60}"
