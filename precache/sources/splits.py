"""Split lists, which name the split of each picture.

A split list is a CSV file with lines `path,split`:

    001.ak47/001_0001.jpg,train
    "002.american-flag/a, b.jpg",val

Paths are relative to the source tree. A first line such as `path,split` is a header. Pictures that are not
listed are left out. A list may name folders of a tree instead, whose names do not say their splits; the class
folders lie in these then:

    entrenamiento,train
    prueba,test
"""

import csv
import hashlib
import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from precache.errors import SettingError, SourceError, os_errors_as
from precache.recipe import SPLIT_NAME, Recipe, looks_like_splits
from precache.reporting import quantity
from precache.sources.base import IgnoredPath, Scan
from precache.sources.text_files import decode_list, find_delimiter, listed_path
from precache.sources.tree import TreeSource
from precache.storage import read_regular
from precache.storage.urls import local_path

_COLUMNS = 2


def is_list_file(splits: object) -> bool:
    """Return whether the user's `splits` name a split list, not shares such as 'train=0.8,val=0.2'."""
    if isinstance(splits, str):
        return Path(splits).expanduser().is_file() or not looks_like_splits(splits)
    return isinstance(splits, os.PathLike)


def apply_list(scan: Scan, recipe: Recipe, path: str | os.PathLike[str]) -> tuple[Scan, Recipe]:
    """Return the scan with the splits of the list at `path`, and the recipe with the list's checksum.

    Raises:
        SettingError: the file cannot be read, is no such list, or names a picture twice; or the recipe has
            other splits.
        SourceError: the list names a picture that the source does not have.
    """
    path = local_path(path)
    if recipe.splits != Recipe(format=recipe.format).splits:
        raise SettingError(
            f"splits {recipe.splits!r} and the list {path} cannot be combined", remedy="give one"
        )
    with os_errors_as(
        SettingError,
        f"splits {str(path)!r}: neither shares like 'train=0.8,val=0.2' nor a list that can be read",
        "give one or the other",
    ):
        content = read_regular(path)
    split_of = _parse_list(path, content)
    tree = scan.source
    if isinstance(tree, TreeSource) and all((tree.root / name).is_dir() for name in split_of):
        scan, split_of = _split_by_folders(scan, tree.class_depth, split_of, path)
    names = list(dict.fromkeys(split_of.values()))
    rows, splits, unlisted = [], [], []
    for row, sample in enumerate(scan.samples):
        split = split_of.pop(sample.path, None)
        if split is None:
            unlisted.append(IgnoredPath(sample.path, "not in the list of splits"))
        else:
            rows.append(row)
            splits.append(names.index(split))
    if split_of:
        count = quantity(len(split_of), "such line")
        raise SourceError(
            f"lists {next(iter(split_of))!r}, which is not a picture of {scan.root} ({count})",
            path=path,
            remedy="write paths relative to it, like 'class/picture.jpg', or folders of splits alone",
        )
    samples = scan.samples.select(np.array(rows, np.int64), np.array(splits, np.int64), names)
    new_recipe = replace(recipe, splits=f"list:{hashlib.sha256(content).hexdigest()}")
    return replace(scan, samples=samples, ignored=(*scan.ignored, *unlisted)), new_recipe


def _split_by_folders(
    scan: Scan, class_depth: int, split_of: dict[str, str], path: Path
) -> tuple[Scan, dict[str, str]]:
    """Return the scan of a tree with the classes in the listed folders, and the splits of their pictures.

    Raises:
        SettingError: a listed folder has no class folder with a picture in it.
    """
    splits: dict[str, str] = {}
    class_of: dict[int, str] = {}  # row -> name
    for row, picture in enumerate(scan.samples.list_paths()):
        folder, *inner = picture.split("/")
        if folder in split_of and len(inner) > class_depth:
            splits[picture] = split_of[folder]
            class_of[row] = "/".join(inner[:class_depth])
    filled_folders = {picture.split("/")[0] for picture in splits}
    empty_folders = [folder for folder in split_of if folder not in filled_folders]
    if empty_folders:
        raise SettingError(
            f"lists {empty_folders[0]!r}, which is not a folder directly in {scan.root} with class folders "
            f"that have pictures",
            path=path,
            remedy="leave it out; or for pictures without labels pass --class-depth 0, too",
        )
    if class_depth == 0:
        return scan, splits
    classes = sorted(set(class_of.values()))
    label_of = {name: label for label, name in enumerate(classes)}
    labels = np.full(len(scan.samples), -1)
    labels[[*class_of]] = [label_of[name] for name in class_of.values()]
    return replace(scan, classes=tuple(classes), samples=replace(scan.samples, labels=labels)), splits


def _parse_list(path: Path, content: bytes) -> dict[str, str]:
    """Return the split of each path in the list; SettingError if a line is not `path,split`."""
    split_of: dict[str, str] = {}
    text = decode_list(content)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=find_delimiter(text.partition("\n")[0]))
    while True:
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            # such as a field of over 131,072 characters, which begins with a quote that is never closed
            raise SettingError(
                f"not CSV ({error}); expected 'path,split', with quotes in pairs",
                path=f"{path}, line {reader.line_num}",
            ) from error
        line = f"{path}, line {reader.line_num}"
        if not row or (reader.line_num == 1 and row[-1].strip().lower() == "split"):
            continue
        if len(row) != _COLUMNS or not SPLIT_NAME.fullmatch(row[1].strip()):
            raise SettingError(
                f"expected 'path,split' with a split such as train, and quotes around a path with a comma, "
                f"got {','.join(row)!r}",
                path=line,
            )
        picture = listed_path(row[0])
        if picture in split_of:
            raise SettingError(f"lists {picture!r} twice", path=line, remedy="remove one")
        split_of[picture] = row[1].strip()
    if not split_of:
        raise SettingError("the list of splits is empty; expected lines 'path,split'", path=path)
    return split_of
