"""`dataset.json`: what a converted dataset is. Written last, so a folder without it is not one.

Beside the shards lie `index.safetensors` and `source.safetensors`, see `precache.index`.
"""

import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from precache.columns import KINDS
from precache.errors import DatasetError, SettingError
from precache.files import FileEntry
from precache.history import Update, adds_up
from precache.index import INDEX_NAME, SOURCE_STATE_NAME, name_after
from precache.recipe import Recipe
from precache.sources.options import SourceOptions
from precache.statistics import ChannelStatistics
from precache.storage import atomic_write
from precache.storage.urls import Location
from precache.targets import TARGETS

MANIFEST_NAME = "dataset.json"
REJECTED_NAME = "rejected.csv"
VERSION = 4
READABLE = (2, 3, 4)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_WORDS = 200  # characters of an error that quotes what the file says
_HEX = re.compile(r"[0-9a-f]+")


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
        """As manifest and journal hold it."""
        return {"id": self.id, "path": self.path, "reason": self.reason}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "Rejected":
        """What `to_json` gave; TypeError or KeyError if `entry` is something else."""
        if len(entry) != 3:
            raise TypeError(f"id, path and reason are expected, got {', '.join(map(str, entry))}")
        return cls(path=entry["path"], reason=entry["reason"], id=entry["id"])


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One finished shard: the shard file first, then its index where the format has one."""

    name: str
    split: str
    samples: int
    files: tuple[FileEntry, ...]

    @property
    def file_name(self) -> str:
        """Name of the shard file."""
        return self.files[0].name


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A converted dataset.

    Attributes:
        recipe: the settings that it was made with.
        made_by: versions of what decoded and encoded the pictures.
        source_digest: SHA-256 over the source tree's sorted sample paths and sizes.
        source_bytes: size of the source pictures in bytes.
        classes: class names; a label is an index of it.
        samples_per_class: split -> number of samples of each class.
        shards: in written order, split by split.
        index: the file with ids, labels and source sizes of all samples.
        scanned: what the source tree holds: samples, rejected and ignored.
        rejected: pictures that could not be decoded.
        ignored: (path, reason) of what the source tree holds beside pictures.
        statistics: split -> mean and standard deviation of what is stored, of JPEGs before they became one,
            of samples that are removed, too;
            none with passthrough, and none before version 4.
        source_state: the file with sizes, times and checksums of the source; None in version 2.
        source_options: what was said of the source, see `precache.SourceOptions`.
        target: what the samples are labelled with, one of `precache.targets.TARGETS`.
        fields: what else the index knows of each sample: name -> kind, see `precache.columns`.
        next_id: above all ids that were ever used, where that is not `scanned`; else 0.
        updates: what became of it since it was converted, one after the other.
        removed: split -> samples of its shards that are served no more; none of a split without such.
        version: of the manifest's layout. Up to 3 there are no options and fields, and targets are classes.
    """

    recipe: Recipe
    made_by: dict[str, str]
    source_digest: str
    source_bytes: int
    classes: tuple[str, ...]
    samples_per_class: dict[str, tuple[int, ...]]
    shards: tuple[ShardEntry, ...]
    index: FileEntry
    scanned: int
    rejected: tuple[Rejected, ...]
    ignored: tuple[tuple[str, str], ...]
    source_state: FileEntry | None
    source_options: dict[str, Any] = field(default_factory=dict)
    target: str = "class"
    fields: dict[str, str] = field(default_factory=dict)
    statistics: dict[str, ChannelStatistics] = field(default_factory=dict)
    next_id: int = 0
    updates: tuple[Update, ...] = ()
    removed: dict[str, int] = field(default_factory=dict)
    version: int = VERSION

    @property
    def samples(self) -> int:
        """Samples in all splits, without those that are removed."""
        return self.stored_samples - sum(self.removed.values())

    @property
    def stored_samples(self) -> int:
        """Samples in all shards, removed ones too."""
        return sum(shard.samples for shard in self.shards)

    @property
    def split_samples(self) -> dict[str, int]:
        """Split -> samples, without those that are removed."""
        return {
            split: sum(s.samples for s in self.shards if s.split == split) - self.removed.get(split, 0)
            for split in self.samples_per_class
        }

    @property
    def stored_bytes(self) -> int:
        """Size of all files that the manifest names, in bytes."""
        return sum(file.bytes for file in self.files)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files of the dataset beside the manifest."""
        others = (self.index,) if self.source_state is None else (self.index, self.source_state)
        return (*(file for shard in self.shards for file in shard.files), *others)

    def to_flags(self) -> str:
        """The flags of `precache convert` that made it, to paste into a shell."""
        source = SourceOptions.from_json(self.source_options)
        return " ".join(filter(None, (self.recipe.to_flags(), source.to_flags())))

    @property
    def replaced_files(self) -> tuple[str, ...]:
        """Names of the files that updates have replaced by others; the last ones stay for who reads them."""
        numbers = range(len(self.updates))
        return tuple(name_after(name, n) for n in numbers for name in (INDEX_NAME, SOURCE_STATE_NAME))

    def split_shards(self, split: str) -> tuple[ShardEntry, ...]:
        """The shards of `split`; SettingError names the splits that there are."""
        shards = tuple(shard for shard in self.shards if shard.split == split)
        if not shards:
            splits = ", ".join(sorted({shard.split for shard in self.shards}))
            raise SettingError(f"unknown split {split!r}; choose from: {splits}")
        return shards


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `dataset.json` into `folder`: the commit of a conversion."""
    with atomic_write(folder / MANIFEST_NAME) as file:
        file.write(_encode(manifest))


