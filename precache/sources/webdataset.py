"""Tars of WebDataset: a sample is what has one key, the part of a name before its first dot.

    00042.jpg    the picture
    00042.cls    its class: a whole number is the index of it, text its name
    00042.json   fields; the keys that all samples have, with values of one kind
    00042.txt    text, the field 'txt'

What follows the first dot names a part, which may have dots itself: 00042.input.jpg, 00042.target.cls. Its
last extension says what it is. Members are samples as they are for the webdataset library, but that hidden
files are none, and that the parts of a sample need not lie together.

A source is one tar, or all of a folder and of the folders in it, by name, compressed ones too. Ids are ranks
of the keys as they are stored; what has a label and no picture is rejected when it is converted. Names say
the splits: birds-train-0000.tar, validation-00000-of-00002.tar, test/0.tar.
https://github.com/webdataset/webdataset
"""

import json
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from precache.errors import ImageError, SourceError
from precache.pictures import kinds
from precache.reporting import abridge
from precache.sources.archive import (
    FILE,
    FOLDER,
    NO_NAME,
    Archive,
    Member,
    is_archive,
    open_archive,
    parts_of,
)
from precache.sources.base import IgnoredPath, SampleRef, Scan
from precache.sources.labelled_list import Columns, LabelledList
from precache.sources.options import TARS, SourceOptions
from precache.sources.shard_files import shards_in, splits_of
from precache.sources.tree import Node
from precache.storage.urls import Location

LABEL, FIELDS, TEXT = "cls", "json", "txt"
"""Extensions of the parts that are read; all of a .txt is one field, called as its extension."""
_READ = (LABEL, FIELDS, TEXT)
_META = re.compile(r"__[^/]*__(/|$)")  # names that the webdataset library passes over
_MOST_TEXT_BYTES = 1 << 20  # of one of these
_MOST_CLASSES = 100_000
_INDEX = re.compile(r"[0-9]{1,9}|-1")  # -1: no label, as in test splits
_SHOWN_PARTS = 20  # that a message names


def is_tar(name: str) -> bool:
    """Whether a file of this name is a tar, compressed or not."""
    return is_archive(Path(name)) and not name.lower().endswith(".zip")


def holds_samples(top: Node) -> bool:
    """Whether an archive's top folder has pictures with parts beside them, or any folder one with a class."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        waiting += (node for node in folder.entries() if node.is_dir())
        parts = _READ if folder is top else (LABEL,)
        found = [node.name.partition(".") for node in folder.entries() if not node.name.startswith(".")]
        keys = {key for key, _, part in found if kind_of(part) in parts}
        if keys and any(key in keys and _is_picture(part) for key, _, part in found):
            return True
    return False


def kind_of(part: str) -> str:
    """The last extension of a part's name, in lower case."""
    return part.rpartition(".")[2].lower()


def _is_picture(part: str) -> bool:
    return kinds.extension(f"x.{part}") in kinds.IMAGE_EXTENSIONS


@dataclass(frozen=True, slots=True)
class WebDatasetSource:
    """Tars as a `Source`; `root` is the folder that they are in, or the only one.

    Attributes:
        folder: that is listed: `root`, or what was fetched from there.
        archives: once they are scanned.
        starts: byte at which each tar would begin if all were joined: places count from there.
        named: whether paths of samples begin with the tar's name, for keys that are in several.
    """

    root: Location
    folder: Path
    options: SourceOptions
    archives: tuple[Archive, ...] = ()
    starts: tuple[int, ...] = ()
    named: bool = False

    @property
    def paths(self) -> tuple[Location, ...]:
        return (self.root,)

    def scan(self) -> Scan:
        tars = shards_in(self.folder, is_tar)
        archives = tuple(open_archive(self.folder / name, str(self.root / name)) for name in tars)
        return scan_archives(self, archives)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        where = self.where(ref)
        if ref.bytes < 0:
            raise ImageError(where, "has no picture, only other parts")
        tar = self._tar(ref)
        return self.archives[tar].picture(where, ref.place - self.starts[tar], ref.bytes, max_pixels)

    def where(self, ref: SampleRef) -> str:
        """The tar's path, and the member's name."""
        return os.path.join(str(self.root) if self.named else self.archives[self._tar(ref)].shown, ref.path)

    def _tar(self, ref: SampleRef) -> int:
        return bisect_right(self.starts, ref.place) - 1


