"""`dataset.json`: what a converted dataset is. Written last, so a folder without it is not one.

Beside it lies `index.safetensors`: of all samples, in written order, `ids` and `labels`, int64 [n], and
`source_sizes`, int32 [n, 2], width and height of the upright source picture in pixels. With it a loader
knows every sample without opening a shard.
"""

import csv
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from precache.errors import DatasetError, SettingError
from precache.recipe import Recipe
from precache.storage import atomic_write, crc32c_file

MANIFEST_NAME = "dataset.json"
INDEX_NAME = "index.safetensors"
REJECTED_NAME = "rejected.csv"
VERSION = 2
Ints: TypeAlias = npt.NDArray[np.int64]
Sizes: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a shard: its name in the dataset's folder, bytes, and CRC-32C in hex."""

    name: str
    bytes: int
    crc32c: str


@dataclass(frozen=True, slots=True)
class RejectedSample:
    """A picture that could not be converted; `path` is relative to the source tree."""

    id: int
    path: str
    reason: str


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
    rejected: tuple[RejectedSample, ...]
    ignored: tuple[tuple[str, str], ...]

    @property
    def samples(self) -> int:
        """Samples in all splits."""
        return sum(shard.samples for shard in self.shards)

    @property
    def stored_bytes(self) -> int:
        """Size of all files that the manifest names, in bytes."""
        return sum(file.bytes for file in self.files)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files of the dataset beside the manifest."""
        return (*(file for shard in self.shards for file in shard.files), self.index)

    def split_shards(self, split: str) -> tuple[ShardEntry, ...]:
        """The shards of `split`; SettingError names the splits that there are."""
        shards = tuple(shard for shard in self.shards if shard.split == split)
        if not shards:
            splits = ", ".join(sorted({shard.split for shard in self.shards}))
            raise SettingError(f"unknown split {split!r}; choose from: {splits}")
        return shards

    def digest(self) -> str:
        """SHA-256 (hex) of the manifest: the identity of the dataset."""
        return hashlib.sha256(_encode(self)).hexdigest()


@dataclass(frozen=True, slots=True)
class ConvertedDataset:
    """A folder that holds a manifest and the files that it names."""

    path: Path
    manifest: Manifest

    def shard_path(self, shard: ShardEntry) -> Path:
        """Path of the shard's file."""
        return self.path / shard.file_name

    def read_index(self, split: str) -> tuple[Ints, Ints]:
        """(ids, labels) of the split's samples in written order, int64 [n] each."""
        ids, labels, _ = self._read_index()
        in_split = np.repeat(
            [shard.split == split for shard in self.manifest.shards],
            [shard.samples for shard in self.manifest.shards],
        )
        return ids[in_split], labels[in_split]

    def read_source_sizes(self) -> Sizes:
        """int32 [samples, 2]: width and height of all source pictures, in written order."""
        return self._read_index()[2]

    def _read_index(self) -> tuple[Ints, Ints, Sizes]:
        path = self.path / INDEX_NAME
        try:
            index = load_file(path)
            ids, labels, sizes = index["ids"], index["labels"], index["source_sizes"]
        except (OSError, SafetensorError, KeyError) as error:
            raise DatasetError(f"{path}: cannot be read ({error}); convert the dataset again") from error
        if not len(ids) == len(labels) == len(sizes) == self.manifest.samples:
            raise DatasetError(
                f"{path}: expected {self.manifest.samples:,} samples, got {len(ids):,}; "
                f"convert the dataset again"
            )
        return ids, labels, sizes


def is_converted(path: Path) -> bool:
    """Whether `path` is a folder with a manifest."""
    return (path / MANIFEST_NAME).is_file()


