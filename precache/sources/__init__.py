"""Sources of samples: trees, tables, datasets, WebDataset tars; `open_source` opens any of them.

All sources have the protocol of `precache.sources.base`. To add one, write:

    a kind of table      a function that opens it as `Rows` (see `precache.sources.table`), its suffix in
                         `options.TABLE_SUFFIXES` and a line in `table.OPENERS`
    a kind of dataset    the same, and a branch in `memory.open_rows`
    anything else,       a `Source`, which lists its samples in a `SampleList` (see `precache.sources.base`),
    as LMDB or SQLite    its name in messages in `precache.sources.options`, and a branch in `_open_file`,
                         which looks at the file's name, or in `_open_folder`
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from precache.dataset.manifest import is_converted
from precache.dataset.unfinished import unfinished_error
from precache.errors import SettingError, SourceError, shell_command
from precache.pictures import kinds
from precache.reporting import warn
from precache.sources import webdataset
from precache.sources.base import Source
from precache.sources.converted import open_converted
from precache.sources.memory import check_split, open_dataset
from precache.sources.options import (
    TABLE,
    TABLE_SUFFIXES,
    TARS,
    TREE,
    SourceOptions,
    is_table,
)
from precache.sources.table import (
    OPENERS,
    SAVED_DATASET,
    SAVED_SPLITS,
    RowSource,
    is_parquet,
    open_arrow,
    saved_files,
)
from precache.sources.tree import TreeSource, split_of
from precache.sources.webdataset import WebDatasetSource
from precache.storage.urls import Url, source_path

__all__ = ["Source", "SourceOptions", "open_source"]

_ARCHIVES = (".zip", ".rar", ".7z", ".tar.lz4", ".tar.lz", ".tar.z", *webdataset.COMPRESSED_SUFFIXES)
"""Suffixes of archives, which are unpacked by other programs."""


def open_source(source: Any, options: SourceOptions | None = None) -> Source:
    """Open the source of the samples at a path, or in a dataset in memory.

    Args:
        source: a path, anything with `__len__` and `__getitem__`, a mapping of split names to such datasets,
            or a `Source`, which is returned as it is.

    Raises:
        SettingError: `source` is not a source, or is at a URL, or an option does not fit it.
        SourceError: the source cannot be opened.
        MissingDependencyError: the source needs an extra that is not installed.
    """
    options = options or SourceOptions()
    if isinstance(source, bytes):  # a path, though bytes have __len__ and __getitem__ like a dataset
        source = source_path(source)
    if not isinstance(source, str | os.PathLike | Url):
        is_source = all(hasattr(source, name) for name in ("scan", "read", "where"))
        return source if is_source else open_dataset(source, options)
    path = source_path(source)
    return _open_folder(path, options) if path.is_dir() else _open_file(path, options)


def _open_table(path: Path, options: SourceOptions) -> RowSource:
    """Open a table; the name of one with pictures says their split."""
    options.check_kind(TABLE)
    folder = str(path.parent) if options.root is None else options.root
    name, opener = str(path), OPENERS[path.suffix.lower()]
    open_rows = partial(opener, name, folder)
    if opener is open_arrow and open_rows().choose_roles(options).image.has_pictures:
        open_rows = partial(open_arrow, name, folder, find_split(path.name))
        _warn_of_copies(path, [name])
    return RowSource(path, _table_paths(path, options), (open_rows,), options)


def _open_arrow_files(
    folder: Path, files: Mapping[str, str], options: SourceOptions, *, have_prefix: bool
) -> RowSource:
    """Open a folder of files with pictures.

    Args:
        files: split of each file, by its path in the folder.
        have_prefix: whether the paths of samples begin with those of the files.
    """
    options.check_kind(TABLE)
    pictures_folder = str(folder) if options.root is None else options.root
    parts = [
        partial(
            open_arrow,
            str(folder / name),
            pictures_folder,
            split,
            f"{name}/" if have_prefix else "",
            may_be_paths=False,
        )
        for name, split in files.items()
    ]
    _warn_of_copies(folder, list(files))
    return RowSource(folder, _table_paths(folder, options), tuple(parts), options)


def _warn_of_copies(path: Path, files: Sequence[str]) -> None:
    if any(map(is_parquet, files)):
        warn(
            f"{path}: its pictures are copied into {tempfile.gettempdir()} first: they are read in shuffled "
            f"order, and of Parquet only many rows at once"
        )


def _table_paths(path: Path, options: SourceOptions) -> tuple[Path, ...]:
    """Return `Source.paths` of a table: the table, and the folder that --root names.

    The table's own folder is not among them, so that a dataset can be written beside the table.

    Raises:
        SettingError: there is no such folder.
    """
    if options.root is None:
        return (path,)
    if not os.path.isdir(options.root):
        raise SettingError(f"--root {options.root}: no such folder", remedy="name that of the pictures")
    return (path, Path(options.root))


def _open_file(path: Path, options: SourceOptions) -> Source:
    """Open a table or a WebDataset tar; the error for any other file says what was expected."""
    if is_table(path):
        return _open_table(path, options)
    if path.is_file():
        if path.suffix.lower() == ".tar":
            return _open_tars(path, [path.name], options)
        if path.name.lower().endswith(_ARCHIVES):
            raise SourceError("is an archive", path=path, remedy=_unpack_remedy(path))
        raise SourceError(
            f"is no folder or tar, nor a table by its suffix: {', '.join(TABLE_SUFFIXES)}",
            path=path,
            remedy="unpack it, or save a table so, in UTF-8",
        )
    return _open_tree(path, options)


def _unpack_remedy(path: Path) -> str:
    """Return how to unpack an archive to what can be converted."""
    if path.suffix.lower() == ".zip":
        return f"run '{shell_command('unzip', path, '-d', path.with_suffix(''))}', and convert the folder"
    if path.name.lower().endswith(webdataset.COMPRESSED_SUFFIXES):
        command = shell_command("tar xf", path)
        return f"run '{command}', and convert the folder; WebDataset tars are read when they are decompressed"
    return "unpack it, and convert the folder"


def _open_folder(path: Path, options: SourceOptions) -> Source:
    """Open a folder as what it holds: a converted dataset, tars, Parquet files, or class folders.

    Raises:
        DatasetError: it holds an unfinished conversion, whose tars are not the whole dataset.
    """
    if is_converted(path):
        return open_converted(path, options)
    if (unfinished := unfinished_error(path)) is not None:
        raise unfinished
    if names := _list_shards(path, webdataset.is_tar):
        return _open_tars(path, names, options)
    is_saved = any((path / name).is_file() for name in (SAVED_SPLITS, SAVED_DATASET))
    if is_saved and (saved := saved_files(path)):
        for split in dict.fromkeys(saved.values()):
            check_split(split, path, options)
        return _open_arrow_files(path, saved, options, have_prefix=False)
    if names := _list_shards(path, is_parquet):
        return _open_arrow_files(path, _splits_by_path(path, names), options, have_prefix=True)
    return _open_tree(path, options)


def _open_tars(root: Path, names: Sequence[str], options: SourceOptions) -> WebDatasetSource:
    """Open WebDataset tars: those of these paths in the folder `root`, or `root` itself."""
    options.check_kind(TARS)
    return WebDatasetSource(root, options, _splits_by_path(root, names))


def _open_tree(path: Path, options: SourceOptions) -> Source:
    options.check_kind(TREE)
    return TreeSource(path, 1 if options.class_depth is None else options.class_depth)


def _list_shards(folder: Path, is_shard: Callable[[str], bool]) -> list[str]:
    """Return the paths of the shards in `folder` and in its folders, sorted; their names may say a split.

        birds-train-0000.tar, birds-val-0000.tar    tars of WebDataset
        train/0000.tar, val/0000.tar                tars in folders; tars may be compressed: 0000.tgz
        data/test-00000-of-00001.parquet            Parquet of Hugging Face

    There are none if an inner folder holds pictures or folders: then the folder is a tree, and its shards are
    stray files. A table directly beside pictures describes these, and is no shard.

    Args:
        is_shard: function that says whether a file of this name is a shard.
    """
    shards = []
    has_pictures = False
    try:
        for path in _list_paths(folder):  # ends at the first picture of a tree, which may hold millions
            *folders, name = path.split("/")
            if name.startswith(".") or any(inner.startswith((".", "_")) for inner in folders):
                continue  # hidden, or the folder _tmp that img2dataset leaves
            if len(folders) > 1 or (folders and kinds.looks_like_picture(name)):
                return []
            has_pictures = has_pictures or kinds.looks_like_picture(name)
            if is_shard(name):
                shards.append(path)
    except OSError:  # the folder is opened as a tree then, and listing that raises a SourceError
        return []
    if has_pictures:
        shards = [path for path in shards if "/" in path or not is_table(Path(path))]
    return sorted(shards)


def _list_paths(folder: Path) -> Iterator[str]:
    """Yield the paths of files in `folder` and in its folders; a folder inside these ends with a slash."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir():
                yield entry.name
                continue
            with os.scandir(entry) as inner_entries:
                for inner in inner_entries:
                    slash = "/" if inner.is_dir() else ""
                    yield f"{entry.name}/{inner.name}{slash}"


def find_split(path: str) -> str:
    """Return the split in a file's path, as in birds-train-0000.tar, train2017.tar, val/0.tar; else ""."""
    *folders, name = path.split("/")
    for text in (name, *reversed(folders)):
        words = re.split(r"[^a-z0-9]+", text.lower())
        splits = [split for word in words if (split := split_of(word))]
        if splits:
            return splits[-1]
    return ""


def _splits_by_path(root: Path, paths: Sequence[str]) -> dict[str, str]:
    """Return the split that each path in the source `root` says, by the path; "" if no path says one.

    Raises:
        SourceError: some paths say a split, and others do not.
    """
    splits = [find_split(path) for path in paths]
    if any(splits) and not all(splits):
        row = next(row for row, split in enumerate(splits) if split)
        raise SourceError(
            f"{paths[row]!r} is of the split {splits[row]!r}, and {paths[splits.index('')]!r} of none",
            path=root,
            remedy="say the split in the name of each file, as birds-train-0000.tar, or in none",
        )
    return dict(zip(paths, splits, strict=True))
