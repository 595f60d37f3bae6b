"""Export a converted dataset as files: its pictures as stored, which are not the originals, and a table.

    TREE/CLASS/NAME.jpg          samples with one class, as ImageFolder reads them; pixels become PNG
    TREE/SPLIT/CLASS/NAME.jpg    the same, with several splits or with masks
    TREE/NAME.jpg                samples without a class, or with several
    TREE/labels.csv              image, label, split and fields of each sample, in the order of ids
    TREE/.masks/SPLIT/CLASS/NAME.png

Classes and files keep their original names, as far as these are safe to write; where two names would be
alike, the sample's id is appended.
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
from precache.dataset.boxes import fit_boxes
from precache.dataset.converted import ConvertedDataset, open_dataset
from precache.dataset.index import VALUE, SampleIndex
from precache.dataset.manifest import Manifest
from precache.dataset.shard_table import ShardEntry
from precache.errors import DatasetError, SettingError, check_open_files, os_reason, shell_command
from precache.formats import FORMATS, StoredSample
from precache.pictures import masks
from precache.pictures.images import CHANNELS
from precache.reporting import Progress, no_progress, warn
from precache.sources.base import paths_overlap
from precache.sources.tree import SPLIT_FOLDERS, SYSTEM_FOLDERS
from precache.storage import atomic_folder, check_new_folder, fsync_folder
from precache.storage.urls import Url, local_path

TABLE_NAME, MASKS_NAME = "labels.csv", ".masks"
_LOSSLESS_LEVEL = 1  # of zlib: three times as fast as the default, a tenth more bytes
_MAX_NAME_BYTES = 200  # file systems allow 255
_UNSAFE = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]')
_RESERVED_NAMES = frozenset(name.casefold() for name in (TABLE_NAME, *SYSTEM_FOLDERS))


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of `export`.

    Attributes:
        pictures: number of pictures that were written.
        source: source for `precache convert` to convert them again: the tree, or the table in it.
        flags: options of `precache convert` that this needs.
    """

    pictures: int
    source: Path
    flags: str


@dataclass(frozen=True, slots=True)
class _ExportedFiles:
    """The files of the samples that are served, in stored order.

    Attributes:
        files: path of each, relative to the tree.
        splits: name of the split of each.
        needs_table: whether labels, splits or fields are lost if the tree is converted without the table.
    """

    files: list[str]
    splits: list[str]
    needs_table: bool


def export(
    path: str | os.PathLike[str] | Url,
    tree: str | os.PathLike[str],
    *,
    workers: int | None = None,
    on_progress: Progress = no_progress,
) -> ExportReport:
    """Write the pictures of the dataset in `path`, a folder or a URL, as files into the new folder `tree`.

    JPEGs keep their bytes; pixels become PNG, which is lossless.

    Args:
        workers: processes; default one per CPU, 0 for the calling process.
        on_progress: called with (pictures written, pictures in all).

    Raises:
        DatasetError: `path` is no converted dataset, a sample is damaged, or the disk is full.
        SettingError: `tree` exists and is not empty, lies in `path` or around it; or the dataset has 16 bits.
    """
    workers = engines.worker_count(workers)
    dataset = open_dataset(path)
    manifest = dataset.manifest
    if manifest.recipe.rendering.is_deep:
        raise SettingError(f"holds {manifest.recipe.dtype}; only uint8 can be exported", path=path)
    tree = Path(os.path.realpath(local_path(tree)))
    _check_place(dataset.path, tree)
    stored = dataset.read_index(removed=True)  # with a row for each sample in the shards
    index = _with_stored_boxes(manifest, stored.select(stored.served))
    layout = _plan_files(manifest, index, _split_names(manifest, stored))
    if layout.needs_table:
        _warn_of_new_labels(manifest)
    report = engines.progress_counter(on_progress, manifest.samples)
    write = partial(_write_shard, dataset)
    try:
        if tree.exists():
            tree.rmdir()  # so that the new folder takes its place in one step
        with atomic_folder(tree) as folder:
            for parent in {os.path.dirname(file) for file in layout.files}:
                (folder / parent).mkdir(parents=True, exist_ok=True)
                if index.mask_checksums is not None:
                    (folder / MASKS_NAME / parent).mkdir(parents=True, exist_ok=True)
            tasks = _tasks(dataset, layout.files, folder)
            with closing(engines.run(write, tasks, min(workers, len(manifest.shards)), report)) as results:
                for _ in results:
                    pass
            _write_table(manifest, index, layout, folder)
            if hasattr(os, "sync"):
                os.sync()  # one call, where a sync for each file would take minutes
        fsync_folder(tree.parent)
    except OSError as error:
        check_open_files(error, error.filename)
        raise DatasetError(
            f"cannot be written ({os_reason(error)})",
            path=error.filename or tree,
            remedy="nothing is kept: make room or fix permissions, then export again",
        ) from error
    flags = _table_flags(manifest) if layout.needs_table else []
    if index.mask_checksums is not None:
        flags.append(shell_command("--mask", tree / MASKS_NAME))
    source = tree / TABLE_NAME if layout.needs_table else tree
    return ExportReport(manifest.samples, source, " ".join(flags))


