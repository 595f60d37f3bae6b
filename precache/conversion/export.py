"""A converted dataset into files: its pictures as they are stored, which are not the originals, and a table.

    TREE/CLASS/NAME.jpg          one class each, as ImageFolder reads them; pixels become PNG
    TREE/SPLIT/CLASS/NAME.jpg    where there are several splits, or masks
    TREE/NAME.jpg                samples without a class of their own
    TREE/labels.csv              image, label, split and fields of each, in the order of ids
    TREE/.masks/SPLIT/CLASS/NAME.png

Classes and names are those of the original files, as far as they are safe to write and no two are alike; else
the sample's id makes the difference.
"""

import csv
import io
import json
import os
import re
import shlex
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from precache import engines
from precache.dataset import columns
from precache.dataset.boxes import moved
from precache.dataset.converted import ConvertedDataset, open_dataset
from precache.dataset.index import VALUE, SampleIndex
from precache.dataset.manifest import Manifest
from precache.dataset.shard_table import ShardEntry
from precache.errors import DatasetError, SettingError, check_open_files, os_reason, shell_command
from precache.formats import FORMATS, StoredSample
from precache.pictures import masks
from precache.pictures.images import CHANNELS
from precache.reporting import Progress, no_progress, warn
from precache.sources.base import lie_apart
from precache.sources.tree import SPLIT_FOLDERS, SYSTEM_FOLDERS
from precache.storage import atomic_folder, check_new_folder, fsync_folder
from precache.storage.urls import Url, local_path

