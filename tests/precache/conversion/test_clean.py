"""What killed conversions leave is found by our own records and removed; nothing else is."""

import os
from pathlib import Path

import pytest

from precache import convert, verify
from precache.conversion.clean import Leftovers, leftovers
from precache.conversion.journal import JOURNAL_NAME
from precache.conversion.url import working_folder
from precache.errors import DatasetError
from precache.storage import locks, staging
from precache.storage.objects import ObjectStore
from precache.storage.urls import Location, Url
from tests.cloud.uploading import objects
from tests.command import run_here
from tests.conftest import small_recipe
from tests.precache.conversion.test_url import interrupt as interrupt_at
from tests.precache.destinations import THESIS, interrupt


@pytest.fixture(autouse=True)
def _staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of other tests' processes are not this one's."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(staging, "_own", {})
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(locks, "_PATIENCE_S", 0.0)


def clean(place: Location) -> Leftovers:
    with leftovers(place) as found:
        found.remove()
    return found


def test_an_unfinished_conversion_is_removed_from_a_bucket(bucket: Url, raw_tree: Path) -> None:
    interrupt_at(raw_tree, bucket)
    store = ObjectStore(bucket)
    store.put("thesis.txt", THESIS)
    found = clean(bucket)
    assert len(found.shards) == 3
    assert objects(bucket) == {"thesis.txt": THESIS}
    assert not working_folder(bucket).exists()


def test_a_finished_dataset_in_a_bucket_stays(
    bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    interrupt_at(raw_tree, bucket)
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


def test_a_conversion_that_runs_is_left_alone(bucket: Url, raw_tree: Path, tmp_path: Path) -> None:
    refused = []

    def act(place: Location) -> None:
        with pytest.raises(DatasetError, match="by process"), leftovers(place):
            pass
        refused.append(place)

    for place in (bucket, tmp_path / "out"):
        convert(raw_tree, place, small_recipe("shards"), workers=0, on_start=lambda *_, p=place: act(p))
    assert len(refused) == 2


def test_staging_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    own = staging.folder()
    dead = tmp_path / "tmp" / "precache-staging-0000"
    dead.mkdir()
    (dead / ".precache-staging").touch()
    (dead / "train-00000.tar").write_bytes(b"half")
    mine = tmp_path / "tmp" / "precache-staging-mine"
    mine.mkdir()
    (mine / "thesis.txt").write_bytes(THESIS)
    found = clean(tmp_path / "nowhere")
    assert found.folders == (dead,)
    assert own.exists()
    assert (mine / "thesis.txt").read_bytes() == THESIS
    assert not dead.exists()


def test_nothing_is_removed_where_nobody_can_be_asked(raw_tree: Path, tmp_path: Path) -> None:
    interrupt(raw_tree, tmp_path / "out")
    before = sorted(os.listdir(tmp_path / "out"))
    asked = run_here("precache", "clean", "out", cwd=tmp_path)
    assert asked.returncode == 2
    assert "pass --yes" in asked.stderr
    assert sorted(os.listdir(tmp_path / "out")) == before
    done = run_here("precache", "clean", "out", "--yes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "leftovers removed" in done.stdout
    assert os.listdir(tmp_path / "out") == []
    again = run_here("precache", "clean", "out", "--yes", cwd=tmp_path)
    assert "no leftovers" in again.stdout