def _with_stored_boxes(manifest: Manifest, index: SampleIndex) -> SampleIndex:
    """Return `index` with its boxes in the pixels of the stored pictures, and not of the originals."""
    name = manifest.source_options.get("boxes")
    if name is None:
        return index
    boxes = fit_boxes(index.fields[name], index.source_sizes, manifest.recipe.rendering)
    return index.with_columns({f"{VALUE}{name}": boxes})


def _check_place(source: Path, tree: Path) -> None:
    """Raise SettingError unless a tree may be made at this path."""
    check_new_folder(tree)
    if paths_overlap(source, tree):
        raise SettingError(f"overlaps with {source}", path=tree, remedy="choose a TREE beside it")
    if tree.exists() and (tree.is_mount() or tree.samefile(".")):
        raise SettingError(
            "is a mount point or the working folder", path=tree, remedy="name a new folder in it"
        )


@dataclass(frozen=True, slots=True)
class _ExportTask:
    """A shard, and the file of each of its samples that is served."""

    shard: ShardEntry
    index: SampleIndex
    folder: Path
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name in error messages."""
        return self.shard.name


def _tasks(dataset: ConvertedDataset, files: Sequence[str], folder: Path) -> Iterator[_ExportTask]:
    """Yield a task for each shard; `files` holds a path for each sample that is served."""
    remaining = iter(files)
    for shard, index in dataset.iter_shards():
        yield _ExportTask(shard, index, folder, tuple(islice(remaining, int(index.served.sum()))))


def _write_shard(dataset: ConvertedDataset, task: _ExportTask, tick: engines.Ticks) -> None:
    path = str(dataset.path / task.shard.file_name)
    channels = CHANNELS[dataset.manifest.recipe.channels]
    stored = dataset.read_shard(task.shard, task.index)
    for name, (row, sample) in zip(task.files, stored, strict=True):
        task.index.check(row, sample.data, path, sample.damage)
        with open(task.folder / name, "wb") as file:  # it exists if a worker died while writing it
            file.write(_encode(sample, path, channels))
        if sample.mask is not None:
            mask = sample.mask if isinstance(sample.mask, bytes) else masks.encode(sample.mask)
            (task.folder / PurePosixPath(MASKS_NAME, name).with_suffix(".png")).write_bytes(mask)
        tick()


def _encode(sample: StoredSample, path: str, channels: int) -> bytes:
    """Return the content of a sample's file: the JPEG as it is stored, or pixels as PNG."""
    if isinstance(sample.data, bytes):
        return sample.data
    encoded = io.BytesIO()
    pixels = sample.pixels(path, channels)
    picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    picture.save(encoded, "PNG", compress_level=_LOSSLESS_LEVEL)
    return encoded.getvalue()


def _plan_files(manifest: Manifest, index: SampleIndex, splits: list[str]) -> _ExportedFiles:
    """Choose the file of each sample, and find out whether the tree alone holds all that is known of them."""
    has_masks = index.mask_checksums is not None
    # with masks, too, because ImageFolder would take the folder of the masks for a class
    has_split_folders = len(set(splits)) > 1 or has_masks
    class_folders = _class_folders(manifest)
    suffix = ".png" if FORMATS[manifest.recipe.format].holds_pixels else ".jpg"
    files = [""] * len(index)
    used: set[str] = set()
    for row in np.argsort(index.ids).tolist():
        folder = f"{splits[row]}/" if has_split_folders else ""
        if class_folders:
            folder += f"{class_folders[index.labels[row]]}/"
        number = f"{index.ids[row]:08d}"
        name = f"{folder}{_safe_name(PurePosixPath(index.path(row) or number).stem, number)}{suffix}"
        while _comparable_name(name) in used:
            name = f"{name.removesuffix(suffix)}-{number}{suffix}"
        used.add(_comparable_name(name))
        files[row] = name
    classes = list(manifest.classes)
    keeps_classes = manifest.target == "class" and class_folders == classes == sorted(classes)
    folder_splits = set(SPLIT_FOLDERS.values()) if has_split_folders else {"train"}
    keeps_splits = set(splits) <= folder_splits
    needs_table = bool(manifest.fields) or not keeps_classes or not keeps_splits
    return _ExportedFiles(files, splits, needs_table)


