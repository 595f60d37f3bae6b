"""`dataset.json`: what a converted dataset is. Written last, so a folder without it is not one.

What grows with the samples lies in files of its own: `shards.safetensors`, see
`precache.dataset.shard_table`; `index.safetensors` and `source.safetensors`, see `precache.dataset.index`;
and `left_out.safetensors`, see `precache.dataset.left_out`. The manifest has their sizes and checksums.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from itertools import chain
from pathlib import Path
from typing import Any

from precache.dataset.columns import KINDS
from precache.dataset.files import FileEntry, Held
from precache.dataset.history import Update, adds_up
from precache.dataset.index import INDEX_NAME, SOURCE_STATE_NAME, name_after
from precache.dataset.left_out import LEFT_OUT_NAME, Rejected, listed_ignored, listed_rejected
from precache.dataset.shard_table import TABLE_NAME, ShardEntry, ShardTable, read_table
from precache.dataset.statistics import ChannelStatistics
from precache.dataset.targets import TARGETS
from precache.errors import DatasetError, SettingError
from precache.formats import FORMATS
from precache.recipe import Recipe
from precache.sources.options import SourceOptions
from precache.storage import atomic_write
from precache.storage.urls import Location

MANIFEST_NAME = "dataset.json"
VERSION = 5
READABLE = (2, 3, 4, 5)
NUMBERED = (INDEX_NAME, SOURCE_STATE_NAME, TABLE_NAME, LEFT_OUT_NAME)
"""What an update writes anew, under another name, see `precache.dataset.index.name_after`."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_WORDS = 200  # characters of an error that quotes what the file says
_HEX = re.compile(r"[0-9a-f]{1,8}")


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
        rejected: pictures that could not be decoded; read when they are asked for.
        ignored: (path, reason) of what the source tree holds beside pictures; likewise.
        table: the file with the shards; None before version 5.
        left_out: the file with what is rejected and ignored; None if there is nothing, and before version 5.
        statistics: split -> mean and standard deviation of what is stored, of JPEGs before they became one,
            of samples that are removed, too; none before version 4.
        source_state: the file with sizes, times and checksums of the source; None in version 2.
        source_options: what was said of the source, see `precache.SourceOptions`.
        target: what the samples are labelled with, one of `precache.dataset.targets.TARGETS`.
        fields: what else the index knows of each sample: name -> kind, see `precache.dataset.columns`.
        next_id: above all ids that were ever used, where that is not `scanned`; else 0.
        updates: what became of it since it was converted, one after the other.
        removed: split -> samples of its shards that are served no more; none of a split without such.
        version: of the manifest's layout. Up to 3 there are no options and fields, and targets are classes;
            up to 4 it lists all that grows with the samples itself.
    """

    recipe: Recipe
    made_by: dict[str, str]
    source_digest: str
    source_bytes: int
    classes: tuple[str, ...]
    samples_per_class: dict[str, tuple[int, ...]]
    shards: ShardTable
    index: FileEntry
    scanned: int
    rejected: Sequence[Rejected]
    ignored: Sequence[tuple[str, str]]
    source_state: FileEntry | None
    table: FileEntry | None = None
    left_out: FileEntry | None = None
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
        return int(self.shards.samples.sum())

    @property
    def split_samples(self) -> dict[str, int]:
        """Split -> samples, without those that are removed."""
        stored = self.shards.samples_of_splits()
        return {split: stored[split] - self.removed.get(split, 0) for split in self.samples_per_class}

    @property
    def stored_bytes(self) -> int:
        """Size of all files that the manifest names, in bytes."""
        return int(self.shards.bytes.sum()) + sum(file.bytes for file in self.columns)

    @property
    def files(self) -> Iterator[FileEntry]:
        """All files of the dataset beside the manifest, one after the other: there may be many."""
        return chain((file for shard in self.shards for file in shard.files), self.columns)

    @property
    def columns(self) -> tuple[FileEntry, ...]:
        """The files beside shards and manifest."""
        every = (self.index, self.source_state, self.table, self.left_out)
        return tuple(file for file in every if file is not None)

    def to_flags(self) -> str:
        """The flags of `precache convert` that made it, to paste into a shell."""
        source = SourceOptions.from_json(self.source_options)
        return " ".join(filter(None, (self.recipe.to_flags(), source.to_flags())))

    @property
    def replaced_files(self) -> tuple[str, ...]:
        """Names of the files that updates have replaced by others; the last ones stay for who reads them."""
        numbers = range(len(self.updates))
        return tuple(name_after(name, n) for n in numbers for name in NUMBERED)

    def split_shards(self, split: str) -> ShardTable:
        """The shards of `split`; SettingError names the splits that there are."""
        chosen = self.shards.of_split(split)
        if not chosen.any():
            splits = ", ".join(sorted(self.shards.split_names))
            raise SettingError(f"unknown split {split!r}; choose from: {splits}")
        return self.shards.select(chosen)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `dataset.json` into `folder`: the commit of a conversion."""
    with atomic_write(folder / MANIFEST_NAME) as file:
        file.write(_encode(manifest))


