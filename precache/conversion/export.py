"""A converted dataset into files: its pictures as they are stored, which are not the originals.

    TREE/CLASS/NAME.jpg          one class each
    TREE/train/CLASS/NAME.jpg    with splits that a tree may have, as `precache.sources.tree` reads them
    TREE/NAME.jpg                samples without a class of their own
    TREE/labels.jsonl            where a tree cannot hold it: what else is known of each, as a table
    TREE/.masks/CLASS/NAME.png   masks, where there are some

Classes and names are those of the original files, as far as they are safe to write and no two are alike; else
the sample's id makes the difference.
"""

import io
import json
import os
import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
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
from precache.errors import (
    DatasetError,
    SettingError,
    check_choice,
    check_open_files,
    check_range,
    shell_command,
)
from precache.formats import FORMATS, StoredSample
from precache.pictures import masks
from precache.pictures.images import CHANNELS
from precache.pictures.jpeg import encode_jpeg
from precache.recipe import DEFAULT_QUALITY
from precache.reporting import Progress, unseen, warn
from precache.sources.base import lie_apart
from precache.sources.tree import SPLIT_FOLDERS, split_of
from precache.storage import atomic_folder, check_new_folder, fsync_folder
from precache.storage.urls import Url, local_path

TABLE_NAME, MASKS_NAME = "labels.jsonl", ".masks"
FORMATS_OF_FILES = ("jpeg", "png")
_SUFFIXES = {"jpeg": ".jpg", "png": ".png"}
_LOSSLESS_LEVEL = 1  # of zlib: three times as fast as the default, a tenth more bytes
_MOST_BYTES = 200  # of a name; file systems take 255
_UNSAFE = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]')


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


def export(
    path: str | os.PathLike[str] | Url,
    tree: str | os.PathLike[str],
    *,
    file_format: str | None = None,
    quality: int | None = None,
    workers: int | None = None,
    on_progress: Progress = unseen,
) -> Exported:
    """Write the pictures of the dataset in `path`, a folder or a URL, as files into the new folder `tree`.

    Args:
        file_format: `jpeg` or `png`; default as they are stored; pixels as PNG, which is lossless.
        quality: of JPEGs that are made of pixels, default 95; those that are stored keep their bytes.
        workers: processes; default one per CPU, 0 for the calling process.
        on_progress: called with (pictures written, pictures in all).

    Raises:
        DatasetError: no converted dataset, a damaged sample, or a disk that is full.
        SettingError: `tree` exists and is not empty, lies in `path` or around it; or a value is unknown.
    """
    workers = engines.worker_count(workers)
    dataset = open_dataset(path)
    manifest = dataset.manifest
    if file_format is None:
        file_format = "png" if FORMATS[manifest.recipe.format].holds_pixels else "jpeg"
    check_choice("format", file_format, FORMATS_OF_FILES)
    if quality is not None and (file_format != "jpeg" or not FORMATS[manifest.recipe.format].holds_pixels):
        raise SettingError(
            f"quality {quality} is of JPEGs that are made of stored pixels; {manifest.recipe.format} to "
            f"{file_format} makes none; leave it out"
        )
    quality = check_range("quality", DEFAULT_QUALITY if quality is None else quality, 1, 100)
    if manifest.recipe.rendering.is_deep:
        raise SettingError(f"{path}: holds {manifest.recipe.dtype}; only uint8 can be exported")
    if manifest.recipe.channels == "rgba" and file_format == "jpeg":
        raise SettingError(f"{path}: has transparency, which a JPEG cannot hold; export it as png")
    tree = Path(os.path.realpath(local_path(tree)))
    _check_place(dataset.path, tree)
    stored = dataset.read_index(removed=True)  # a row for each that the shards hold
    index = _on_stored_pictures(manifest, stored.select(stored.served))
    splits = _split_of(manifest, stored)
    names, depth = _names(manifest, index, splits, _SUFFIXES[file_format])
    report = engines.counted(on_progress, manifest.samples)
    write = partial(_write_shard, dataset, file_format, quality)
    try:
        if tree.exists():
            tree.rmdir()  # so that the new one takes its place in one step
        with atomic_folder(tree) as folder:
            _make_folders(folder, names, masked=index.mask_checksums is not None)
            tasks = _tasks(dataset, names, folder)
            with closing(engines.run(write, tasks, min(workers, len(manifest.shards)), report)) as done:
                for _ in done:
                    pass
            keys = _write_table(manifest, index, splits, names, folder)
            if hasattr(os, "sync"):
                os.sync()  # one call, where a sync for each file would take minutes
        fsync_folder(tree.parent)
    except OSError as error:
        check_open_files(error, error.filename)
        raise DatasetError(
            f"{error.filename or tree}: cannot be written ({error.strerror or error}); nothing is kept: make "
            f"room or fix permissions, then export again"
        ) from error
    return _exported(manifest, index, tree, keys, depth)


