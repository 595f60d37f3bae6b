"""The files of a data set that is published in shards: which they are, and which split their names say.

birds-train-0000.tar, birds-val-0000.tar    tars of WebDataset
train/0000.tar, val/0000.tar                the same in folders, also compressed: 0000.tgz
data/test-00000-of-00001.parquet            Parquet of Hugging Face
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from precache.errors import SourceError
from precache.pictures import kinds
from precache.sources.options import is_table
from precache.sources.tree import split_of


def shards_in(folder: Path, is_shard: Callable[[str], bool]) -> list[str]:
    """Paths of the shards in `folder` and in the folders in it, as `shards_among`."""
    try:
        return shards_among(_paths_in(folder), is_shard)
    except OSError:  # who lists it as a tree says so
        return []


def shards_among(paths: Iterable[str], is_shard: Callable[[str], bool]) -> list[str]:
    """The paths of files in a folder that are shards, sorted.

    None where a folder in it holds pictures or folders: that is a tree, and they lie beside its classes. A
    table beside pictures says something of them, and is none.

    Args:
        is_shard: whether a file of this name is one.
    """
    found, are_pictures_beside = [], False
    for path in paths:
        *folders, name = path.split("/")
        if name.startswith(".") or any(folder.startswith((".", "_")) for folder in folders):
            continue  # img2dataset leaves a folder _tmp
        if len(folders) > 1 or (folders and kinds.looks_like_picture(name)):
            return []
        are_pictures_beside = are_pictures_beside or kinds.looks_like_picture(name)
        if is_shard(name):
            found.append(path)
    if are_pictures_beside:
        found = [path for path in found if "/" in path or not is_table(Path(path))]
    return sorted(found)


def _paths_in(folder: Path) -> Iterator[str]:
    """Paths of the files in `folder` and in the folders in it; those of folders in these end with a slash."""
    with os.scandir(folder) as found:
        for entry in found:
            if not entry.is_dir():
                yield entry.name
                continue
            with os.scandir(entry) as inner:
                yield from (f"{entry.name}/{it.name}{'/' if it.is_dir() else ''}" for it in inner)


def find_split(path: str) -> str:
    """The split that the path of a file says: birds-train-0000.tar, train2017.tar, val/0.tar; "" for none."""
    *folders, name = path.split("/")
    for text in (name, *reversed(folders)):
        words = re.split(r"[^a-z0-9]+", text.lower())
        found = [split for word in words if (split := split_of(word))]
        if found:
            return found[-1]
    return ""


def splits_of(root: object, paths: Sequence[str]) -> list[str]:
    """The split of each of the files at `paths`, in the source `root`; "" for each where no path says one.

    Raises:
        SourceError: some paths say one and others do not.
    """
    splits = [find_split(path) for path in paths]
    if any(splits) and not all(splits):
        which = next(place for place, split in enumerate(splits) if split)
        raise SourceError(
            f"{root}: {paths[which]!r} is of the split {splits[which]!r}, and {paths[splits.index('')]!r} of "
            f"none; say the split in the name of each file, as birds-train-0000.tar, or in none"
        )
    return splits
