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
from precache.dataset.left_out import LEFT_OUT_NAME, REJECTED_NAME, Rejected, listed_ignored, listed_rejected
from precache.dataset.shard_table import TABLE_NAME, ShardTable, read_table
from precache.dataset.statistics import ChannelStatistics
from precache.dataset.targets import TARGETS
from precache.errors import DatasetError, SettingError
from precache.formats import FORMATS
from precache.recipe import SPLIT_NAME, Recipe
from precache.sources.options import SourceOptions
from precache.storage import atomic_write
from precache.storage.urls import Location

MANIFEST_NAME = "dataset.json"
VERSION = 5
NUMBERED = (INDEX_NAME, SOURCE_STATE_NAME, TABLE_NAME, LEFT_OUT_NAME)
"""What an update writes anew, under another name, see `precache.dataset.index.name_after`."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_WORDS = 200  # characters of an error that quotes what the file says
# what JSON makes of those of its values that are taken apart
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("counts", "recipe", "index", "source_state", "source_options", "shards"), dict),
    **dict.fromkeys(("fields", "made_by", "removed", "samples_per_class", "statistics"), dict),
    **dict.fromkeys(("classes", "updates"), list),
    "left_out": dict | None,
    "source_digest": str,
}


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
        table: the file with the shards.
        left_out: the file with what is rejected and ignored; None if there is nothing.
        statistics: split -> mean and standard deviation of what is stored, of JPEGs before they became one,
            of samples that are removed, too.
        source_state: the file with sizes, times and checksums of the source.
        source_options: what was said of the source, see `precache.SourceOptions`.
        target: what the samples are labelled with, one of `precache.dataset.targets.TARGETS`.
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
    index: FileEntry
    scanned: int
    rejected: Sequence[Rejected]
    ignored: Sequence[tuple[str, str]]
    source_state: FileEntry
    table: FileEntry
    left_out: FileEntry | None = None
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
        return int(self.shards.bytes.sum()) + sum(file.bytes for file in self.columns)

    @property
    def files(self) -> Iterator[FileEntry]:
        """All files of the dataset beside the manifest, one after the other: there may be many."""
        return chain((file for shard in self.shards for file in shard.files), self.columns)

    @property
    def own_names(self) -> frozenset[str]:
        """Of all files that may be removed with the dataset, the manifest apart; others are the user's."""
        listed = (REJECTED_NAME,) if self.rejected else ()
        return frozenset((*(file.name for file in self.files), *self.replaced_files, *listed))

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
        DatasetError: no manifest, or one of another version; TableError: one without its table.
    """
    try:
        content = _load_json(raw, path)
        return _decode(content, path, held), _identity(content), content.get("checksum") == _checksum(content)
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
    elsewhere = ("scanned", "rejected", "ignored", "shards", "table")
    fields = {f.name: getattr(manifest, f.name) for f in fields_of(manifest) if f.name not in elsewhere}
    content: dict[str, Any] = {"version": VERSION, "counts": counts, **fields}
    content["recipe"] = manifest.recipe.to_json()
    content["shards"] = {"splits": manifest.shards.split_names, **asdict(manifest.table)}
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
    return _checksum({name: value for name, value in content.items() if name != "source_state"})


def _decode(content: dict[str, Any], path: Location, held: Held) -> Manifest:
    try:
        fields = {n: value for n, value in content.items() if n not in ("version", "checksum", "counts")}
        for name, kind in _KINDS.items():
            _require(isinstance(content[name], kind), name)
        _require(all(isinstance(update, dict) for update in content["updates"]), "updates")
        _require(all(isinstance(of, dict) for of in content["statistics"].values()), "statistics")
        fields["scanned"] = content["counts"]["scanned"]
        fields["recipe"] = Recipe(**content["recipe"])
        fields["index"] = FileEntry(**content["index"])
        fields["source_state"] = FileEntry(**content["source_state"])
        statistics = content["statistics"].items()
        fields["statistics"] = {split: ChannelStatistics.from_json(of) for split, of in statistics}
        fields["classes"] = tuple(content["classes"])
        per_class = content["samples_per_class"].items()
        fields["samples_per_class"] = {split: tuple(counts) for split, counts in per_class}
        fields["updates"] = tuple(Update(**update) for update in content["updates"])
        manifest = Manifest(**{**fields, **_in_columns(content, held)})
        _check_manifest(manifest)
        # it is what is written of it; as text, for True is no 1, and 1.0 neither
        for name, value in _content_of(manifest).items():
            said, written = (json.dumps(part, sort_keys=True) for part in (content.get(name), value))
            _require(said == written, name)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise DatasetError(
            f"{path}: not a manifest of this project ({_in_words(error)}); convert the dataset again"
        ) from error


def _in_columns(content: dict[str, Any], held: Held) -> dict[str, Any]:
    """What lies in other files."""
    counts = content["counts"]
    about = dict(content["shards"])
    splits = tuple(about.pop("splits"))
    table = FileEntry(**about)
    named = splits and len(set(splits)) == len(splits) and all(map(SPLIT_NAME.fullmatch, splits))
    _require(named, "splits of shards")
    left_out = None if content["left_out"] is None else FileEntry(**content["left_out"])
    rejected, ignored = counts["rejected"], counts["ignored"]
    _require(_is_count(rejected) and _is_count(ignored), "counts")
    _require((left_out is None) == (rejected + ignored == 0), "what is left out")
    return {
        "shards": read_table(held, table, splits, FORMATS[content["recipe"]["format"]]),
        "table": table,
        "left_out": left_out,
        "rejected": listed_rejected(held, left_out, rejected),
        "ignored": listed_ignored(held, left_out, ignored),
    }


def _check_manifest(manifest: Manifest) -> None:
    """Raise ValueError for what an edited manifest says, and no conversion: nothing else is trusted."""
    files = (manifest.index, manifest.source_state, manifest.table, manifest.left_out)
    for file, name in zip(files, NUMBERED, strict=True):
        if file is not None:
            _require(file.name == name_after(name, len(manifest.updates)), f"file name {file.name!r}")
            _require(not manifest.shards.has_file(file.name), f"a shard named {file.name}")
    classes = manifest.classes
    _require(manifest.target in TARGETS, f"target {manifest.target!r}")
    labelled = bool(classes) == (manifest.target in ("class", "classes"))
    _require(labelled and all(isinstance(name, str) for name in classes), "class names")
    described = manifest.fields.items()
    _require(all(isinstance(name, str) and kind in KINDS for name, kind in described), "fields")
    options = SourceOptions.from_json(manifest.source_options)  # raises, too
    _require(options.given() == manifest.source_options, "source options")
    _require(options.boxes is None or manifest.fields.get(options.boxes) == "ragged", "boxes")
    for made_by in (manifest.made_by, *(update.made_by for update in manifest.updates)):
        _require(all(isinstance(version, str) for version in made_by.values()), "made_by")
    _require(_DIGEST.fullmatch(manifest.source_digest), "source_digest")
    _require(all(map(_is_count, (manifest.next_id, manifest.scanned, manifest.source_bytes))), "counts")
    stored = manifest.shards.samples_of_splits()
    _require(adds_up(manifest.updates, manifest.removed, stored), "updates")
    _require(set(stored) == set(manifest.samples_per_class) and all(stored.values()), "splits")
    for split, counts in manifest.samples_per_class.items():
        inside = stored[split] - manifest.removed.get(split, 0)
        right = len(counts) == len(classes) and all(map(_is_count, counts))
        right = right and (manifest.target != "class" or sum(counts) == inside)
        _require(right, f"samples per class of split {split!r}")
    _require(set(manifest.statistics) <= set(manifest.samples_per_class), "splits of statistics")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _require(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(f"{what}: not as this project writes it")
