"""Manifest of a converted dataset, `dataset.json`: written last, so that a folder without it is no dataset.

Everything that grows with the number of samples lies in `dataset.index`, see `precache.dataset.index`; the
manifest has size and checksums of that file.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from itertools import chain
from pathlib import Path
from typing import Any

from precache.dataset.bounds import Limits, check_columns, check_content, max_pixels_bytes
from precache.dataset.files import FileEntry, LocalFile
from precache.dataset.index import (
    CONVERT_AGAIN,
    INDEX_NAME,
    REJECTED_NAME,
    SOURCE,
    IndexEntry,
    IndexFile,
    Rejected,
    damaged_index_error,
    read_ignored,
    read_rejected,
)
from precache.dataset.shard_table import ShardTable, file_suffixes, read_table
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
_MAX_QUOTE = 200  # characters of an error that quotes the file


class ManifestError(DatasetError):
    """The manifest of a dataset has changed since it was written, or is none of this project."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a converted dataset.

    Attributes:
        recipe: settings of the conversion.
        made_by: name -> version of the software that decoded and encoded the pictures.
        source_digest: SHA-256 over the source tree's sorted sample paths and sizes.
        source_bytes: size of the source pictures in bytes.
        classes: names of the classes; a label is an index of them.
        samples_per_class: split -> number of samples of each class.
        shards: shards in written order, split by split.
        index: file with everything that grows with the number of samples.
        scanned: number of paths that the source tree holds: samples, rejected and ignored ones. All ids are
            less than that.
        rejected: pictures that could not be decoded.
        ignored: (path, reason) of what the source tree holds beside pictures.
        statistics: split -> mean and standard deviation of the pictures as they are stored; of JPEGs, before
            they are encoded.
        source_options: options that the source was opened with.
        target: kind of label, one of `precache.dataset.columns.TARGETS`.
        is_tree: whether the pictures are files of a tree, or were converted from such files.
        fields: name -> kind of each field, see `precache.dataset.columns`.
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
    is_tree: bool = False
    fields: dict[str, str] = field(default_factory=dict)
    statistics: dict[str, ChannelStatistics] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Number of samples in all splits."""
        return int(self.shards.samples.sum())

    @property
    def limits(self) -> Limits:
        """Limits of the values in the columns of the samples."""
        holds_pixels = FORMATS[self.recipe.format].holds_pixels
        return Limits(
            ids=self.scanned,
            classes=len(self.classes),
            target=self.target,
            channels=CHANNELS[self.recipe.channels],
            starts=self.shards.starts,
            max_bytes=max_pixels_bytes(self.shards.bytes[:, 0], holds_pixels=holds_pixels),
            largest=self.shards.largest,
        )

    @property
    def split_samples(self) -> dict[str, int]:
        """Number of samples of each split."""
        shards = self.shards
        return {split: int(shards.samples[shards.split_mask(split)].sum()) for split in shards.split_names}

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of all files that the manifest names."""
        return int(self.shards.bytes.sum()) + self.index.bytes

    @property
    def files(self) -> Iterator[FileEntry]:
        """Iterate over all files of the dataset except the manifest; there may be very many."""
        return chain((file for shard in self.shards for file in shard.files), (self.index,))

    @property
    def own_names(self) -> frozenset[str]:
        """Names of the files that may be removed with the manifest; all other files are the user's."""
        names = {file.name for file in self.files}
        if self.rejected:
            names.add(REJECTED_NAME)
        return frozenset(names)

    def to_flags(self) -> str:
        """Flags of the `precache convert` command that made the dataset, to paste into a shell."""
        return " ".join(filter(None, (self.recipe.to_flags(), format_flags(self.source_options))))

    def split_shards(self, split: str) -> ShardTable:
        """Select the shards of `split`; SettingError lists the splits if there is no such split."""
        mask = self.shards.split_mask(split)
        if not mask.any():
            names = sorted(self.shards.split_names)
            hint = similar_name(split, names)
            raise SettingError(f"unknown split {split!r}; choose from: {', '.join(names)}{hint}")
        return self.shards.select(mask)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `dataset.json` into `folder`, which commits a conversion."""
    with atomic_write(folder / MANIFEST_NAME) as file:
        file.write(_encode(manifest))


def parse_manifest(raw: bytes, path: Location, local_file: LocalFile) -> tuple[Manifest, str]:
    """Parse the bytes of a manifest, and return it with the dataset's digest.

    The digest, SHA-256 in hex, identifies the dataset: it is that of the manifest without the source's times.
    Names of splits and files are checked although the manifest has a checksum: paths are made of them, and
    the manifest may come from a stranger.

    Args:
        raw: content of the manifest's file.
        path: path or URL of that file, for messages.
        local_file: makes the dataset's other files local.

    Raises:
        ManifestError: this is no manifest, or one of another version, or it was edited or damaged.
        IndexFileError: the index is missing or damaged.
    """
    try:
        content = json.loads(raw)
        version = content.get("version") if isinstance(content, dict) else None
        if not isinstance(version, int):
            raise ManifestError(
                "not a manifest of this project (no version)", path=path, remedy=CONVERT_AGAIN
            )
        if version != VERSION:
            raise ManifestError(
                f"manifest version {version}, expected {VERSION}",
                path=path,
                remedy=f"{CONVERT_AGAIN}, or use the release that wrote it",
            )
        if content.get("checksum") != _checksum(content):
            raise ManifestError(
                "was edited or damaged (its checksum does not fit its content)",
                path=path,
                remedy=CONVERT_AGAIN,
            )
        return _decode(content, local_file), _dataset_digest(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ManifestError(
            f"not a manifest of this project ({reason[:_MAX_QUOTE]})", path=path, remedy=CONVERT_AGAIN
        ) from error


def _encode(manifest: Manifest) -> bytes:
    content = _to_content(manifest)
    return (json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n").encode()


def _to_content(manifest: Manifest) -> dict[str, Any]:
    """Convert a manifest to the content of `dataset.json`, without its checksum, as plain JSON values."""
    counts = {
        "scanned": manifest.scanned,
        "converted": manifest.samples,
        "rejected": len(manifest.rejected),
        "ignored": len(manifest.ignored),
    }
    in_counts_or_index = ("scanned", "rejected", "ignored", "shards")
    names = [item.name for item in fields_of(manifest) if item.name not in in_counts_or_index]
    content: dict[str, Any] = {"version": VERSION, "counts": counts}
    content |= {name: getattr(manifest, name) for name in names}
    content["recipe"] = manifest.recipe.to_json()
    content["splits"] = manifest.shards.split_names
    plain: dict[str, Any] = json.loads(json.dumps(content, default=asdict))
    return plain


def _checksum(content: dict[str, Any]) -> str:
    """Compute SHA-256 (hex) of everything in a manifest but its checksum."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _dataset_digest(content: dict[str, Any]) -> str:
    """Compute SHA-256 (hex) of a manifest without all that depends on the times of the source's files."""
    columns = content["index"]["columns"].items()
    index = {
        **content["index"],
        "crc32c": "",
        "columns": {name: checksum for name, checksum in columns if not name.startswith(SOURCE)},
    }
    return _checksum({**content, "index": index})


