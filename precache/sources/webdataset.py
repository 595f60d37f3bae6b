"""WebDataset tars, in which a sample is all members with one key, the part of a name before its first dot.

    00042.jpg    the picture
    00042.cls    its class: a whole number is the index of the class, text its name
    00042.json   an object with fields; fields that all samples have are kept
    00042.txt    text, which is kept as the field 'txt'

The rest of a name, behind the first dot, is the part's name, which may have dots: 00042.input.jpg,
00042.target.cls. Its last extension says the kind of part. Samples are those that the webdataset library
reads (https://github.com/webdataset/webdataset), except that hidden files are ignored, and that the parts of
a sample need not be next to each other.

A source is one tar, or all tars in a folder and in its folders, sorted by name. Ids are the ranks of the keys
in stored order. A sample with a label and no picture is rejected when it is
converted. Names say the splits: birds-train-0000.tar, validation-00000-of-00002.tar, test/0.tar.
"""

import itertools
import json
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precache.errors import ImageError, SourceError, shell_command
from precache.pictures import kinds
from precache.pictures.reading import check_bytes
from precache.reporting import abridge, quantity
from precache.sources.base import IgnoredPath, SampleList, SampleRef, Scan
from precache.sources.options import SourceOptions
from precache.sources.tar import MAX_TEXT_BYTES, Member, Tar, open_tar
from precache.sources.targets import RowValues, scan_rows

COMPRESSED_SUFFIXES = (
    ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz", ".tar.zst", ".tzst"
)  # fmt: skip
LABEL, FIELDS, TEXT = "cls", "json", "txt"
"""Extensions of the parts that are read besides pictures."""
_PART_KINDS = (LABEL, FIELDS, TEXT)
_META_NAME = re.compile(r"__[^/]*__(/|$)")  # names that the webdataset library skips
_MAX_CLASSES = 100_000
_CLASS_INDEX = re.compile(r"[0-9]{1,9}|-1")  # -1: no label, as in test splits
_MAX_PART_NAMES = 20  # part names that are kept for a message
_REPEATED = "appears again later in the tar; the last one is used"
_MAX_FOLDERS = 255  # how many folders may lie around a file


def is_tar(name: str) -> bool:
    """Return whether a file of this name is a tar, compressed or not."""
    return name.lower().endswith((".tar", *COMPRESSED_SUFFIXES))


def part_kind(part: str) -> str:
    """Return the last extension of a part's name, in lower case."""
    return part.rpartition(".")[2].lower()


def _has_picture_name(part: str) -> bool:
    return kinds.extension(f"x.{part}") in kinds.IMAGE_EXTENSIONS


@dataclass(frozen=True, slots=True)
class WebDatasetSource:
    """WebDataset tars as a `Source`.

    Attributes:
        root: folder of the tars, or the only tar.
        files: split of each tar, by its path in the folder.
        tars: readers of the tars, after the scan.
        starts: offset of each tar in all tars joined, in bytes; `SampleRef.offset` is an offset in these.
        has_tar_in_paths: whether samples' paths begin with the tar's name, since a key is in several tars.
    """

    root: Path
    options: SourceOptions
    files: Mapping[str, str]
    tars: tuple[Tar, ...] = ()
    starts: tuple[int, ...] = ()
    has_tar_in_paths: bool = False

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.root,)

    def scan(self) -> Scan:
        folder = self.root if self.root.is_dir() else self.root.parent
        return _scan_tars(self, [open_tar(folder / name) for name in self.files])

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        where = self.where(ref)
        if ref.bytes < 0:
            raise ImageError(where, "has no picture, only other parts")
        check_bytes(where, ref.bytes, max_pixels)
        tar = self._tar_index(ref)
        return self.tars[tar].read(where, ref.offset - self.starts[tar], ref.bytes)

    def where(self, ref: SampleRef) -> str:
        """Return the name for messages: the tar's path, and the member's name."""
        if self.has_tar_in_paths:
            return os.path.join(self.root, ref.path)
        return os.path.join(self.tars[self._tar_index(ref)].path, ref.path)

    def _tar_index(self, ref: SampleRef) -> int:
        return bisect_right(self.starts, ref.offset) - 1


