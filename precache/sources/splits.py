"""A list file that says which picture belongs to which split: lines `path,split`, as CSV.

    001.ak47/001_0001.jpg,train
    "002.american-flag/a, b.jpg",val

Paths are relative to the source tree. A first line `path,split` is a heading. Pictures that are not
listed are left out.
"""

import codecs
import csv
import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from precache.dataset.manifest import Manifest
from precache.errors import SettingError, SourceError, os_errors_as
from precache.recipe import DEFAULT_SPLITS, SPLIT_NAME, Recipe, looks_like_splits, parse_splits
from precache.reporting import abridge, quantity
from precache.sources.base import IgnoredPath, Scan
from precache.storage import read_regular
from precache.storage.urls import local_path

_COLUMNS = 2


def is_list_file(splits: object) -> bool:
    """Whether what the user calls splits names a list file, rather than shares."""
    if isinstance(splits, str):
        return Path(splits).is_file() or not looks_like_splits(splits)
    return isinstance(splits, os.PathLike)


def apply_list(scan: Scan, recipe: Recipe, path: str | os.PathLike[str]) -> tuple[Scan, Recipe]:
    """The scan with the splits of the list file at `path`, and the recipe that names the list.

    Raises:
        SettingError: the file cannot be read, is no such list, or names a picture twice; or the
            recipe has splits of its own.
        SourceError: it names a picture that the tree does not have.
    """
    path = local_path(path)
    if recipe.splits != Recipe(format=recipe.format).splits:
        raise SettingError(f"splits {recipe.splits!r} and the list {path} cannot be combined; give one")
    with os_errors_as(
        SettingError,
        f"splits {str(path)!r}: neither shares like 'train=0.8,val=0.2' nor a list that can be read",
        "give one or the other",
    ):
        content = read_regular(path)
    split_of = _parse(path, content)
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
        raise SourceError(
            f"{path}: lists {next(iter(split_of))!r}, which is not a picture of {scan.root} "
            f"({quantity(len(split_of), 'such line')}); write paths relative to it, like 'class/picture.jpg'"
        )
    samples = scan.samples.select(np.array(rows, np.int64), np.array(splits, np.int64), names)
    listed = replace(recipe, splits=f"list:{hashlib.sha256(content).hexdigest()}")
    return replace(scan, samples=samples, ignored=(*scan.ignored, *unlisted)), listed


def gaps(scan: Scan, manifest: Manifest) -> list[str]:
    """What the splits of a dataset converted from `scan` got nothing of; a phrase with a remedy each."""
    samples, found = scan.samples, []
    labels = samples.labels if samples.targets is None else samples.targets.values
    numbers = np.unique(labels[labels >= 0]).tolist() if manifest.classes else []
    there = {scan.classes[number] for number in numbers}
    own = samples.split_names != ("",)
    asked = own or manifest.recipe.splits != DEFAULT_SPLITS
    says = "precache inspect says what was rejected"
    remedy = f"; --splits says what goes where, and {says}" if asked else f"; {says}"
    for split in samples.split_names if own else parse_splits(manifest.recipe.splits):
        if not manifest.split_samples.get(split):
            found.append(f"split {split} has no picture{remedy}")
            continue
        counts = zip(manifest.classes, manifest.samples_per_class[split], strict=True)
        missing = [name for name, count in counts if not count and name in there]
        if missing and asked:
            what = quantity(len(missing), "class", "classes")
            found.append(
                f"split {split} has no picture of {what} of {len(there):,}: {abridge(missing)}{remedy}"
            )
        elif missing:
            what, has = ("class", "has") if len(missing) == 1 else ("classes", "have")
            found.append(f"{what} {abridge(missing)} {has} no picture left{remedy}")
    return found


def _parse(path: Path, content: bytes) -> dict[str, str]:
    """Path -> split."""
    split_of: dict[str, str] = {}
    text = os.fsdecode(content.removeprefix(codecs.BOM_UTF8))  # which Excel writes
    reader = csv.reader(io.StringIO(text, newline=""))
    for row in _rows(path, reader):
        if not row or (reader.line_num == 1 and row == ["path", "split"]):
            continue
        if len(row) != _COLUMNS or not SPLIT_NAME.fullmatch(row[1].strip()):
            raise SettingError(
                f"{path}, line {reader.line_num}: expected 'path,split' with a split such as train, and "
                f"quotes around a path with a comma, got {','.join(row)!r}"
            )
        picture = row[0] if ".." in row[0].split("/") else os.path.normpath(row[0])
        if picture in split_of:
            raise SettingError(f"{path}, line {reader.line_num}: lists {picture!r} twice; remove one")
        split_of[picture] = row[1].strip()
    if not split_of:
        raise SettingError(f"{path}: the list of splits is empty; expected lines 'path,split'")
    return split_of


def _rows(path: Path, reader: Any) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:  # a field of over 131,072 characters, as of a quote that is not closed
        raise SettingError(
            f"{path}, line {reader.line_num}: not CSV ({error}); expected 'path,split', with quotes in pairs"
        ) from error
