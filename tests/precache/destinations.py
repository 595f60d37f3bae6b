"""What tests of a conversion's destination have in common."""

from pathlib import Path

import pytest

from precache import convert
from precache.storage.urls import Location
from tests.conftest import small_recipe

THESIS = b"years of work"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def interrupt(tree: Path, out: Location, name: str = "shards", **options: object) -> None:
    def stop(done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tree, out, small_recipe(name), workers=0, on_progress=stop, **options)