def _class_folders(manifest: Manifest) -> list[str]:
    """Return the folder of each class; empty unless each sample has one class."""
    if manifest.target != "class":
        return []
    folders: list[str] = []
    used: set[str] = set()
    for label, name in enumerate(manifest.classes):
        folder = _safe_name(name, f"class-{label}")
        while _comparable_name(folder) in used:
            folder += f"-{label}"
        used.add(_comparable_name(folder))
        folders.append(folder)
    return folders


def _split_names(manifest: Manifest, stored: SampleIndex) -> list[str]:
    """Return the split of each sample that is served."""
    splits = (shard.split for shard in manifest.shards for _ in range(shard.samples))
    return [split for split, served in zip(splits, stored.served.tolist(), strict=True) if served]


def _safe_name(name: str, default: str) -> str:
    """Return a form of `name` that every file system accepts and a scan does not skip; `default` if empty."""
    text = _UNSAFE.sub("_", name.encode("utf-8", "replace").decode())  # bytes that are no text become "?"
    text = text.strip(" ").lstrip(".").rstrip(". ")
    text = text.encode()[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    return f"_{text}" if text.casefold() in _RESERVED_NAMES else text or default


def _comparable_name(name: str) -> str:
    """Return `name` in a form that is equal for names that differ only in case or accent encoding."""
    return unicodedata.normalize("NFC", name).casefold()


def _write_table(manifest: Manifest, index: SampleIndex, layout: _ExportedFiles, folder: Path) -> None:
    header = ["image", "split", *map(_column_name, sorted(manifest.fields))]
    if manifest.target != "none":
        header.insert(1, "label")
    classes = _class_values(manifest.classes)
    # bytes that are no text, as in file names, are written as escapes
    with open(folder / TABLE_NAME, "x", encoding="utf-8", errors="backslashreplace", newline="") as file:
        table = csv.DictWriter(file, header)
        table.writeheader()
        for row in np.argsort(index.ids).tolist():
            cells = {"image": layout.files[row], "split": layout.splits[row]}
            if manifest.target != "none":
                cells["label"] = _cell(_label_value(manifest, index, row, classes))
            for name, value in columns.row_values(index.fields, row).items():
                cells[_column_name(name)] = _cell(value)
            table.writerow(cells)


def _cell(value: Any) -> Any:
    """Return `value` as a cell of the table: a list as JSON."""
    return json.dumps(value) if isinstance(value, list) else value


def _column_name(field: str) -> str:
    """Return the name of a field's column, which is none of those that every table has."""
    return f"field_{field}" if field in ("image", "label", "split") else field


def _label_value(manifest: Manifest, index: SampleIndex, row: int, classes: Sequence[Any]) -> Any:
    """Return what the table says of a sample's label: its class or classes, by `classes`, or its number."""
    if manifest.target == "class":
        return classes[index.labels[row]]
    assert index.targets is not None
    value = index.targets.row_value(row)
    return [classes[label] for label in value] if manifest.target == "classes" else value


def _table_flags(manifest: Manifest) -> list[str]:
    """Return the flags of `precache convert` that read the exported table."""
    flags = ["--split split"]
    if manifest.target != "none":
        flags += ["--label label", f"--target {manifest.target}"]
    if manifest.fields:
        flags.append(f"--field {shlex.quote(','.join(map(_column_name, sorted(manifest.fields))))}")
    if boxes := manifest.source_options.get("boxes"):
        flags.append(f"--boxes {shlex.quote(_column_name(boxes))}")
    return flags


def _class_values(classes: Sequence[str]) -> Sequence[Any]:
    """Return the classes as values of the table: as numbers, which sort by size, if all names are numbers."""
    try:
        numbers = [float(name) if "." in name else int(name) for name in classes]
    except ValueError:
        return classes
    return numbers if [str(number) for number in numbers] == [*classes] else classes


def _warn_of_new_labels(manifest: Manifest) -> None:
    """Warn if a conversion of the table will number the classes differently."""
    values = [*_class_values(manifest.classes)]
    if values != sorted(values):
        warn(
            "the classes are not in the order of their names: a conversion of the exported table numbers "
            "them by name, so labels change"
        )