@dataclass(slots=True)
class _Sample:
    """The members of one key; `picture`: its part, path, place and size; `parts`: contents of the others."""

    picture: tuple[str, str, int, int] | None = None
    parts: dict[str, bytes] = field(default_factory=dict)


def scan_archives(source: WebDatasetSource, archives: Sequence[Archive]) -> Scan:
    """List the samples of tars.

    Raises:
        SourceError: one is damaged or cannot be read, there are no pictures, or a part of a sample is not
            what it should be.
        SettingError: an option is not for them.
    """
    root, options = source.root, source.options
    options.only(TARS)
    starts = tuple(accumulate((archive.size for archive in archives[:-1]), initial=0))
    found = _TarSamples(options)
    names = [archive.shown.removeprefix(f"{root}/") for archive in archives]
    if names == [str(root)]:  # a tar by itself
        names = [os.path.basename(archives[0].shown)]
    for archive, start, split in zip(archives, starts, splits_of(root, names), strict=True):
        found.read(archive, start, split)
    if not any(ref.bytes >= 0 for ref in found.refs) and options.image is not None:
        raise SourceError(
            f"{root}: no sample has a part {options.image!r} for --image; there are "
            f"{_named(found.part_names)}"
        )
    if not any(ref.bytes >= 0 for ref in found.refs):
        raise SourceError(f"{root}: has no pictures; expected samples as 0001.jpg and 0001.cls in its tars")
    named = len({ref.path for ref in found.refs}) < len(found.refs)
    labels, classes, warnings = found.labels_and_classes()
    columns = Columns(label=None if labels is None else options.label or LABEL, class_names=classes)
    rows = LabelledList(found.where, columns)
    rows.values, rows.optional_fields = found.fields, not options.fields
    rows.text_labels = found.labels_are_parts and classes is None
    for ref in found.refs:
        tar = names[bisect_right(starts, ref.place) - 1]
        path = f"{tar}/{ref.path}" if named else ref.path
        rows.add(path, ref.bytes, ref.modified_ns, ref.place, ref.split)
    for label in labels or ():
        rows.labels.add(label)
    if found.left_out:
        left_out = abridge([repr(name) for name in found.left_out])
        warnings.append(f"fields that only some samples have are left out: {left_out}")
    source = replace(source, archives=tuple(archives), starts=starts, named=named)
    return rows.scan(source, options, found.ignored, [f"{root}: {warning}" for warning in warnings])