def _scan_tars(source: WebDatasetSource, tars: Sequence[Tar]) -> Scan:
    """List the samples of the tars of a source.

    Raises:
        SourceError: a tar is damaged or cannot be read, there are no pictures, or a part of a sample cannot
            be parsed.
    """
    root, options, names = source.root, source.options, list(source.files)
    starts = tuple(itertools.accumulate((tar.size for tar in tars[:-1]), initial=0))
    samples = _TarSamples(options)
    for tar, start, split in zip(tars, starts, source.files.values(), strict=True):
        samples.add_tar(tar, start, split, is_whole_source=not root.is_dir())
    has_pictures = any(ref.bytes >= 0 for ref in samples.refs)
    if not has_pictures and options.image is not None:
        raise SourceError(
            f"no sample has a part {options.image!r} for --image",
            path=root,
            remedy=f"there are {_some_names(samples.part_names)}",
        )
    if not has_pictures:
        raise SourceError("has no pictures; expected samples as 0001.jpg and 0001.cls in its tars", path=root)
    has_tar_in_paths = len({ref.path for ref in samples.refs}) < len(samples.refs)
    labels, classes, warnings = samples.labels_and_classes()
    values = RowValues(
        row_name=samples.row_name,
        label=None if labels is None else options.label or LABEL,
        label_cells=labels or [],
        class_names=classes,
        fields=samples.fields,
        labels_are_text=samples.labels_are_parts and classes is None,
        fields_are_optional=not options.fields,
    )
    rows = SampleList()
    for ref in samples.refs:
        path = ref.path
        if has_tar_in_paths:
            path = f"{names[bisect_right(starts, ref.offset) - 1]}/{path}"
        rows.add(path, ref.bytes, ref.modified_ns, ref.offset, ref.split)
    if samples.partial_fields:
        fields = abridge([repr(name) for name in samples.partial_fields])
        warnings.append(f"fields that only some samples have are left out: {fields}")
    if repeated := [repr(ignored.path) for ignored in samples.ignored if ignored.reason == _REPEATED]:
        count = quantity(len(repeated), "picture is", "pictures are")
        warnings.append(f"{count} left out, as the key comes again later in the tar: {abridge(repeated)}")
    source = replace(source, tars=tuple(tars), starts=starts, has_tar_in_paths=has_tar_in_paths)
    warnings = [f"{root}: {warning}" for warning in warnings]
    return scan_rows(source, rows, values, options, samples.ignored, warnings)


