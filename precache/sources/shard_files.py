"""Files of a dataset that is published in shards, and the splits that their names say.

birds-train-0000.tar, birds-val-0000.tar    tars of WebDataset
train/0000.tar, val/0000.tar                tars in folders; tars may be compressed: 0000.tgz
data/test-00000-of-00001.parquet            Parquet of Hugging Face
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from precache.errors import SourceError
from precache.pictures import kinds
from precache.sources.options import is_table
from precache.sources.tree import split_of


def list_shards(folder: Path, is_shard: Callable[[str], bool]) -> list[str]:
    """Return the paths of the shards in `folder` and in its folders, sorted.

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


def find_splits(root: object, paths: Sequence[str]) -> list[str]:
    """Return the split that each path of the source `root` says; "" for each if no path says one.

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
    return splits
