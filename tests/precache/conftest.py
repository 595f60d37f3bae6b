"""A tree that a test may damage, and a server that publishes it as a dataset."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from precache.example_data import datasets
from precache.example_data.datasets import PublicDataset
from tests.precache.example_data.publishing import ArchiveServer, make_tar_archive, publish


@pytest.fixture
def tree(raw_tree: Path, tmp_path: Path) -> Path:
    """A copy of the raw tree, which the test may damage."""
    return Path(shutil.copytree(raw_tree, tmp_path / "tree"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArchiveServer]:
    monkeypatch.setattr(datasets, "_FIRST_PAUSE_S", 0.01)
    with ArchiveServer() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def dataset(server: ArchiveServer, raw_tree: Path) -> PublicDataset:
    return publish(server, make_tar_archive(raw_tree, "256_Objects"))
