"""`dataset.json`: what a converted dataset is. Written last, so a folder without it is not one.

What grows with the samples lies in `dataset.index`, see `precache.dataset.index`. The manifest has the sizes
and checksums of this file.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from itertools import chain
from pathlib import Path
from typing import Any

from precache.dataset.bounds import Limits, check_content, check_places, most_pixels_bytes
from precache.dataset.files import FileEntry, Held
from precache.dataset.index import (
    AGAIN,
    REJECTED_NAME,
    SOURCE,
    IndexEntry,
    IndexFile,
    Rejected,
    damaged,
    index_name,
    read_ignored,
    read_rejected,
)
from precache.dataset.shard_table import ShardTable, read_table, suffixes_of
from precache.dataset.statistics import ChannelStatistics
from precache.errors import DatasetError, SettingError, similar_name
from precache.formats import FORMATS
from precache.pictures.images import CHANNELS
from precache.recipe import SPLIT_NAME, Recipe, format_flags
from precache.reporting import quantity
from precache.storage import atomic_write
from precache.storage.urls import Location

MANIFEST_NAME = "dataset.json"
VERSION = 1
_MOST_WORDS = 200  # characters of an error that quotes what the file says


class ManifestError(DatasetError):
    """The manifest of a dataset is not as it was written."""


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
        rejected: pictures that could not be decoded.
        ignored: (path, reason) of what the source tree holds beside pictures.
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
    def most_id(self) -> int:
        """Above all ids."""
        return self.next_id or self.scanned

    @property
    def limits(self) -> Limits:
        """Limits that the columns of its samples keep."""
        holds_pixels = FORMATS[self.recipe.format].holds_pixels
        return Limits(
            ids=self.most_id,
            classes=len(self.classes),
            target=self.target,
            pixel_bytes=self.recipe.pixel_bytes,
            starts=self.shards.starts,
            most_bytes=most_pixels_bytes(self.shards.bytes[:, 0], holds_pixels=holds_pixels),
            largest=self.shards.largest,
        )

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
        return " ".join(filter(None, (self.recipe.to_flags(), format_flags(self.source_options))))

    @property
    def replaced_files(self) -> tuple[str, ...]:
        """Names of the files that updates have replaced by others; the last ones stay for who reads them."""
        return tuple(map(index_name, range(len(self.updates))))

    def split_shards(self, split: str) -> ShardTable:
        """The shards of `split`; SettingError names the splits that there are."""
        chosen = self.shards.split_mask(split)
        if not chosen.any():
            names = sorted(self.shards.split_names)
            hint = similar_name(split, names)
            raise SettingError(f"unknown split {split!r}; choose from: {', '.join(names)}{hint}")
        return self.shards.select(chosen)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `dataset.json` into `folder`: the commit of a conversion."""
    with atomic_write(folder / MANIFEST_NAME) as file:
        file.write(_encode(manifest))


def parse_manifest(raw: bytes, path: Location, held: Held) -> tuple[Manifest, str]:
    """What the bytes of the file at `path` say: the manifest, and its digest.

    The digest, SHA-256 in hex, identifies the dataset: it is that of the manifest without the source's times.
    What has its checksum is as it was written. Names of splits and files are looked at all the same: paths
    are made of them, and a manifest may come from somebody else.

    Args:
        held: of the dataset's other files.

    Raises:
        ManifestError: no manifest, one of another version, or one that was edited or damaged.
        IndexFileError: one without its index.
    """
    try:
        content = json.loads(raw)
        version = content.get("version") if isinstance(content, dict) else None
        if not isinstance(version, int):
            raise ManifestError(f"{path}: not a manifest of this project (no version); {AGAIN}")
        if version != VERSION:
            raise ManifestError(
                f"{path}: manifest version {version}, expected {VERSION}; {AGAIN}, or use the release that "
                f"wrote it"
            )
        if content.get("checksum") != _checksum(content):
            raise ManifestError(
                f"{path}: was edited or damaged (its checksum does not fit its content); {AGAIN}"
            )
        return _decode(content, held), _identity(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        words = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ManifestError(
            f"{path}: not a manifest of this project ({words[:_MOST_WORDS]}); {AGAIN}"
        ) from error


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


def _decode(content: dict[str, Any], held: Held) -> Manifest:
    check_content(content)
    entry, splits = IndexEntry(**content["index"]), tuple(content["splits"])
    if entry.name != index_name(len(content["updates"])) or not all(map(SPLIT_NAME.fullmatch, splits)):
        raise ValueError(f"index {entry.name!r:.99} and splits {splits!r:.99}: not as this project writes it")
    recipe = Recipe(**content["recipe"])
    elsewhere = ("version", "checksum", "counts", "splits")
    with held(entry):  # once, where it must be fetched
        file = IndexFile(held, entry)
        _check_columns(file, content, recipe)
        found: dict[str, Any] = {
            **{name: value for name, value in content.items() if name not in elsewhere},
            "recipe": recipe,
            "index": entry,
            "scanned": content["counts"]["scanned"],
            "classes": tuple(content["classes"]),
            "samples_per_class": {
                split: tuple(counts) for split, counts in content["samples_per_class"].items()
            },
            "statistics": {
                split: ChannelStatistics(tuple(of["mean"]), tuple(of["std"]), of["pixels"])
                for split, of in content["statistics"].items()
            },
            "updates": tuple(Update(**update) for update in content["updates"]),
            "shards": read_table(file, splits, recipe),
            "rejected": read_rejected(file),
            "ignored": read_ignored(file),
        }
    manifest = Manifest(**found)
    _check_counts(manifest, content["counts"])
    return manifest


def _check_columns(file: IndexFile, content: dict[str, Any], recipe: Recipe) -> None:
    sizes = {"files": len(suffixes_of(FORMATS[recipe.format]))}
    places = {name: (place.dtype, place.shape) for name, place in file.places.items()}
    try:
        check_places(places, content, sizes, recipe.stored_size is None)
    except ValueError as error:
        raise damaged(file.path, str(error)[:_MOST_WORDS]) from error


def _check_counts(manifest: Manifest, counts: dict[str, int]) -> None:
    """Raise ValueError unless the counts of a manifest are those of its index."""
    stored = manifest.shards.samples_of_splits()
    for split, gone in manifest.removed.items():
        if not 0 < gone <= stored[split]:
            raise ValueError(f"{gone:,} of {stored[split]:,} samples of {split} are removed")
    found = {
        "converted": manifest.samples,
        "rejected": len(manifest.rejected),
        "ignored": len(manifest.ignored),
        "scanned": manifest.samples + len(manifest.rejected) + len(manifest.ignored),
    }
    if found != counts:
        raise ValueError(f"counts {counts}, but its index has {found}")
    for split, of_classes in manifest.samples_per_class.items():
        most, served = max(of_classes, default=0), manifest.split_samples[split]
        if most > served or (manifest.target == "class" and sum(of_classes) != served):
            raise ValueError(f"samples_per_class of {split}: not those of {served:,} samples")
    channels = CHANNELS[manifest.recipe.channels]
    for split, statistics in manifest.statistics.items():
        if not len(statistics.mean) == len(statistics.std) == channels:
            raise ValueError(f"statistics of {split}: not of {quantity(channels, 'channel')}")
    if any(not 0 <= picture.id < manifest.most_id for picture in manifest.rejected):
        raise ValueError(f"a rejected picture has no id from 0 to {manifest.most_id:,}")
