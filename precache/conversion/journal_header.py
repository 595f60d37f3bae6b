"""The first record of a journal: what is being made, of how many shards, under which names."""

import os
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from precache.dataset.index import name_after
from precache.dataset.left_out import REJECTED_NAME
from precache.dataset.shard_table import file_names, shard_name
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.manifest import MANIFEST_NAME, NUMBERED
from precache.plan import ConvertPlan
from precache.recipe import FORMAT_NAMES, SPLIT_NAME, Recipe
from precache.storage import open_regular
from precache.storage.records import RecordFile
from precache.storage.urls import Url

JOURNAL_NAME = "journal.jsonl"
KEY = "journal"
_VERSION = 2
_MAX_SHARDS = 10**7
_ANOTHER_SOURCE = "another source tree, or one that changed since"
REWRITTEN = frozenset((REJECTED_NAME, MANIFEST_NAME))  # by an update: it is the dataset's, too


@dataclass(frozen=True, slots=True)
class Target:
    """What a conversion makes: two with equal targets write equal bytes.

    `update` is the number of the update of a finished dataset, whose `source_digest` is over what it adds and
    to what; 0 for a conversion.
    """

    recipe: Recipe
    source_digest: str
    made_by: dict[str, str]
    update: int = 0

    def differences(self, found: dict[str, Any]) -> list[str]:
        """How `found`, another target as JSON, differs from this one; one phrase each."""
        recipe = found.get("recipe", {})
        phrases = [
            f"{name} {_in_words(recipe.get(name))}, asked for {_in_words(value)}"
            for name, value in self.recipe.to_json().items()
            if recipe.get(name) != value
        ]
        if found.get("source_digest") != self.source_digest:
            phrases.append(_ANOTHER_SOURCE)
        if found.get("update", 0) != self.update:
            phrases.append("an update")
        made_by = found.get("made_by", self.made_by)
        phrases += [
            f"{name} {made_by.get(name)}, here {value}"
            for name, value in self.made_by.items()
            if made_by.get(name) != value
        ]
        return phrases

    def check_same(self, folder: Path | Url, found: dict[str, Any], *, finished: bool = False) -> None:
        """Raise DatasetError with the differences, unless `folder` holds this target, finished or not."""
        if differences := self.differences(found):
            follow = "--update to follow the source " if finished and differences == [_ANOTHER_SOURCE] else ""
            replace = f", or pass {follow and f'{follow}or '}--overwrite to replace it"
            raise DatasetError(
                f"{folder}: holds another conversion ({'; '.join(differences)}); "
                f"choose another DST{'' if finished and isinstance(folder, Url) else replace}"
            )


def _in_words(value: object) -> object:
    """A setting as it is typed: the one that is a list is a size, height and width."""
    return "x".join(map(str, reversed(value))) if isinstance(value, list) else value


def header_of(target: Target, plan: ConvertPlan) -> dict[str, Any]:
    """The first record of the journal of this target and plan."""
    counts: dict[str, int] = {}
    first: dict[str, int] = {}
    for shard in plan.shards:
        counts[shard.split] = counts.get(shard.split, 0) + 1
        first.setdefault(shard.split, shard.number)
    updating = {"first": first} if target.update else {}
    return {KEY: _VERSION, **asdict(target), "shards": counts, **updating}


def own_names(header: dict[str, Any]) -> frozenset[str]:
    """The names of all files that the conversion, or the update, of this journal makes."""
    form, update = FORMATS[header["recipe"]["format"]], header.get("update", 0)
    names = {JOURNAL_NAME, REJECTED_NAME, *(name_after(name, update) for name in NUMBERED)}
    names |= frozenset() if update else {MANIFEST_NAME}
    for split, count in header["shards"].items():
        first = header["first"][split] if update else 0
        for index in range(first, first + min(count, _MAX_SHARDS)):
            names.update(file_names(shard_name(split, index), form))
    return frozenset(names)


def unfinished_names(folder: Path) -> frozenset[str]:
    """The names of the files that an unfinished update has left, or may have, in the dataset in `folder`."""
    header = read_header(folder / JOURNAL_NAME)
    if header is None or not is_of_this_release(header) or not header.get("update", 0):
        return frozenset()
    return own_names(header)


def is_of_this_release(header: dict[str, Any]) -> bool:
    """Whether a journal that begins so is one that this release can go on with."""
    recipe, shards = header.get("recipe"), header.get("shards")
    update, first = header.get("update", 0), header.get("first")
    return (
        header.get(KEY) == _VERSION
        and isinstance(recipe, dict)
        and recipe.get("format") in FORMAT_NAMES
        and isinstance(header.get("made_by"), dict)
        and isinstance(shards, dict)
        and all(SPLIT_NAME.fullmatch(split) and type(count) is int for split, count in shards.items())
        and type(update) is int
        and (not update or (isinstance(first, dict) and first.keys() == shards.keys()))
        and all(type(number) is int for number in (first or {}).values())
    )


def read_header(path: Path) -> dict[str, Any] | None:
    """The first record of the journal at `path`; None without one that is whole."""
    try:
        descriptor = open_regular(path, getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    with closing(RecordFile(descriptor)) as records:
        return next(records.read(), None)
