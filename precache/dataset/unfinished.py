"""Explain a folder that an unfinished conversion left: how much is done, and the command that goes on."""

import os
from pathlib import Path
from typing import Any

from precache.errors import DatasetError, SettingError, shell_command
from precache.recipe import DEFAULT_MAX_REJECTS, Recipe, format_flags
from precache.reporting import quantity
from precache.storage import open_regular
from precache.storage.records import RecordFile

JOURNAL_NAME = "journal.jsonl"
"""File of a conversion that is not finished, see `precache.conversion.journal`."""


def unfinished_error(folder: Path) -> DatasetError | None:
    """Return the error to raise for a folder with an unfinished conversion; None if it holds none."""
    try:
        file = open_regular(folder / JOURNAL_NAME, getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    with file:
        records = RecordFile(file.fileno()).read()
        try:
            header = next(records)
            done = {record["shard"]: len(record["columns"]["source:checksums"]) for record in records}
            count = f"{sum(done.values()):,} of {quantity(header['request']['pictures'], 'picture')}"
            command = _command(folder, header["recipe"], header["request"])
        except (StopIteration, LookupError, TypeError, ValueError, SettingError):
            return None
    return DatasetError(
        f"holds an unfinished conversion, {count}", path=folder, remedy=f"go on with: {command}"
    )


def _command(folder: Path, recipe: dict[str, Any], request: dict[str, Any]) -> str:
    """Return the command that goes on with a conversion, as it was asked for.

    Args:
        request: what the journal records: `source` (None for a dataset in memory) and its `options`,
            `split_list`, `max_rejects`, and the number of `pictures`.
    """
    if request["source"] is None:
        return "the same call of precache.convert"
    recipe_flags, split_flags = recipe, ""
    if request["split_list"] is not None:
        recipe_flags = {name: value for name, value in recipe.items() if name != "splits"}
        split_flags = shell_command("--splits", Path(request["split_list"]))
    flags = [Recipe(**recipe_flags).to_flags(), split_flags]
    flags.append(
        format_flags({name: value for name, value in request["options"].items() if name.isidentifier()})
    )
    if request["max_rejects"] != DEFAULT_MAX_REJECTS:
        flags.append(f"--max-rejects {request['max_rejects']}")
    return shell_command("precache convert", Path(request["source"]), folder, *filter(None, flags))