def write_rejected(folder: Path, rejected: Sequence[Rejected]) -> None:
    """Write `rejected.csv` into `folder`, for people; the manifest has the same. None if none is."""
    if not rejected:
        return
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("id", "path", "reason"))
    writer.writerows((sample.id, sample.path, sample.reason) for sample in rejected)
    with atomic_write(folder / REJECTED_NAME) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))


def count_reasons(reasons: list[str]) -> dict[str, int]:
    """Reasons and how often each occurs, most frequent first."""
    return dict(Counter(reasons).most_common())


def parse_manifest(raw: bytes, path: Location) -> tuple[Manifest, str, bool]:
    """What the bytes of the file at `path` say: the manifest, its digest, and whether its checksum is right.

    The digest, SHA-256 in hex, identifies the dataset: it is that of the manifest without the source's times.

    Raises:
        DatasetError: no manifest, or one of a version that is not known.
    """
    content = _load_json(raw, path)
    digest = hashlib.sha256(raw).hexdigest() if content["version"] == 2 else _identity(content)
    return _decode(content, path), digest, content.get("checksum") == _checksum(content)


def _encode(manifest: Manifest) -> bytes:
    counts = {
        "scanned": manifest.scanned,
        "converted": manifest.samples,
        "rejected": len(manifest.rejected),
        "ignored": len(manifest.ignored),
    }
    fields = asdict(manifest)
    del fields["scanned"], fields["version"]
    content = {"version": manifest.version, "counts": counts, **fields}
    content["recipe"] = manifest.recipe.to_json()
    content["rejected"] = [rejected.to_json() for rejected in manifest.rejected]
    return (json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n").encode()


def _load_json(raw: bytes, path: Location) -> dict[str, Any]:
    """The manifest's JSON; DatasetError if it is none, or of a version that is not known."""
    try:
        content: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DatasetError(
            f"{path}: not valid JSON ({_in_words(error)}); convert the dataset again"
        ) from error
    version = content.get("version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise DatasetError(f"{path}: not a manifest of this project (no version); convert the dataset again")
    if version not in READABLE:
        raise DatasetError(
            f"{path}: manifest version {version}, expected {' or '.join(map(str, READABLE))}; "
            f"convert the dataset again or use the release that wrote it"
        )
    checked: dict[str, Any] = content
    return checked


def _in_words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    words = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}..."


def _checksum(content: dict[str, Any]) -> str:
    """SHA-256 (hex) of everything in a manifest but its checksum."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _identity(content: dict[str, Any]) -> str:
    return _checksum({name: value for name, value in content.items() if name != "source_state"})


def _decode(content: dict[str, Any], path: Location) -> Manifest:
    try:
        version = content["version"]
        fields = {name: value for name, value in content.items() if name not in ("checksum", "counts")}
        fields["scanned"] = content["counts"]["scanned"]
        fields["recipe"] = Recipe(**content["recipe"])
        fields["index"] = FileEntry(**content["index"])
        fields["source_state"] = None if version == 2 else FileEntry(**content["source_state"])
        statistics = content.get("statistics", {})
        fields["statistics"] = {s: ChannelStatistics.from_json(of) for s, of in statistics.items()}
        fields["classes"] = tuple(content["classes"])
        per_class = content["samples_per_class"]
        fields["samples_per_class"] = {split: tuple(counts) for split, counts in per_class.items()}
        fields["rejected"] = tuple(Rejected.from_json(entry) for entry in content["rejected"])
        fields["ignored"] = tuple((entry[0], entry[1]) for entry in content["ignored"])
        fields["shards"] = tuple(_decode_shard(entry) for entry in content["shards"])
        fields["updates"] = tuple(Update(**update) for update in content.get("updates", ()))
        manifest = Manifest(**fields)
        _check_manifest(manifest)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise DatasetError(
            f"{path}: not a manifest of this project ({_in_words(error)}); convert the dataset again"
        ) from error


def _decode_shard(entry: dict[str, Any]) -> ShardEntry:
    files = tuple(FileEntry(**file) for file in entry["files"])
    return ShardEntry(files=files, **{name: value for name, value in entry.items() if name != "files"})


def _check_manifest(manifest: Manifest) -> None:
    """Raise ValueError for what an edited manifest says, and no conversion: nothing else is trusted."""
    names = [file.name for file in manifest.files]
    for file in manifest.files:
        _require(isinstance(file.name, str) and _PLAIN_NAME.fullmatch(file.name), f"file name {file.name!r}")
        _require(_is_count(file.bytes), f"{file.bytes!r} bytes of {file.name}")
        _require(isinstance(file.crc32c, str) and _HEX.fullmatch(file.crc32c), f"CRC of {file.name}")
    _require(len(set(names)) == len(names) and MANIFEST_NAME not in names, "a file is named twice")
    updates = len(manifest.updates)
    _require(manifest.index.name == name_after(INDEX_NAME, updates), f"index {manifest.index.name!r}")
    state, state_name = manifest.source_state, name_after(SOURCE_STATE_NAME, updates)
    _require(state is None or state.name == state_name, "another file with the source's state")
    _require(manifest.shards and all(shard.files for shard in manifest.shards), "a shard without files")
    for shard in manifest.shards:
        _require(_is_count(shard.samples) and shard.samples > 0, f"{shard.samples!r} samples in {shard.name}")
        _require(isinstance(shard.split, str) and isinstance(shard.name, str), f"shard {shard.name!r}")
    classes = manifest.classes
    _require(manifest.target in TARGETS, f"target {manifest.target!r}")
    labelled = bool(classes) == (manifest.target in ("class", "classes"))
    _require(labelled and all(isinstance(name, str) for name in classes), "class names")
    described = manifest.fields.items()
    _require(all(isinstance(name, str) and kind in KINDS for name, kind in described), "fields")
    SourceOptions.from_json(manifest.source_options)  # raises, too
    _require(
        _is_count(manifest.next_id) and _is_count(manifest.scanned) and _is_count(manifest.source_bytes),
        "counts",
    )
    stored = Counter[str]()
    for shard in manifest.shards:
        stored[shard.split] += shard.samples
    _require(adds_up(manifest.updates, manifest.removed, stored), "updates")
    for split, counts in manifest.samples_per_class.items():
        inside = stored[split] - manifest.removed.get(split, 0)
        right = len(counts) == len(classes) and all(map(_is_count, counts))
        right = right and (manifest.target != "class" or sum(counts) == inside)
        _require(right, f"samples per class of split {split!r}")
    _require({s.split for s in manifest.shards} == set(manifest.samples_per_class), "splits")
    _require(set(manifest.statistics) <= set(manifest.samples_per_class), "splits of statistics")
    strings = [*(s.path for s in manifest.rejected), *(s.reason for s in manifest.rejected)]
    strings += [text for pair in manifest.ignored for text in pair]
    _require(all(isinstance(text, str) for text in strings), "a path or a reason that is no text")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _require(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(f"{what}: not as this project writes it")