def count_reasons(reasons: list[str]) -> dict[str, int]:
    """Reasons and how often each occurs, most frequent first."""
    return dict(Counter(reasons).most_common())


def parse_manifest(raw: bytes, path: Location, held: Held) -> tuple[Manifest, str, bool]:
    """What the bytes of the file at `path` say: the manifest, its digest, and whether its checksum is right.

    The digest, SHA-256 in hex, identifies the dataset: it is that of the manifest without the source's times.

    Args:
        held: of the dataset's other files.

    Raises:
        DatasetError: no manifest, or one of a version that is not known; TableError: one without its table.
    """
    content = _load_json(raw, path)
    digest = hashlib.sha256(raw).hexdigest() if content["version"] == 2 else _identity(content)
    return _decode(content, path, held), digest, content.get("checksum") == _checksum(content)


def _encode(manifest: Manifest) -> bytes:
    counts = {
        "scanned": manifest.scanned,
        "converted": manifest.samples,
        "rejected": len(manifest.rejected),
        "ignored": len(manifest.ignored),
    }
    assert manifest.table is not None
    elsewhere = ("scanned", "version", "rejected", "ignored", "shards", "table")
    fields = {f.name: getattr(manifest, f.name) for f in fields_of(manifest) if f.name not in elsewhere}
    content: dict[str, Any] = {"version": manifest.version, "counts": counts, **fields}
    content["recipe"] = manifest.recipe.to_json()
    content["shards"] = {"splits": manifest.shards.split_names, **asdict(manifest.table)}
    content = json.loads(json.dumps(content, default=asdict))
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


def _decode(content: dict[str, Any], path: Location, held: Held) -> Manifest:
    try:
        version, counts = content["version"], content["counts"]
        fields = {name: value for name, value in content.items() if name not in ("checksum", "counts")}
        fields["scanned"] = counts["scanned"]
        fields["recipe"] = Recipe(**content["recipe"])
        fields["index"] = FileEntry(**content["index"])
        fields["source_state"] = None if version == 2 else FileEntry(**content["source_state"])
        statistics = content.get("statistics", {})
        fields["statistics"] = {s: ChannelStatistics.from_json(of) for s, of in statistics.items()}
        fields["classes"] = tuple(content["classes"])
        per_class = content["samples_per_class"]
        fields["samples_per_class"] = {split: tuple(counts) for split, counts in per_class.items()}
        fields["updates"] = tuple(Update(**update) for update in content.get("updates", ()))
        fields |= _listed(content, fields["recipe"]) if version < 5 else _in_columns(content, held)
        manifest = Manifest(**fields)
        _check_manifest(manifest)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise DatasetError(
            f"{path}: not a manifest of this project ({_in_words(error)}); convert the dataset again"
        ) from error