def _decode(content: dict[str, Any], local_file: LocalFile) -> Manifest:
    check_content(content)
    entry, splits = IndexEntry(**content["index"]), tuple(content["splits"])
    if entry.name != INDEX_NAME or not all(map(SPLIT_NAME.fullmatch, splits)):
        raise ValueError(f"index {entry.name!r:.99} and splits {splits!r:.99}: not as this project writes it")
    recipe = Recipe(**content["recipe"])
    with local_file(entry):  # keeps a fetched index in the cache while all of it is read
        file = IndexFile(local_file, entry)
        _check_index_columns(file, content, recipe)
        shards, rejected, ignored = read_table(file, splits, recipe), read_rejected(file), read_ignored(file)
    manifest = Manifest(
        recipe=recipe,
        made_by=content["made_by"],
        source_digest=content["source_digest"],
        source_bytes=content["source_bytes"],
        classes=tuple(content["classes"]),
        samples_per_class={split: tuple(counts) for split, counts in content["samples_per_class"].items()},
        shards=shards,
        index=entry,
        scanned=content["counts"]["scanned"],
        rejected=rejected,
        ignored=ignored,
        source_options=content["source_options"],
        target=content["target"],
        is_tree=content["is_tree"],
        fields=content["fields"],
        statistics={
            split: ChannelStatistics(tuple(values["mean"]), tuple(values["std"]), values["pixels"])
            for split, values in content["statistics"].items()
        },
    )
    _check_counts(manifest, content["counts"])
    return manifest


def _check_index_columns(file: IndexFile, content: dict[str, Any], recipe: Recipe) -> None:
    """Raise IndexFileError unless the index has the columns that the manifest requires."""
    columns = {name: (place.dtype, place.shape) for name, place in file.places.items()}
    shard_files = len(file_suffixes(FORMATS[recipe.format]))
    try:
        check_columns(columns, content, shard_files, has_shapes=recipe.stored_size is None)
    except ValueError as error:
        raise damaged_index_error(file.path, str(error)[:_MAX_QUOTE]) from error


def _check_counts(manifest: Manifest, counts: dict[str, int]) -> None:
    """Raise ValueError unless `counts` and the other numbers of a manifest agree with those of its index."""
    index_counts = {
        "converted": manifest.samples,
        "rejected": len(manifest.rejected),
        "ignored": len(manifest.ignored),
        "scanned": manifest.samples + len(manifest.rejected) + len(manifest.ignored),
    }
    if index_counts != counts:
        raise ValueError(f"counts {counts}, but its index has {index_counts}")
    for split, class_counts in manifest.samples_per_class.items():
        samples = manifest.split_samples[split]
        has_too_many = max(class_counts, default=0) > samples
        if has_too_many or (manifest.target == "class" and sum(class_counts) != samples):
            raise ValueError(f"samples_per_class of {split}: not those of {samples:,} samples")
    channels = CHANNELS[manifest.recipe.channels]
    for split, statistics in manifest.statistics.items():
        if not len(statistics.mean) == len(statistics.std) == channels:
            raise ValueError(f"statistics of {split}: not of {quantity(channels, 'channel')}")
    if any(not 0 <= picture.id < manifest.scanned for picture in manifest.rejected):
        raise ValueError(f"a rejected picture has no id from 0 to {manifest.scanned:,}")