class _TarSamples:
    """The samples so far, one row each.

    Attributes:
        fields: values of those that are asked for, or that every sample has; and `left_out`, the others.
        part_names: some of those that members have.
        labels_are_parts: whether labels are the texts of parts, or else values in .json.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.refs: list[SampleRef] = []
        self.ignored: list[IgnoredPath] = []
        self.fields: dict[str, list[Any]] = {name: [] for name in options.fields}
        self.left_out: dict[str, None] = {}
        self.part_names: dict[str, None] = {}
        self.labels_are_parts = options.label is None
        self._options = options
        self._tars: list[tuple[int, str]] = []  # first row and path of each
        self._labels: list[Any] = []

    def read(self, archive: Archive, start: int, split: str) -> None:
        """Add the samples of a tar, whose places count from `start`."""
        self._tars.append((len(self.refs), archive.shown))
        samples = self._samples(archive)
        for key in list(samples):
            sample = samples.pop(key)  # one by one: they take as much memory as what is made of them
            row, where = len(self.refs), f"{archive.shown}: sample {key!r}"
            label = self._label_part(sample.parts, where)
            if sample.picture is None and label is None:
                if sample.parts:
                    self.ignored.append(IgnoredPath(key, "has no picture and no label"))
                continue
            if sample.picture is None:
                self.refs.append(SampleRef(row, key, -1, -1, split, archive.modified_ns, start))
            else:
                _, path, place, size = sample.picture
                self.refs.append(SampleRef(row, path, -1, size, split, archive.modified_ns, start + place))
            values = self._values_of(key, sample.parts, where)
            self._labels.append(self._label(label, values, where))
            self._add_fields(values, where)

    def where(self, row: int) -> str:
        """The name of a sample for messages: its tar and its key."""
        tar = self._tars[bisect_right(self._tars, row, key=lambda tar: tar[0]) - 1][1]
        folder, base = os.path.split(self.refs[row].path)
        return f"{tar}: sample {os.path.join(folder, base.partition('.')[0])!r}"

    def _samples(self, archive: Archive) -> dict[str, _Sample]:
        samples: dict[str, _Sample] = {}
        for member in archive.members():
            name = member.name
            parts = parts_of(name)
            reason = NO_NAME if parts is None else None
            base, _, part = parts[-1].partition(".") if parts else ("", "", "")
            if reason is None and (member.kind != FILE or not base or not part):
                reason = "is not a file with a key and an extension"
            elif reason is None and _META.match(name):
                reason = "has a name with two underscores on both sides, which is of no sample"
            if parts is None or reason is not None:
                if member.kind != FOLDER:
                    self.ignored.append(IgnoredPath(name, reason or ""))
                continue
            key = "/".join((*parts[:-1], base))
            sample = samples.setdefault(key, _Sample())
            self._take(archive, member, sample, part.lower(), "/".join(parts))
        return samples

    def _take(self, tar: Archive, member: Member, sample: _Sample, part: str, path: str) -> None:
        if len(self.part_names) < _SHOWN_PARTS:
            self.part_names[part] = None
        wanted, label = self._options.image, self._options.label
        is_named = part in _READ or (label is not None and part == label.lower())
        if part == wanted.lower() if wanted is not None else _is_picture(part):
            if sample.picture is not None and sample.picture[0] != part:
                others = f"{sample.picture[0]} and {part}"
                raise SourceError(
                    f"{tar.shown}: {path!r} is the second picture of its sample ({others}), for the key of a "
                    f"sample ends at the first dot; say which one is meant, as --image {part}, or write "
                    f"names without other dots"
                )
            if sample.picture is not None:
                self.ignored.append(IgnoredPath(path, "appears again later in the tar; the last one is used"))
            sample.picture = (part, path, member.place, member.size)
        elif is_named or (kind_of(part) in _READ and member.size <= _MOST_TEXT_BYTES):
            if member.size > _MOST_TEXT_BYTES:
                raise SourceError(
                    f"{tar.shown}: {path!r} has {member.size:,} bytes, expected text of at most "
                    f"{_MOST_TEXT_BYTES:,}; leave it out of the tar"
                )
            sample.parts[part] = tar.content(f"{tar.shown}: {path!r}", member.place, member.size)
        else:
            self.ignored.append(IgnoredPath(path, "has an extension that is not read"))

    def _label_part(self, parts: dict[str, bytes], where: str) -> str | None:
        """The text of the part that is the label; None where there is none, or the label stands in .json."""
        asked = self._options.label
        names = _parts_called(parts, LABEL) if asked is None else [asked.lower()]
        if len(names) > 1 and self._options.target != "none":
            raise SourceError(
                f"{where} has several labels ({', '.join(names)}); say which one is meant, as --label "
                f"{names[0]}"
            )
        if len(names) != 1 or names[0] not in parts:
            return None
        self.labels_are_parts = True
        # one text for each class, however many samples have it
        return sys.intern(_text_of(parts[names[0]], f"{where}.{names[0]}").strip())

    def _values_of(self, key: str, parts: dict[str, bytes], where: str) -> dict[str, Any]:
        """The values in the .json and the .txt of a sample.

        Raises:
            SourceError: they cannot be read, in a part that is called .json or .txt alone.
        """
        values: dict[str, Any] = {}
        for kind in (FIELDS, TEXT):
            names = _parts_called(parts, kind)
            reason = f"is one of several .{kind} of its sample"
            if len(names) == 1:
                try:
                    values |= _VALUES[kind](parts[names[0]], f"{where}.{names[0]}")
                    continue
                except SourceError:
                    if names[0] == kind:
                        raise
                    reason = "holds no fields"  # but a list of boxes, or anything else
            self.ignored += (IgnoredPath(f"{key}.{name}", reason) for name in names)
        return values

    def _label(self, part: str | None, values: dict[str, Any], where: str) -> Any:
        key = self._options.label
        if key == TEXT and part is not None and TEXT not in self._options.fields:
            del values[TEXT]
        if key is None or part is not None:
            return part
        if key not in values:
            raise SourceError(
                f"{where} has no part {key!r}, nor this key in its .json, for --label; it has "
                f"{_named(values)}"
            )
        return values[key] if key in self._options.fields else values.pop(key)

    def _add_fields(self, values: dict[str, Any], where: str) -> None:
        """Add the values of the last sample; SourceError if one that is asked for is missing."""
        asked = self._options.fields
        if len(self.refs) == 1 and not asked:
            self.fields = {name: [] for name in values}
        for name in list(self.fields):
            if name in values:
                self.fields[name].append(values[name])
            elif asked:
                raise SourceError(f"{where} has no {name!r} for --field; it has {_named(values)}")
            else:
                self.left_out[name] = None
                del self.fields[name]
        if not asked:
            self.left_out.update(dict.fromkeys(name for name in values if name not in self.fields))

    def labels_and_classes(self) -> tuple[list[Any] | None, tuple[str, ...] | None, list[str]]:
        """The labels, None where there are none; names that they index, if they do; and warnings.

        Whole numbers are what training with WebDataset takes them for: indices of classes.
        """
        options, labels = self._options, self._labels
        missing = next((row for row, label in enumerate(labels) if label is None), None)
        if missing is not None and options.label is None:
            if any(label is not None for label in labels):
                raise SourceError(f"{self.where(missing)}: missing .{LABEL}; other samples have one")
            warning = f"the labels are missing, no sample has a .{LABEL}; name a key of .json with --label"
            return None, None, [] if options.target == "none" else [warning]
        asked = (options.target, options.separator)
        if not self.labels_are_parts or asked != (None, None) or not any(map(_INDEX.fullmatch, labels)):
            return labels, None, []
        for row, label in enumerate(labels):
            if not _INDEX.fullmatch(label) or int(label) >= _MOST_CLASSES:
                raise SourceError(
                    f"{self.where(row)}: its label is {label[:60]!r}; expected the index of a class, 0 to "
                    f"{_MOST_CLASSES - 1:,}, as in other samples; for names of classes pass --target class"
                )
        indices = list(map(int, labels))
        return indices, tuple(map(str, range(max(indices) + 1))), []


def _parts_called(parts: Iterable[str], kind: str) -> list[str]:
    """Which parts are of this kind: the one that is called so alone, else those that end so."""
    return [kind] if kind in parts else [name for name in parts if kind_of(name) == kind]


def _object_of(content: bytes, where: str) -> dict[str, Any]:
    """The values in a .json; SourceError if it holds no object."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is not JSON ({error}); correct it") from error
    if not isinstance(found, dict):
        raise SourceError(f'{where} is not a JSON object; expected one, as {{"width": 640}}')
    return found


def _text_of(content: bytes, where: str) -> str:
    """Text in UTF-8; SourceError if it is not."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{where} is not UTF-8 (byte {error.start + 1:,}); save it as UTF-8") from error


_VALUES: dict[str, Callable[[bytes, str], dict[str, Any]]] = {
    FIELDS: _object_of,
    TEXT: lambda content, where: {TEXT: _text_of(content, where)},
}


def _named(values: Iterable[str]) -> str:
    """A few of the names, in a message."""
    return abridge([repr(name) for name in sorted(values)]) or "no field"
