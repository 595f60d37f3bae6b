"""`dataset.json`: what a converted dataset is. Written last, so a folder without it is not one.

What grows with the samples lies in `dataset.index`, see `precache.dataset.index`. The manifest has the sizes
and checksums of this file.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from itertools import chain
from pathlib import Path
from typing import Any

from precache.dataset.columns import KINDS, TARGETS
from precache.dataset.files import FileEntry, Held
from precache.dataset.index import (
    ENDS,
    REJECTED_NAME,
    SOURCE,
    IndexEntry,
    IndexFile,
    IndexFileError,
    Rejected,
    index_name,
    listed_ignored,
    listed_rejected,
)
from precache.dataset.shard_table import ShardTable, read_table
from precache.dataset.statistics import ChannelStatistics
from precache.errors import DatasetError, SettingError
from precache.formats import FORMATS
from precache.recipe import SPLIT_NAME, Recipe, as_flags
from precache.storage import atomic_write
from precache.storage.urls import Location

MANIFEST_NAME = "dataset.json"
VERSION = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
EDITED = "was edited or damaged (its checksum does not fit its content)"
_MOST_WORDS = 200  # characters of an error that quotes what the file says
# what JSON makes of those of its values that are taken apart
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("counts", "recipe", "index", "source_options"), dict),
    **dict.fromkeys(("fields", "made_by", "removed", "samples_per_class", "statistics"), dict),
    **dict.fromkeys(("classes", "splits", "updates"), list),
    "source_digest": str,
}


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did, see `precache.conversion.update`.

    Attributes:
        added, removed: how many samples.
        made_by: as of the manifest, of the samples that it added.
    """

    added: int
    removed: int
    made_by: dict[str, str]


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
        index: the file with all that grows with the samples.
        scanned: what the source tree holds: samples, rejected and ignored.
        rejected: pictures that could not be decoded; read when they are asked for.
        ignored: (path, reason) of what the source tree holds beside pictures; likewise.
        statistics: split -> mean and standard deviation of what is stored, of JPEGs before they became one,
            of samples that are removed, too.
        source_options: what was said of the source, as `precache.SourceOptions.given` has it.
        target: what the samples are labelled with, one of `precache.dataset.columns.TARGETS`.
        fields: what else the index knows of each sample: name -> kind, see `precache.dataset.columns`.
        next_id: above all ids that were ever used, where that is not `scanned`; else 0.
        updates: what became of it since it was converted, one after the other.
        removed: split -> samples of its shards that are served no more; none of a split without such.
    """

    recipe: Recipe
    made_by: dict[str, str]
    source_digest: str
    source_bytes: int
    classes: tuple[str, ...]
    samples_per_class: dict[str, tuple[int, ...]]
    shards: ShardTable
    index: IndexEntry
    scanned: int
    rejected: Sequence[Rejected]
    ignored: Sequence[tuple[str, str]]
    source_options: dict[str, Any] = field(default_factory=dict)
    target: str = "class"
    fields: dict[str, str] = field(default_factory=dict)
    statistics: dict[str, ChannelStatistics] = field(default_factory=dict)
    next_id: int = 0
    updates: tuple[Update, ...] = ()
    removed: dict[str, int] = field(default_factory=dict)

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
        return int(self.shards.bytes.sum()) + self.index.bytes

    @property
    def files(self) -> Iterator[FileEntry]:
        """All files of the dataset beside the manifest, one after the other: there may be many."""
        return chain((file for shard in self.shards for file in shard.files), (self.index,))

    @property
    def own_names(self) -> frozenset[str]:
        """Of all files that may be removed with the dataset, the manifest apart; others are the user's."""
        listed = (REJECTED_NAME,) if self.rejected else ()
        return frozenset((*(file.name for file in self.files), *self.replaced_files, *listed))

    def to_flags(self) -> str:
        """The flags of `precache convert` that made it, to paste into a shell."""
        return " ".join(filter(None, (self.recipe.to_flags(), as_flags(self.source_options))))

    @property
    def replaced_files(self) -> tuple[str, ...]:
        """Names of the files that updates have replaced by others; the last ones stay for who reads them."""
        return tuple(map(index_name, range(len(self.updates))))

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


