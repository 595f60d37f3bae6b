"""A tree that a test may damage."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def tree(raw_tree: Path, tmp_path: Path) -> Path:
    """A copy of the raw tree, which the test may damage."""
    return Path(shutil.copytree(raw_tree, tmp_path / "tree"))
