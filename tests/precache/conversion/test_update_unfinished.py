"""Updates that end too early, and files that are in their way."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from precache import convert, verify, verify_deep
from precache.conversion.journal import JOURNAL_NAME, unfinished_names
from precache.errors import DatasetError
from precache.example_data.sample_tree import make_sample
from tests.command import ROOT
from tests.conftest import small_recipe
from tests.killing import contents
from tests.killing_updates import grow
from tests.precache.conversion.updating import interrupt, update


def test_an_unfinished_update_of_another_state_of_the_source_is_dropped(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    update(tree, out)
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(out, undisturbed)
    grow(tree, 1)
    interrupt(tree, out)
    assert (out / JOURNAL_NAME).exists()
    assert verify(out) == []
    shutil.rmtree(tree / "001.new")
    update(tree, out)
    update(tree, undisturbed)
    assert contents(out) == contents(undisturbed)


def test_overwrite_replaces_a_dataset_with_an_unfinished_update(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for times in (0, 1):
        update(tree, out)
        grow(tree, times)
    interrupt(tree, out)
    recipe = small_recipe("shards", size=32)
    convert(tree, out, recipe, workers=0, overwrite=True, max_rejects=0.5)
    convert(tree, tmp_path / "fresh", recipe, workers=0, max_rejects=0.5)
    assert contents(out) == contents(tmp_path / "fresh")


def test_killed_at_a_call_of_the_system_an_update_is_completed(tmp_path: Path) -> None:
    assert kill_at_calls(tmp_path, 1, 29) > 90


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_every_call_of_the_system_an_update_is_completed(tmp_path: Path) -> None:
    assert kill_at_calls(tmp_path) > 90


def kill_at_calls(tmp_path: Path, *moments: int) -> int:
    """The number of calls at the last of which `tests.killing_updates` has killed an update; see there."""
    make_sample(tmp_path / "tree", images=10, classes=2, seed=1, like="caltech", workers=0)
    script = [sys.executable, "-m", "tests.killing_updates", tmp_path / "tree", tmp_path / "folder"]
    command = [*map(str, script), *map(str, moments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_file_under_a_name_that_an_update_needs_is_not_overwritten(
    tree: Path, tmp_path: Path, unfinished: bool
) -> None:
    out = tmp_path / "out"
    update(tree, out)
    grow(tree, 1)
    if unfinished:
        interrupt(tree, out)
        grow(tree, 2)
    planned = unfinished_names(out)
    shutil.copytree(out, tmp_path / "copy")
    update(tree, tmp_path / "copy")
    mine = out / max(contents(tmp_path / "copy").keys() - contents(out).keys() - planned)
    mine.write_text("mine")
    with pytest.raises(DatasetError, match=f"not part of the dataset.*{mine.name}"):
        update(tree, out)
    assert mine.read_text() == "mine"
    mine.rename(tmp_path / mine.name)
    update(tree, out)
    assert verify_deep(out, tree, workers=0).problems == ()
