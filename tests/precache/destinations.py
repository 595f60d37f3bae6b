"""Helpers for tests of a conversion's destination."""

from pathlib import Path

import pytest

from precache import convert
from tests.conftest import small_recipe

THESIS = b"years of work"


def contents(folder: Path) -> dict[str, bytes]:
    """Return path in the folder -> content of each file in it."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def interrupt(tree: Path, out: Path, name: str = "shards", **options: object) -> None:
    """Convert `tree` into `out` by the format `name`, and interrupt it after 40 of 70 pictures."""

    def stop(done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tree, out, small_recipe(name), workers=0, on_progress=stop, **options)