def _listed(content: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """What a manifest before version 5 lists itself."""
    rejected = tuple(Rejected.from_json(entry) for entry in content["rejected"])
    ignored = tuple((entry[0], entry[1]) for entry in content["ignored"])
    strings = [*(s.path for s in rejected), *(s.reason for s in rejected)]
    strings += [text for pair in ignored for text in pair]
    _require(all(isinstance(text, str) for text in strings), "a path or a reason that is no text")
    entries = [_decode_shard(entry) for entry in content["shards"]]
    _require(entries, "no shards")
    for shard in entries:
        _require(isinstance(shard.split, str) and isinstance(shard.name, str), f"shard {shard.name!r}")
        _require(_is_count(shard.samples) and shard.samples > 0, f"{shard.samples!r} samples in {shard.name}")
        for file in shard.files:
            _check_file(file)
    names = [file.name for shard in entries for file in shard.files]
    _require(len(set(names)) == len(names), "a file is named twice")
    shards = ShardTable.of(entries, FORMATS[recipe.format])
    return {"rejected": rejected, "ignored": ignored, "shards": shards}


def _in_columns(content: dict[str, Any], held: Held) -> dict[str, Any]:
    """What from version 5 on lies in other files."""
    updates, counts = len(content["updates"]), content["counts"]
    about = dict(content["shards"])
    splits = tuple(about.pop("splits"))
    table = FileEntry(**about)
    _check_file(table, name_after(TABLE_NAME, updates))
    _require(splits and all(type(split) is str for split in splits), "splits of shards")
    left_out = None if content["left_out"] is None else FileEntry(**content["left_out"])
    rejected, ignored = counts["rejected"], counts["ignored"]
    _require(_is_count(rejected) and _is_count(ignored), "counts")
    _require((left_out is None) == (rejected + ignored == 0), "what is left out")
    if left_out is not None:
        _check_file(left_out, name_after(LEFT_OUT_NAME, updates))
    return {
        "shards": read_table(held, table, splits, FORMATS[content["recipe"]["format"]]),
        "table": table,
        "left_out": left_out,
        "rejected": listed_rejected(held, left_out, rejected),
        "ignored": listed_ignored(held, left_out, ignored),
    }


def _decode_shard(entry: dict[str, Any]) -> ShardEntry:
    files = tuple(FileEntry(**file) for file in entry["files"])
    return ShardEntry(files=files, **{name: value for name, value in entry.items() if name != "files"})


def _check_manifest(manifest: Manifest) -> None:
    """Raise ValueError for what an edited manifest says, and no conversion: nothing else is trusted."""
    updates = len(manifest.updates)
    _check_file(manifest.index, name_after(INDEX_NAME, updates))
    if manifest.source_state is not None:
        _check_file(manifest.source_state, name_after(SOURCE_STATE_NAME, updates))
    for file in manifest.columns:
        _require(not manifest.shards.has_file(file.name), f"a shard named {file.name}")
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
    stored = manifest.shards.samples_of_splits()
    _require(adds_up(manifest.updates, manifest.removed, stored), "updates")
    _require(set(stored) == set(manifest.samples_per_class) and all(stored.values()), "splits")
    for split, counts in manifest.samples_per_class.items():
        inside = stored[split] - manifest.removed.get(split, 0)
        right = len(counts) == len(classes) and all(map(_is_count, counts))
        right = right and (manifest.target != "class" or sum(counts) == inside)
        _require(right, f"samples per class of split {split!r}")
    _require(set(manifest.statistics) <= set(manifest.samples_per_class), "splits of statistics")


def _check_file(file: FileEntry, name: str | None = None) -> None:
    """Of this name; None: any that leads nowhere else."""
    right = isinstance(file.name, str) and _PLAIN_NAME.fullmatch(file.name)
    _require(right and name in (None, file.name), f"file name {file.name!r}")
    _require(_is_count(file.bytes), f"{file.bytes!r} bytes of {file.name}")
    _require(isinstance(file.crc32c, str) and _HEX.fullmatch(file.crc32c), f"CRC of {file.name}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _require(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(f"{what}: not as this project writes it")
