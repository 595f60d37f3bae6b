"""Manifest of a converted dataset, `dataset.json`: written last, so that a folder without it is no dataset.

Everything that grows with the number of samples lies in `dataset.index`, see `precache.dataset.index`; the
manifest has size and checksums of that file.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from precache.dataset.bounds import Limits
from precache.dataset.columns import Kind, Target
from precache.dataset.files import FileEntry, LocalFile
from precache.dataset.index import (
    CONVERT_AGAIN,
    REJECTED_NAME,
    SOURCE,
    Counts,
    IndexEntry,
    IndexFile,
    Rejected,
    check_columns,
    read_ignored,
    read_rejected,
)
from precache.dataset.shard_table import ShardTable, file_suffixes, max_pixels_bytes, read_table
from precache.dataset.statistics import ChannelStatistics
from precache.errors import DatasetError, SettingError, similar_name
from precache.formats import FORMATS
from precache.pictures.images import CHANNELS
from precache.recipe import SPLIT_NAME, Recipe, format_flags
from precache.reporting import quantity
from precache.storage import atomic_write
from precache.storage.stored_json import Count, decode, encode
from precache.storage.urls import Location

MANIFEST_NAME = "dataset.json"
VERSION = 2
_Split: TypeAlias = Annotated[str, Meta(pattern=rf"\A{SPLIT_NAME.pattern}\Z")]


class ManifestError(DatasetError):
    """The manifest of a dataset has changed since it was written, or is none of this project."""


_Checksum: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]*\Z")]


class _AnyManifest(Struct):
    """What manifests of all versions have."""

    version: int
    checksum: _Checksum = ""


class StoredManifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of `dataset.json`.

    Attributes:
        version: version of the dataset's form on disk.
        recipe: settings of the conversion.
        counts: numbers of samples, of what was left out, and of shards.
        made_by: name -> version of the software that decoded and encoded the pictures.
        source_digest: SHA-256 over the source tree's sorted sample paths and sizes.
        source_bytes: size of the source pictures in bytes.
        source_options: options that the source was opened with.
        classes: names of the classes; a label is an index of them.
        samples_per_class: split -> number of samples of each class; the splits are in written order.
        index: file with everything that grows with the number of samples.
        target: kind of label.
        is_tree: whether the pictures are files of a tree, or were converted from such files.
        fields: name -> kind of each field, see `precache.dataset.columns`.
        statistics: split -> mean and standard deviation of the pictures as they are stored; of JPEGs, before
            they are encoded.
        checksum: SHA-256 (hex) of the file's bytes without this text.
    """

    version: int = VERSION
    recipe: Recipe
    counts: Counts
    made_by: dict[str, str]
    source_digest: str
    source_bytes: Count
    source_options: dict[str, str | Count | list[str]]
    classes: tuple[str, ...]
    samples_per_class: Annotated[dict[_Split, tuple[Count, ...]], Meta(min_length=1)]
    index: IndexEntry
    target: Target
    is_tree: bool
    fields: dict[str, Kind]
    statistics: dict[_Split, ChannelStatistics]
    checksum: _Checksum = ""

    def __post_init__(self) -> None:
        channels = CHANNELS[self.recipe.channels]
        for split, class_counts in self.samples_per_class.items():
            if len(class_counts) != len(self.classes):
                raise ValueError(f"samples_per_class of {split}: not of {len(self.classes):,} classes")
        for split, statistics in self.statistics.items():
            if split not in self.samples_per_class:
                raise ValueError(f"statistics of {split}, which is no split")
            if not len(statistics.mean) == len(statistics.std) == channels:
                raise ValueError(f"statistics of {split}: not of {quantity(channels, 'channel')}")


class Manifest(StoredManifest, frozen=True, kw_only=True):
    """Description of a converted dataset: `dataset.json`, and what its index has beside the samples.

    Attributes:
        shards: shards in written order, split by split.
        rejected: pictures that could not be decoded.
        ignored: (path, reason) of what the source tree holds beside pictures.
    """

    shards: ShardTable
    rejected: Sequence[Rejected]
    ignored: Sequence[tuple[str, str]]

    @property
    def samples(self) -> int:
        """Number of samples in all splits."""
        return self.counts.converted

    @property
    def scanned(self) -> int:
        """Number of paths that the source holds: samples, rejected and ignored ones. All ids are less."""
        return self.counts.scanned

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
            shard_bytes=self.shards.bytes[:, 0],
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


def is_converted(path: Path) -> bool:
    """Whether `path` is a folder with a manifest; the manifest itself is not read."""
    return os.path.lexists(path / MANIFEST_NAME)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `dataset.json` into `folder`, which commits a conversion."""
    values = {name: getattr(manifest, name) for name in StoredManifest.__struct_fields__}
    stored = StoredManifest(**{**values, "checksum": ""})
    with atomic_write(folder / MANIFEST_NAME) as file:
        file.write(encode(replace(stored, checksum=_sha256(encode(stored, indent=1))), indent=1))


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
    known = decode(raw, _AnyManifest, path=path, error=ManifestError, remedy=CONVERT_AGAIN)
    if known.version != VERSION:
        raise ManifestError(
            f"manifest version {known.version}, expected {VERSION}",
            path=path,
            remedy=f"{CONVERT_AGAIN}, or use the release that wrote it",
        )
    if known.checksum != _sha256(raw.replace(known.checksum.encode(), b"")):
        raise ManifestError(
            "was edited or damaged (its checksum does not fit its content)", path=path, remedy=CONVERT_AGAIN
        )
    stored = decode(raw, StoredManifest, path=path, error=ManifestError, remedy=CONVERT_AGAIN)
    manifest = _with_index(stored, local_file)
    for split, class_counts in manifest.samples_per_class.items():
        samples = manifest.split_samples[split]
        has_too_many = max(class_counts, default=0) > samples
        if has_too_many or (manifest.target == "class" and sum(class_counts) != samples):
            raise ManifestError(
                f"samples_per_class of {split}: not those of {quantity(samples, 'sample')}",
                path=path,
                remedy=CONVERT_AGAIN,
            )
    return manifest, _dataset_digest(stored)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _dataset_digest(stored: StoredManifest) -> str:
    """Compute SHA-256 (hex) of a manifest without all that depends on the times of the source's files."""
    columns = stored.index.columns.items()
    columns_of_pictures = {name: checksum for name, checksum in columns if not name.startswith(SOURCE)}
    index = replace(stored.index, crc32c="", columns=columns_of_pictures)
    return _sha256(encode(replace(stored, index=index, checksum="")))


def _with_index(stored: StoredManifest, local_file: LocalFile) -> Manifest:
    """Read from its index what `dataset.json` does not have; IndexFileError if they do not agree."""
    recipe, counts = stored.recipe, stored.counts
    form = FORMATS[recipe.format]
    with local_file(stored.index):  # keeps a fetched index in the cache while all of it is read
        file = IndexFile(local_file, stored.index)
        check_columns(
            file,
            counts,
            stored.target,
            stored.fields,
            files=len(file_suffixes(form)),
            varying=recipe.stored_size is None,
        )
        return Manifest(
            **asdict(stored),
            shards=read_table(file, tuple(stored.samples_per_class), recipe, counts.converted),
            rejected=read_rejected(file, counts.scanned),
            ignored=read_ignored(file),
        )