TABLE_NAME, MASKS_NAME = "labels.csv", ".masks"
_LOSSLESS_LEVEL = 1  # of zlib: three times as fast as the default, a tenth more bytes
_MOST_BYTES = 200  # of a name; file systems take 255
_UNSAFE = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]')
_TAKEN = frozenset(name.casefold() for name in (TABLE_NAME, *SYSTEM_FOLDERS))


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` wrote.

    Attributes:
        pictures: files.
        source: what `precache convert` takes to convert them again: the tree, or the table in it.
        flags: options that it needs for that.
    """

    pictures: int
    source: Path
    flags: str


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the samples that are served go, in stored order.

    Attributes:
        files: of each, relative to the tree.
        splits: of each, the name.
        is_whole: whether a conversion of the tree finds all that is known of them, without the table.
    """

    files: list[str]
    splits: list[str]
    is_whole: bool


def export(
    path: str | os.PathLike[str] | Url,
    tree: str | os.PathLike[str],
    *,
    workers: int | None = None,
    on_progress: Progress = no_progress,
) -> Exported:
    """Write the pictures of the dataset in `path`, a folder or a URL, as files into the new folder `tree`.

    JPEGs keep their bytes; pixels become PNG, which is lossless.

    Args:
        workers: processes; default one per CPU, 0 for the calling process.
        on_progress: called with (pictures written, pictures in all).

    Raises:
        DatasetError: no converted dataset, a damaged sample, or a disk that is full.
        SettingError: `tree` exists and is not empty, lies in `path` or around it; or the dataset has 16 bits.
    """
    workers = engines.worker_count(workers)
    dataset = open_dataset(path)
    manifest = dataset.manifest
    if manifest.recipe.rendering.is_deep:
        raise SettingError(f"{path}: holds {manifest.recipe.dtype}; only uint8 can be exported")
    tree = Path(os.path.realpath(local_path(tree)))
    _check_place(dataset.path, tree)
    stored = dataset.read_index(removed=True)  # a row for each that the shards hold
    index = _on_stored_pictures(manifest, stored.select(stored.served))
    layout = _lay_out(manifest, index, _split_of(manifest, stored))
    if not layout.is_whole:
        _warn_of_other_labels(manifest)
    report = engines.progress_counter(on_progress, manifest.samples)
    write = partial(_write_shard, dataset)
    try:
        if tree.exists():
            tree.rmdir()  # so that the new one takes its place in one step
        with atomic_folder(tree) as folder:
            for parent in {os.path.dirname(file) for file in layout.files}:
                (folder / parent).mkdir(parents=True, exist_ok=True)
                if index.mask_checksums is not None:
                    (folder / MASKS_NAME / parent).mkdir(parents=True, exist_ok=True)
            tasks = _tasks(dataset, layout.files, folder)
            with closing(engines.run(write, tasks, min(workers, len(manifest.shards)), report)) as done:
                for _ in done:
                    pass
            _write_table(manifest, index, layout, folder)
            if hasattr(os, "sync"):
                os.sync()  # one call, where a sync for each file would take minutes
        fsync_folder(tree.parent)
    except OSError as error:
        check_open_files(error, error.filename)
        raise DatasetError(
            f"{error.filename or tree}: cannot be written ({os_reason(error)}); nothing is kept: make "
            f"room or fix permissions, then export again"
        ) from error
    flags = [] if layout.is_whole else _table_flags(manifest)
    if index.mask_checksums is not None:
        flags.append(shell_command("--mask", tree / MASKS_NAME))
    return Exported(manifest.samples, tree if layout.is_whole else tree / TABLE_NAME, " ".join(flags))


def _on_stored_pictures(manifest: Manifest, index: SampleIndex) -> SampleIndex:
    """`index` with boxes where things are on the pictures that are written."""
    name = manifest.source_options.get("boxes")
    if name is None:
        return index
    boxes = moved(index.fields[name], index.source_sizes, manifest.recipe.rendering)
    return index.with_columns({f"{VALUE}{name}": boxes})


def _check_place(source: Path, tree: Path) -> None:
    """Raise SettingError unless a tree may be made at this path."""
    check_new_folder(tree)
    if not lie_apart(source, tree):
        raise SettingError(f"{tree}: overlaps with {source}; choose a TREE beside it")
    if tree.exists() and (tree.is_mount() or tree.samefile(".")):
        raise SettingError(f"{tree}: is a mount point or the working folder; name a new folder in it")


@dataclass(frozen=True, slots=True)
class _ExportTask:
    """One shard, and the file of each of its samples that is served."""

    shard: ShardEntry
    index: SampleIndex
    folder: Path
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name for error messages."""
        return self.shard.name


def _tasks(dataset: ConvertedDataset, files: Sequence[str], folder: Path) -> Iterator[_ExportTask]:
    """One for each shard; `files` are of the samples that are served."""
    left = iter(files)
    for shard, index in dataset.by_shard():
        yield _ExportTask(shard, index, folder, tuple(islice(left, int(index.served.sum()))))


def _write_shard(dataset: ConvertedDataset, task: _ExportTask, tick: engines.Ticks) -> None:
    path = str(dataset.path / task.shard.file_name)
    channels = CHANNELS[dataset.manifest.recipe.channels]
    stored = dataset.read_shard(task.shard, task.index)
    for name, (row, sample) in zip(task.files, stored, strict=True):
        task.index.check(row, sample.data, path, sample.damage)
        with open(task.folder / name, "wb") as file:  # again, where a worker died over it
            file.write(_encoded(sample, path, channels))
        if sample.mask is not None:
            mask = sample.mask if isinstance(sample.mask, bytes) else masks.encode(sample.mask)
            (task.folder / PurePosixPath(MASKS_NAME, name).with_suffix(".png")).write_bytes(mask)
        tick()


def _encoded(sample: StoredSample, path: str, channels: int) -> bytes:
    """The content of a sample's file: the JPEG as it is stored, or pixels as PNG."""
    if isinstance(sample.data, bytes):
        return sample.data
    encoded = io.BytesIO()
    pixels = sample.pixels(path, channels)
    picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    picture.save(encoded, "PNG", compress_level=_LOSSLESS_LEVEL)
    return encoded.getvalue()


def _lay_out(manifest: Manifest, index: SampleIndex, splits: list[str]) -> _Layout:
    masked = index.mask_checksums is not None
    in_splits = len(set(splits)) > 1 or masked  # ImageFolder would take the folder of the masks for a class
    folders = _class_folders(manifest)
    suffix = ".png" if FORMATS[manifest.recipe.format].holds_pixels else ".jpg"
    files = [""] * len(index)
    taken: set[str] = set()
    for row in np.argsort(index.ids).tolist():
        folder = f"{splits[row]}/" if in_splits else ""
        if folders:
            folder += f"{folders[index.labels[row]]}/"
        number = f"{index.ids[row]:08d}"
        name = f"{folder}{_safe(PurePosixPath(index.path(row) or number).stem, number)}{suffix}"
        while _alike(name) in taken:
            name = f"{name.removesuffix(suffix)}-{number}{suffix}"
        taken.add(_alike(name))
        files[row] = name
    says_classes = manifest.target == "class" and folders == sorted(manifest.classes) == [*manifest.classes]
    says_splits = set(splits) <= ({*SPLIT_FOLDERS.values()} if in_splits else {"train"})
    return _Layout(files, splits, says_classes and says_splits and not manifest.fields)


def _class_folders(manifest: Manifest) -> list[str]:
    """The folder of each class; none where samples have no class of their own."""
    if manifest.target != "class":
        return []
    found: list[str] = []
    taken: set[str] = set()
    for label, name in enumerate(manifest.classes):
        folder = _safe(name, f"class-{label}")
        while _alike(folder) in taken:
            folder += f"-{label}"
        taken.add(_alike(folder))
        found.append(folder)
    return found


def _split_of(manifest: Manifest, stored: SampleIndex) -> list[str]:
    """The split of each sample that is served."""
    splits = (shard.split for shard in manifest.shards for _ in range(shard.samples))
    return [split for split, served in zip(splits, stored.served.tolist(), strict=True) if served]


def _safe(name: str, instead: str) -> str:
    """`name` made into a file or folder name that every file system accepts and a scan sees."""
    text = _UNSAFE.sub("_", name.encode("utf-8", "replace").decode())  # what is not text becomes "?"
    text = text.strip(" ").lstrip(".").rstrip(". ")
    cut = text.encode()[:_MOST_BYTES].decode("utf-8", "ignore")
    return f"_{cut}" if cut.casefold() in _TAKEN else cut or instead


def _alike(name: str) -> str:
    """`name` in a form that is equal for names that differ only in case or accent encoding."""
    return unicodedata.normalize("NFC", name).casefold()


def _write_table(manifest: Manifest, index: SampleIndex, layout: _Layout, folder: Path) -> None:
    fields = sorted(manifest.fields)
    header = ["image", "split", *map(_column_of, fields)]
    if manifest.target != "none":
        header.insert(1, "label")
    classes = _class_values(manifest.classes)
    # what is not text, as in names of files, is written as an escape
    with open(folder / TABLE_NAME, "x", encoding="utf-8", errors="backslashreplace", newline="") as file:
        table = csv.DictWriter(file, header)
        table.writeheader()
        for row in np.argsort(index.ids).tolist():
            cells = {"image": layout.files[row], "split": layout.splits[row]}
            if manifest.target != "none":
                cells["label"] = _cell(_label(manifest, index, row, classes))
            for name, value in columns.values_of(index.fields, row).items():
                cells[_column_of(name)] = _cell(value)
            table.writerow(cells)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value


def _column_of(field: str) -> str:
    """The column of a field: not one of those that every table has."""
    return f"field_{field}" if field in ("image", "label", "split") else field


def _label(manifest: Manifest, index: SampleIndex, row: int, classes: Sequence[Any]) -> Any:
    if manifest.target == "class":
        return classes[index.labels[row]]
    assert index.targets is not None
    value = index.targets.value(row)
    return [classes[label] for label in value] if manifest.target == "classes" else value


def _table_flags(manifest: Manifest) -> list[str]:
    flags = ["--split split"]
    if manifest.target != "none":
        flags += ["--label label", f"--target {manifest.target}"]
    if manifest.fields:
        flags.append(f"--field {shlex.quote(','.join(map(_column_of, sorted(manifest.fields))))}")
    if boxes := manifest.source_options.get("boxes"):
        flags.append(f"--boxes {shlex.quote(_column_of(boxes))}")
    return flags


def _class_values(classes: Sequence[str]) -> Sequence[Any]:
    """What a table says of each class: numbers if all of them are, which are sorted by their size."""
    try:
        numbers = [float(name) if "." in name else int(name) for name in classes]
    except ValueError:
        return classes
    return numbers if [str(number) for number in numbers] == [*classes] else classes


def _warn_of_other_labels(manifest: Manifest) -> None:
    values = [*_class_values(manifest.classes)]
    if values != sorted(values):
        warn(
            "the classes are not in the order of their names: a conversion of the exported table numbers "
            "them by name, so labels change"
        )
