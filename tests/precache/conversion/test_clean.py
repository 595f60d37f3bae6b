"""What killed conversions leave is found by our own records and removed; nothing else is.

See `test_histories.py` for unfinished conversions, in folders and at URLs.
"""

import os
from pathlib import Path

import pytest

from precache import convert, verify
from precache.conversion.clean import Leftovers, leftovers
from precache.conversion.journal import JOURNAL_NAME
from precache.conversion.url import working_folder
from precache.storage import staging
from precache.storage.urls import Location, Url
from tests.cloud.uploading import objects
from tests.command import run_here
from tests.conftest import small_recipe
from tests.precache.destinations import THESIS, interrupt


@pytest.fixture(autouse=True)
def _staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of other tests' processes are not this one's."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(staging, "_own", {})
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))


def clean(place: Location) -> Leftovers:
    with leftovers(place) as found:
        found.remove()
    return found


def test_a_finished_dataset_in_a_bucket_stays(bucket: Url, raw_tree: Path) -> None:
    interrupt(raw_tree, bucket)
    journal = (working_folder(bucket) / JOURNAL_NAME).read_bytes()
    convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    before = objects(bucket)
    working_folder(bucket).mkdir()  # as if it had been killed before the journal was removed
    (working_folder(bucket) / JOURNAL_NAME).write_bytes(journal)
    found = clean(bucket)
    assert (found.finished, found.shards, len(found.others)) == (True, (), 1)
    assert not working_folder(bucket).exists()
    assert objects(bucket) == before
    assert verify(str(bucket)) == []


def test_staging_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    own = staging.folder()
    dead, mine = tmp_path / "tmp/precache-staging-0000", tmp_path / "tmp/precache-staging-mine"
    for folder, names in ((dead, (".precache-staging", "train-00000.tar")), (mine, ("thesis.txt",))):
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(THESIS)
    assert clean(tmp_path / "nowhere").folders == (dead,)
    assert own.exists()
    assert (mine / "thesis.txt").read_bytes() == THESIS
    assert not dead.exists()


def test_nothing_is_removed_where_nobody_can_be_asked(raw_tree: Path, tmp_path: Path) -> None:
    interrupt(raw_tree, tmp_path / "out")
    before = os.listdir(tmp_path / "out")
    asked = run_here("precache", "clean", "out", cwd=tmp_path)
    assert (asked.returncode, "pass --yes" in asked.stderr) == (2, True)
    assert os.listdir(tmp_path / "out") == before
    for _ in range(2):
        assert run_here("precache", "clean", "out", "--yes", cwd=tmp_path).returncode == 0
        assert os.listdir(tmp_path / "out") == []