def _make_folders(folder: Path, names: Sequence[str], *, masked: bool) -> None:
    for parent in {os.path.dirname(name) for name in names}:
        for above in (folder, folder / MASKS_NAME) if masked else (folder,):
            (above / parent).mkdir(parents=True, exist_ok=True)


def _exported(
    manifest: Manifest, index: SampleIndex, tree: Path, keys: Sequence[str] | None, depth: int
) -> Exported:
    flags = [] if depth == 1 else [f"--class-depth {depth}"]
    if keys is not None:
        flags = _table_flags(manifest, keys)
    if index.mask_checksums is not None:
        flags.append(shell_command("--mask", tree / MASKS_NAME))
    return Exported(manifest.samples, tree if keys is None else tree / TABLE_NAME, " ".join(flags))


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


def _tasks(dataset: ConvertedDataset, names: Sequence[str], folder: Path) -> Iterator[_ExportTask]:
    """One for each shard; `names` are of the samples that are served."""
    named = iter(names)
    for shard, index in dataset.by_shard():
        files = tuple(islice(named, int(index.served.sum())))
        yield _ExportTask(shard, index, folder, files)


def _write_shard(
    dataset: ConvertedDataset, file_format: str, quality: int, task: _ExportTask, tick: engines.Ticks
) -> None:
    path = str(dataset.path / task.shard.file_name)
    channels = CHANNELS[dataset.manifest.recipe.channels]
    stored = dataset.read_shard(task.shard, task.index)
    for name, (row, sample) in zip(task.files, stored, strict=True):
        task.index.check(row, sample.data, path, sample.damage)
        with open(task.folder / name, "wb") as file:  # again, where a worker died over it
            file.write(_encoded(sample, file_format, quality, path, channels))
        if sample.mask is not None:
            mask = sample.mask if isinstance(sample.mask, bytes) else masks.encode(sample.mask)
            (task.folder / PurePosixPath(MASKS_NAME, name).with_suffix(".png")).write_bytes(mask)
        tick()


def _encoded(sample: StoredSample, file_format: str, quality: int, path: str, channels: int) -> bytes:
    if file_format == "jpeg":
        return sample.data if isinstance(sample.data, bytes) else encode_jpeg(sample.data, quality)
    encoded = io.BytesIO()
    pixels = sample.pixels(path, channels)
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(
        encoded, "PNG", compress_level=_LOSSLESS_LEVEL
    )
    return encoded.getvalue()


def _names(
    manifest: Manifest, index: SampleIndex, split_of: Sequence[str], suffix: str
) -> tuple[list[str], int]:
    """The file of each sample, relative to the tree, in stored order; and how deep class folders lie."""
    folders, depth = _class_folders(manifest)
    splits = [f"{split}/" if _has_split_folders(manifest) else "" for split in split_of]
    names = [""] * len(index)
    taken: set[str] = {_alike(TABLE_NAME)}
    for row in np.argsort(index.ids).tolist():
        folder = splits[row] + (f"{folders[index.labels[row]]}/" if folders else "")
        number = f"{index.ids[row]:08d}"
        name = f"{folder}{_safe(PurePosixPath(index.path(row) or number).stem, number)}{suffix}"
        while _alike(name) in taken:
            name = f"{name[: -len(suffix)]}-{number}{suffix}"
        taken.add(_alike(name))
        names[row] = name
    return names, depth


def _class_folders(manifest: Manifest) -> tuple[list[str], int]:
    """The folder of each class, and how deep they lie; none where samples have no class of their own."""
    if manifest.target != "class":
        return [], 0
    parts = [name.split("/") for name in manifest.classes]
    depths = {len(of_one) for of_one in parts}
    if len(depths) > 1:  # a tree has its classes all at one depth
        parts = [["_".join(of_one)] for of_one in parts]
    found: list[str] = []
    taken: set[str] = set()
    for label, of_one in enumerate(parts):
        folder = "/".join(_safe(part, f"class-{label}") for part in of_one)
        if _alike(folder.partition("/")[0]) == TABLE_NAME:  # a file of this name is to lie there
            folder = f"_{folder}"
        while _alike(folder) in taken:
            folder += f"-{label}"
        taken.add(_alike(folder))
        found.append(folder)
    return found, len(parts[0])