class _TarSamples:
    """Samples of tars, collected tar by tar.

    Attributes:
        refs: samples so far; a sample without a picture has -1 bytes.
        ignored: members that are not part of a sample, and parts that are not used.
        fields: values of the fields that the user has named, or else of those that every sample has.
        partial_fields: names of fields that only some samples have, in order; the values are None.
        part_names: names of some parts, for a message.
        labels_are_parts: whether labels are the texts of parts, not values in .json.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.refs: list[SampleRef] = []
        self.ignored: list[IgnoredPath] = []
        self.fields: dict[str, list[Any]] = {name: [] for name in options.fields}
        self.partial_fields: dict[str, None] = {}
        self.part_names: set[str] = set()
        self.labels_are_parts = options.label is None
        self._options = options
        self._text_suffixes = tuple(f".{part.lower()}" for part in (*_PART_KINDS, options.label) if part)
        self._first_rows: list[int] = []  # row of each tar's first sample
        self._tar_paths: list[str] = []
        self._labels: list[Any] = []

    def add_tar(self, tar: Tar, start: int, split: str, *, is_whole_source: bool) -> None:
        """Add the samples of a tar, whose offset in all tars joined is `start`."""
        self._first_rows.append(len(self.refs))
        self._tar_paths.append(tar.path)
        samples = self._group(tar)
        if is_whole_source and not any(itertools.starmap(_is_sample, samples.items())):
            raise tar.error(
                "holds no WebDataset samples, such as 0001.jpg with 0001.cls",
                f"run '{shell_command('tar xf', tar.path)}', and convert the folder",
            )
        for key in list(samples):
            parts = samples.pop(key)  # frees them, which take as much memory as the fields
            picture = self._take_picture(key, parts)
            texts = self._texts(key, parts)
            label_text = self._label_text(key, texts)
            if picture is None and label_text is None:
                if texts:
                    self.ignored.append(IgnoredPath(key, "has no picture and no label"))
                continue
            path, file_bytes, offset = key, -1, start
            if picture is not None:
                path, file_bytes, offset = picture.name, picture.size, start + picture.offset
            ref = SampleRef(len(self.refs), path, -1, file_bytes, split, tar.modified_ns, offset)
            self.refs.append(ref)
            values = self._field_values(key, texts)
            self._labels.append(self._take_label(key, label_text, values))
            self._add_fields(key, values)

    def _error(self, message: str, remedy: str = "") -> SourceError:
        """Return a SourceError about the tar that is being read."""
        return SourceError(message, path=self._tar_paths[-1], remedy=remedy)

    def row_name(self, row: int) -> str:
        """Return the name of a sample in messages: its tar and its key."""
        tar_name = self._tar_paths[bisect_right(self._first_rows, row) - 1]
        folder, base = os.path.split(self.refs[row].path)
        return f"{tar_name}: sample {os.path.join(folder, base.partition('.')[0])!r}"

    def _group(self, tar: Tar) -> dict[str, dict[str, Member]]:
        """Return the parts of each sample of a tar by their names, by the samples' keys."""
        samples: dict[str, dict[str, Member]] = {}
        for member in tar.members(self._text_suffixes):
            path = _path_parts(member.name)
            key, part = _key_and_part(path) if path else ("", "")
            if path is None:
                reason = "has a name that leads out of the tar, or that no file can have"
            elif not member.is_file or not key or not part:
                reason = "is not a file with a key and an extension"
            elif _META_NAME.match(member.name):
                reason = "has a name with two underscores on both sides, which is of no sample"
            else:
                name, part = "/".join(path), part.lower()
                parts = samples.setdefault(key, {})
                if part in parts and self._is_picture(part):
                    self.ignored.append(IgnoredPath(name, _REPEATED))
                parts[part] = member if name == member.name else member._replace(name=name)
                continue
            self.ignored.append(IgnoredPath(member.name, reason))
        return samples

    def _is_picture(self, part: str) -> bool:
        """Return whether the part of this name, in lower case, is the picture of its sample."""
        image = self._options.image
        return _has_picture_name(part) if image is None else part == image.lower()

    def _take_picture(self, key: str, parts: dict[str, Member]) -> Member | None:
        """Remove the picture from the parts of a sample, and return it."""
        if len(self.part_names) < _MAX_PART_NAMES:
            self.part_names.update(parts)
        names = [name for name in parts if self._is_picture(name)]
        if len(names) > 1:
            raise self._error(
                f"{parts[names[1]].name!r} is the second picture of its sample ({names[0]} and {names[1]}), "
                f"for the key of a sample ends at the first dot",
                f"say which one is meant, as --image {names[1]}, or write names without other dots",
            )
        return parts.pop(names[0]) if names else None

    def _texts(self, key: str, parts: dict[str, Member]) -> dict[str, bytes]:
        """Return the contents of those parts of a sample that may be its label or its fields."""
        required = (*_PART_KINDS, (self._options.label or "").lower())
        texts = {}
        for part, member in parts.items():
            if member.text is not None:
                texts[part] = member.text
            elif part in required and member.size > MAX_TEXT_BYTES:
                raise self._error(
                    f"{member.name!r} has {member.size:,} bytes, expected text of at most {MAX_TEXT_BYTES:,}",
                    "leave it out of the tar",
                )
            else:
                self.ignored.append(IgnoredPath(member.name, "has an extension that is not read"))
        return texts

    def _label_text(self, key: str, parts: dict[str, bytes]) -> str | None:
        """Return the text of the part with the label; None if there is none, or the label is in .json."""
        label = self._options.label
        names = _parts_of_kind(parts, LABEL) if label is None else [label.lower()]
        if len(names) > 1 and self._options.target != "none":
            raise self._error(
                f"sample {key!r} has several labels ({', '.join(names)})",
                f"say which one is meant, as --label {names[0]}",
            )
        if len(names) != 1 or names[0] not in parts:
            return None
        self.labels_are_parts = True
        # interned, so that all samples of a class share one text
        return sys.intern(self._decode_text(key, names[0], parts[names[0]]).strip())

    def _field_values(self, key: str, parts: dict[str, bytes]) -> dict[str, Any]:
        """Return the values in the .json and the .txt of a sample, by the names of fields.

        Raises:
            SourceError: the part `json` or `txt` cannot be parsed. One with a longer name, as boxes.json, is
                ignored then.
        """
        values: dict[str, Any] = {}
        for kind in (FIELDS, TEXT):
            names = _parts_of_kind(parts, kind)
            reason = f"is one of several .{kind} of its sample"
            if len(names) == 1:
                name, content = names[0], parts[names[0]]
                try:
                    if kind == FIELDS:
                        values |= self._parse_object(key, name, content)
                    else:
                        values[TEXT] = self._decode_text(key, name, content)
                    continue
                except SourceError:
                    if name == kind:
                        raise
                    reason = "holds no fields"  # but a list of boxes, or anything else
            self.ignored += (IgnoredPath(f"{key}.{name}", reason) for name in names)
        return values

    def _parse_object(self, key: str, part: str, content: bytes) -> dict[str, Any]:
        """Return the object in a .json; SourceError if there is none."""
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self._error(f"sample {key!r}.{part} is not JSON ({error})", "correct it") from error
        if not isinstance(value, dict):
            raise self._error(
                f'sample {key!r}.{part} is not a JSON object; expected one, as {{"width": 640}}'
            )
        return value

    def _decode_text(self, key: str, part: str, content: bytes) -> str:
        """Return the text of a part; SourceError if it is not UTF-8."""
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._error(
                f"sample {key!r}.{part} is not UTF-8 (byte {error.start + 1:,})", "save it as UTF-8"
            ) from error

    def _take_label(self, key: str, label_text: str | None, values: dict[str, Any]) -> Any:
        """Return the label of a sample, and remove it from its values unless it is a field, too."""
        label = self._options.label
        if label == TEXT and label_text is not None and TEXT not in self._options.fields:
            del values[TEXT]
        if label is None or label_text is not None:
            return label_text
        if label not in values:
            raise self._error(
                f"sample {key!r} has no part {label!r}, nor this key in its .json, for --label",
                f"it has {_some_names(values)}",
            )
        return values[label] if label in self._options.fields else values.pop(label)

    def _add_fields(self, key: str, values: dict[str, Any]) -> None:
        """Add the values of the last sample; SourceError if a field that the user has named is missing."""
        named_fields = self._options.fields
        if len(self.refs) == 1 and not named_fields:
            self.fields = {name: [] for name in values}
        for name in list(self.fields):
            if name in values:
                self.fields[name].append(values[name])
            elif named_fields:
                raise self._error(
                    f"sample {key!r} has no {name!r} for --field", f"it has {_some_names(values)}"
                )
            else:
                self.partial_fields[name] = None
                del self.fields[name]
        if not named_fields:
            self.partial_fields.update(dict.fromkeys(name for name in values if name not in self.fields))

    def labels_and_classes(self) -> tuple[list[Any] | None, tuple[str, ...] | None, list[str]]:
        """Return the labels (None without labels), the classes that they index (or None), and warnings.

        Whole numbers are indices of classes, as in training with the webdataset library.
        """
        options, labels = self._options, self._labels
        if options.target == "none":
            return None, None, []
        missing = next((row for row, label in enumerate(labels) if label is None), None)
        if missing is not None and options.label is None:
            if any(label is not None for label in labels):
                raise SourceError(f"missing .{LABEL}; other samples have one", path=self.row_name(missing))
            warning = f"the labels are missing, no sample has a .{LABEL}; name a key of .json with --label"
            return None, None, [warning]
        is_target_open = options.target is None and options.separator is None
        if not self.labels_are_parts or not is_target_open:
            return labels, None, []
        labels = [str(label) for label in labels]  # those of some samples may be values in .json
        if not any(_CLASS_INDEX.fullmatch(label) for label in labels):
            return labels, None, []
        for row, label in enumerate(labels):
            if not _CLASS_INDEX.fullmatch(label) or int(label) >= _MAX_CLASSES:
                raise SourceError(
                    f"its label is {label[:60]!r}; expected the index of a class, 0 to "
                    f"{_MAX_CLASSES - 1:,}, as in other samples",
                    path=self.row_name(row),
                    remedy="for names of classes pass --target class",
                )
        indices = list(map(int, labels))
        return indices, tuple(map(str, range(max(indices) + 1))), []


def _is_sample(key: str, parts: Iterable[str]) -> bool:
    """Return whether these parts are a WebDataset sample, rather than a picture in a class folder.

    Such a sample has a class beside its picture, or lies in no folder and has any part beside its picture.
    """
    other_kinds = (LABEL,) if "/" in key else _PART_KINDS
    return any(map(_has_picture_name, parts)) and any(part_kind(part) in other_kinds for part in parts)


def _path_parts(name: str) -> list[str] | None:
    """Return the names of folders and file in a member's name; None if such a name is not allowed."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name or len(parts) > _MAX_FOLDERS:
        return None
    return parts


def _key_and_part(path: Sequence[str]) -> tuple[str, str]:
    """Return the key of a sample and the name of its part in a member's path; no key for a hidden file."""
    base, _, part = path[-1].partition(".")
    return "/".join((*path[:-1], base)) if base else "", part


def _parts_of_kind(parts: Iterable[str], kind: str) -> list[str]:
    """Return the part with exactly this name, or else those with this extension."""
    return [kind] if kind in parts else [name for name in parts if part_kind(name) == kind]


def _some_names(names: Iterable[str]) -> str:
    """Return some of the names for a message."""
    return abridge([repr(name) for name in sorted(names)]) or "no field"