def open_dataset(path: str | os.PathLike[str]) -> ConvertedDataset:
    """Read the manifest of the converted dataset in folder `path`.

    Raises:
        DatasetError: no such folder, no manifest in it, or one that is damaged or too new.
    """
    folder = Path(path)
    manifest_path = folder / MANIFEST_NAME
    try:
        content = json.loads(manifest_path.read_bytes())
    except OSError as error:
        reason = "no such folder" if not folder.is_dir() else f"no {MANIFEST_NAME} in it"
        raise DatasetError(
            f"{folder}: not a converted dataset ({reason}); "
            f"make one with 'precache convert SRC {folder} --format FORMAT'"
        ) from error
    except ValueError as error:
        raise DatasetError(f"{manifest_path}: not valid JSON ({error}); convert the dataset again") from error
    return ConvertedDataset(folder, _decode(content, manifest_path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `dataset.json` into `folder`: the commit of a conversion."""
    with atomic_write(folder / MANIFEST_NAME) as file:
        file.write(_encode(manifest))


def write_index(folder: Path, ids: Ints, labels: Ints, source_sizes: Sizes) -> FileEntry:
    """Write `index.safetensors` into `folder`."""
    path = folder / INDEX_NAME
    with atomic_write(path) as file:
        file.write(save({"ids": ids, "labels": labels, "source_sizes": source_sizes}))
    return file_entry(path)


def write_rejected(folder: Path, rejected: Sequence[RejectedSample]) -> None:
    """Write `rejected.csv` into `folder`, for people; the manifest has the same. None if none is."""
    if not rejected:
        return
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("id", "path", "reason"))
    writer.writerows((sample.id, sample.path, sample.reason) for sample in rejected)
    with atomic_write(folder / REJECTED_NAME) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))


def file_entry(path: Path) -> FileEntry:
    """Name, size and checksum of the file at `path`."""
    return FileEntry(path.name, path.stat().st_size, crc32c_file(path))


def check_file(folder: Path, file: FileEntry) -> str | None:
    """What is wrong with a file, as one line, or None."""
    path = folder / file.name
    if not path.is_file():
        return f"{path}: missing"
    if path.stat().st_size != file.bytes:
        return f"{path}: expected {file.bytes:,} bytes, got {path.stat().st_size:,}"
    if crc32c_file(path) != file.crc32c:
        return f"{path}: its checksum is not the manifest's (the bytes changed)"
    return None


def check_manifest(folder: Path) -> str | None:
    """What is wrong with the manifest of the dataset in `folder`, as one line, or None."""
    path = folder / MANIFEST_NAME
    content = json.loads(path.read_bytes())
    if content["checksum"] != _checksum(content):
        return f"{path}: was edited since the conversion (its checksum is not that of its content)"
    return None


def count_reasons(reasons: list[str]) -> dict[str, int]:
    """Reasons and how often each occurs, most frequent first."""
    return dict(Counter(reasons).most_common())


def _encode(manifest: Manifest) -> bytes:
    counts = {
        "scanned": manifest.scanned,
        "converted": manifest.samples,
        "rejected": len(manifest.rejected),
        "ignored": len(manifest.ignored),
    }
    content = {"version": VERSION, "counts": counts, **asdict(manifest)}
    del content["scanned"]
    content["recipe"] = manifest.recipe.to_json()
    return (json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n").encode()


def _checksum(content: dict[str, Any]) -> str:
    """SHA-256 (hex) of everything in a manifest but its checksum."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _decode(content: Any, path: Path) -> Manifest:
    try:
        version = content.pop("version")
        if version != VERSION:
            raise DatasetError(
                f"{path}: manifest version {version}, expected {VERSION}; "
                f"convert the dataset again or use the release that wrote it"
            )
        del content["checksum"]
        content["scanned"] = content.pop("counts")["scanned"]
        content["recipe"] = Recipe(**content["recipe"])
        content["index"] = FileEntry(**content["index"])
        content["classes"] = tuple(content["classes"])
        per_class = content["samples_per_class"]
        content["samples_per_class"] = {split: tuple(counts) for split, counts in per_class.items()}
        content["rejected"] = tuple(RejectedSample(**entry) for entry in content["rejected"])
        content["ignored"] = tuple((entry[0], entry[1]) for entry in content["ignored"])
        content["shards"] = tuple(_decode_shard(entry) for entry in content["shards"])
        manifest = Manifest(**content)
        _check_types(manifest)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DatasetError(
            f"{path}: not a manifest of this project ({error!r}); convert the dataset again"
        ) from error


def _check_types(manifest: Manifest) -> None:
    """Raise ValueError where an edited manifest would fail later, and less clearly."""
    files_ok = all(
        isinstance(file.name, str) and "/" not in file.name and isinstance(file.bytes, int)
        for file in manifest.files
    )
    shards_ok = all(shard.files and isinstance(shard.samples, int) for shard in manifest.shards)
    if not (files_ok and shards_ok and manifest.shards and manifest.index.name == INDEX_NAME):
        raise ValueError("a shard, a file or the index is not as this project writes it")


def _decode_shard(entry: dict[str, Any]) -> ShardEntry:
    files = tuple(FileEntry(**file) for file in entry.pop("files"))
    return ShardEntry(files=files, **entry)