def _has_split_folders(manifest: Manifest) -> bool:
    splits = {shard.split for shard in manifest.shards}
    return manifest.target == "class" and len(splits) > 1 and splits <= set(SPLIT_FOLDERS.values())


def _split_of(manifest: Manifest, stored: SampleIndex) -> list[str]:
    """The split of each sample that is served."""
    splits = (shard.split for shard in manifest.shards for _ in range(shard.samples))
    return [split for split, served in zip(splits, stored.served.tolist(), strict=True) if served]


def _safe(name: str, instead: str) -> str:
    """`name` made into a file or folder name that every file system accepts and a scan sees."""
    text = _UNSAFE.sub("_", name.encode("utf-8", "replace").decode())  # what is not text becomes "?"
    text = text.strip(" ").lstrip(".").rstrip(". ")
    cut = text.encode()[:_MOST_BYTES].decode("utf-8", "ignore")
    return cut or instead


def _alike(name: str) -> str:
    """`name` in a form that is equal for names that differ only in case or accent encoding."""
    return unicodedata.normalize("NFC", name).casefold()


def _write_table(
    manifest: Manifest, index: SampleIndex, splits: Sequence[str], names: Sequence[str], folder: Path
) -> Sequence[str] | None:
    """Write the table, one row per id in order, unless the tree says it all; its columns, or None."""
    several = len(manifest.samples_per_class) > 1
    says_splits = not several or _has_split_folders(manifest)
    folders, depth = _class_folders(manifest)
    tops = {folder.partition("/")[0] for folder in folders} if depth > 1 else set()
    read_as_splits = any(map(split_of, tops))
    in_order = sorted(folders) == list(manifest.classes) and not read_as_splits
    says_target = manifest.target == "none" or (manifest.target == "class" and in_order)
    if says_splits and says_target and not manifest.fields:
        return None
    line: dict[str, Any] = {}
    classes, free = _class_values(manifest), _free(manifest.fields)
    with open(folder / TABLE_NAME, "x", encoding="utf-8") as file:
        for row in np.argsort(index.ids).tolist():
            line = {"image": names[row]}
            if manifest.target != "none":
                line["label"] = _label(manifest, index, row, classes)
            if several:
                line["split"] = splits[row]
            line |= {free[name]: value for name, value in columns.values_of(index.fields, row).items()}
            file.write(f"{json.dumps(line)}\n")
    return list(line)


def _table_flags(manifest: Manifest, keys: Sequence[str]) -> list[str]:
    flags = [f"--{name} {name}" for name in ("label", "split") if name in keys]
    if manifest.target != "none":
        flags.append(f"--target {manifest.target}")
    free = _free(manifest.fields)
    if free:
        flags.append(f"--field {shlex.quote(','.join(free.values()))}")
    if boxes := manifest.source_options.get("boxes"):
        flags.append(f"--boxes {shlex.quote(free[boxes])}")
    return flags


def _label(manifest: Manifest, index: SampleIndex, row: int, classes: Sequence[Any]) -> Any:
    if manifest.target == "class":
        return classes[index.labels[row]]
    assert index.targets is not None
    value = index.targets.value(row)
    return [classes[label] for label in value] if manifest.target == "classes" else value


def _class_values(manifest: Manifest) -> Sequence[Any]:
    """What a table says of each class: text is sorted as text when it is read, numbers by their size."""
    classes = manifest.classes
    if list(classes) == sorted(classes):
        return classes
    try:
        numbers = [float(name) if "." in name else int(name) for name in classes]
    except ValueError:
        numbers = []
    if list(map(str, numbers)) == list(classes) and numbers == sorted(numbers):
        return numbers
    warn(
        "the classes are not in the order of their names: a conversion of the exported pictures numbers them "
        "by name, so labels change"
    )
    return classes


def _free(fields: Iterable[str]) -> dict[str, str]:
    """The column of each field: not one of those that every table has, nor that of another field."""
    free: dict[str, str] = {}
    taken = {"image", "label", "split", *fields}
    for name in fields:
        column = name
        while name in ("image", "label", "split") and column in taken:
            column = f"field_{column}"
        free[name] = column
    return free