def parse_manifest(raw: bytes, path: Location, held: Held) -> tuple[Manifest, str, bool]:
    """What the bytes of the file at `path` say: the manifest, its digest, and whether its checksum is right.

    The digest, SHA-256 in hex, identifies the dataset: it is that of the manifest without the source's times.

    Args:
        held: of the dataset's other files.

    Raises:
        DatasetError: no manifest, or one of another version; IndexFileError: one without its index.
    """
    try:
        content = _load_json(raw, path)
        intact = content.get("checksum") == _checksum(content)
        try:
            return _decode(content, path, held), _identity(content), intact
        except IndexFileError as error:
            if intact:
                raise
            raise DatasetError(f"{path}: {EDITED}; convert the dataset again with --overwrite") from error
    except RecursionError as error:
        raise DatasetError(f"{path}: not valid JSON (nested too deep); convert the dataset again") from error


def _encode(manifest: Manifest) -> bytes:
    content = _content_of(manifest)
    return (json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n").encode()


def _content_of(manifest: Manifest) -> dict[str, Any]:
    """All that `dataset.json` says but its checksum, as plain JSON values."""
    counts = {
        "scanned": manifest.scanned,
        "converted": manifest.samples,
        "rejected": len(manifest.rejected),
        "ignored": len(manifest.ignored),
    }
    elsewhere = ("scanned", "rejected", "ignored", "shards")
    fields = {f.name: getattr(manifest, f.name) for f in fields_of(manifest) if f.name not in elsewhere}
    content: dict[str, Any] = {"version": VERSION, "counts": counts, **fields}
    content["recipe"] = manifest.recipe.to_json()
    content["splits"] = manifest.shards.split_names
    plain: dict[str, Any] = json.loads(json.dumps(content, default=asdict))
    return plain


def _load_json(raw: bytes, path: Location) -> dict[str, Any]:
    """The manifest's JSON; DatasetError if it is none, or of another version."""
    try:
        content: Any = json.loads(raw)
    except ValueError as error:
        raise DatasetError(
            f"{path}: not valid JSON ({_in_words(error)}); convert the dataset again"
        ) from error
    version = content.get("version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise DatasetError(f"{path}: not a manifest of this project (no version); convert the dataset again")
    if version != VERSION:
        raise DatasetError(
            f"{path}: manifest version {version}, expected {VERSION}; convert the dataset again, or use the "
            f"release that wrote it"
        )
    checked: dict[str, Any] = content
    return checked


def _in_words(error: Exception) -> str:
    words = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}..."


def _checksum(content: dict[str, Any]) -> str:
    """SHA-256 (hex) of everything in a manifest but its checksum."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _identity(content: dict[str, Any]) -> str:
    columns = content["index"]["columns"].items()
    index = {
        **content["index"],
        "crc32c": "",
        "columns": {name: checksum for name, checksum in columns if not name.startswith(SOURCE)},
    }
    return _checksum({**content, "index": index})


def _decode(content: dict[str, Any], path: Location, held: Held) -> Manifest:
    try:
        fields = {
            n: value for n, value in content.items() if n not in ("version", "checksum", "counts", "splits")
        }
        for name, kind in _KINDS.items():
            _require(isinstance(content[name], kind), name)
        _require(all(isinstance(update, dict) for update in content["updates"]), "updates")
        _require(all(isinstance(of, dict) for of in content["statistics"].values()), "statistics")
        fields["scanned"] = content["counts"]["scanned"]
        fields["recipe"] = Recipe(**content["recipe"])
        fields["index"] = IndexEntry(**content["index"])
        statistics = content["statistics"].items()
        fields["statistics"] = {split: ChannelStatistics.from_json(of) for split, of in statistics}
        fields["classes"] = tuple(content["classes"])
        per_class = content["samples_per_class"].items()
        fields["samples_per_class"] = {split: tuple(counts) for split, counts in per_class}
        fields["updates"] = tuple(Update(**update) for update in content["updates"])
        manifest = Manifest(**{**fields, **_in_index(content, fields["index"], held)})
        _check_manifest(manifest)
        # it is what is written of it; as text, for True is no 1, and 1.0 neither
        expected = _content_of(manifest)
        _require({*content} - {"checksum"} == {*expected}, "entries")
        for name, value in expected.items():
            said, written = (json.dumps(part, sort_keys=True) for part in (content.get(name), value))
            _require(said == written, name)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise DatasetError(
            f"{path}: not a manifest of this project ({_in_words(error)}); convert the dataset again"
        ) from error


def _in_index(content: dict[str, Any], entry: IndexEntry, held: Held) -> dict[str, Any]:
    """What lies in the index."""
    splits, counts = tuple(content["splits"]), content["counts"]
    named = splits and len(set(splits)) == len(splits) and all(map(SPLIT_NAME.fullmatch, splits))
    _require(named, "splits")
    rejected, ignored = counts["rejected"], counts["ignored"]
    _require(_is_count(rejected) and _is_count(ignored), "counts")
    checksums = (entry.header, *entry.columns.values())
    _require(all(map(_CHECKSUM.fullmatch, checksums)), "checksums of the index")
    with held(entry):  # once, where it must be fetched
        file = IndexFile(held, entry)
        _require(rejected == file.rows("rejected:ids"), "counts")
        _require(ignored == file.rows(f"{ENDS}ignored:paths"), "counts")
        return {
            "shards": read_table(file, splits, FORMATS[content["recipe"]["format"]]),
            "rejected": listed_rejected(file, rejected),
            "ignored": listed_ignored(file, ignored),
        }


def _check_manifest(manifest: Manifest) -> None:
    """Raise ValueError for what an edited manifest says, and no conversion: nothing else is trusted."""
    _require(manifest.index.name == index_name(len(manifest.updates)), f"file name {manifest.index.name!r}")
    classes = manifest.classes
    _require(manifest.target in TARGETS, f"target {manifest.target!r}")
    labelled = bool(classes) == (manifest.target in ("class", "classes"))
    _require(labelled and all(isinstance(name, str) for name in classes), "class names")
    described = manifest.fields.items()
    _require(all(isinstance(name, str) and kind in KINDS for name, kind in described), "fields")
    for name, value in manifest.source_options.items():
        texts = value if name in ("fields", "classes") and isinstance(value, list) else [value]
        plain = texts and all(isinstance(text, str) and text for text in texts)
        right = _is_count(value) if name == "class_depth" else plain
        right = right and isinstance(value, list) == (name in ("fields", "classes"))
        _require(name.isidentifier() and right, "source options")
    boxes = manifest.source_options.get("boxes")
    _require(boxes is None or manifest.fields.get(boxes) == "ragged", "boxes")
    for made_by in (manifest.made_by, *(update.made_by for update in manifest.updates)):
        _require(all(isinstance(version, str) for version in made_by.values()), "made_by")
    _require(_DIGEST.fullmatch(manifest.source_digest), "source_digest")
    _require(all(map(_is_count, (manifest.next_id, manifest.scanned, manifest.source_bytes))), "counts")
    stored = manifest.shards.samples_of_splits()
    _require(_adds_up(manifest.updates, manifest.removed, stored), "updates")
    _require(set(stored) == set(manifest.samples_per_class) and all(stored.values()), "splits")
    for split, counts in manifest.samples_per_class.items():
        inside = stored[split] - manifest.removed.get(split, 0)
        right = len(counts) == len(classes) and all(map(_is_count, counts))
        right = right and (manifest.target != "class" or sum(counts) == inside)
        _require(right, f"samples per class of split {split!r}")
    _require(set(manifest.statistics) <= set(manifest.samples_per_class), "splits of statistics")


def _adds_up(updates: Sequence[Update], removed: Mapping[str, int], stored: Mapping[str, int]) -> bool:
    """Whether this is the history of a dataset: split -> samples removed, and stored, removed ones too."""
    numbers = [number for update in updates for number in (update.added, update.removed)]
    return (
        all(map(_is_count, (*numbers, *removed.values())))
        and all(count <= stored.get(split, 0) for split, count in removed.items())
        and sum(update.removed for update in updates) == sum(removed.values())
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _require(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(f"{what}: not as this project writes it")
