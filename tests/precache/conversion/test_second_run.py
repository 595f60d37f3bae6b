"""A destination at which something lies: what an earlier run made, or files of the user's."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from precache import convert, verify
from precache.conversion.journal import JOURNAL_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, SettingError
from tests.conftest import IMAGES, small_recipe
from tests.precache.destinations import contents


def test_a_finished_destination_is_left_as_it_is(tree: Path, tmp_path: Path) -> None:
    first = convert(tree, tmp_path / "out", small_recipe("shards"), workers=0)
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    again = convert(tree, tmp_path / "out", small_recipe("shards"), workers=0)
    assert (first.converted, again.converted) == (IMAGES, 0)
    assert again.manifest == first.manifest
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == before


def test_another_recipe_or_source_is_refused_with_the_difference(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(tree, out, small_recipe("shards"), workers=0)
    before = contents(out)
    with pytest.raises(DatasetError, match=r"size 48, asked for 32.*--overwrite"):
        convert(tree, out, small_recipe("shards", size=32), workers=0)
    next(tree.glob("*/*.jpg")).unlink()
    with pytest.raises(DatasetError, match="another source tree"):
        convert(tree, out, small_recipe("shards"), workers=0)
    assert contents(out) == before


def test_overwrite_replaces_another_conversion(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(tree, out, small_recipe("dali"), workers=0)
    convert(tree, out, small_recipe("shards", size=32), workers=0, overwrite=True)
    convert(tree, tmp_path / "fresh", small_recipe("shards", size=32), workers=0)
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_not_ours_is_not_touched(tree: Path, tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.safetensors").write_text("years of work")
    with pytest.raises(DatasetError, match="not a folder that precache made"):
        convert(tree, out, small_recipe("shards"), workers=0, overwrite=overwrite)
    assert contents(out) == {"thesis.safetensors": b"years of work"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", [JOURNAL_NAME, MANIFEST_NAME])
def test_a_file_of_our_name_makes_no_folder_ours(
    tree: Path, tmp_path: Path, name: str, overwrite: bool
) -> None:
    out = tmp_path / "home"
    out.mkdir()
    for file in (name, "photos.tar", "download.partial"):
        (out / file).write_text('{"a": 1}\n')
    before = contents(out)
    with pytest.raises(DatasetError):
        convert(tree, out, small_recipe("dali"), workers=0, overwrite=overwrite)
    assert contents(out) == before


def test_a_file_as_destination_is_refused(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DatasetError, match="file: is a file; choose a folder"):
        convert(tree, tmp_path / "file", small_recipe("dali"), workers=0)


def test_folders_inside_one_another_are_refused(tree: Path) -> None:
    for destination in (tree, tree / "001.anchor" / "out", tree.parent):
        with pytest.raises(SettingError, match=r"and the source .* overlap"):
            convert(tree, destination, small_recipe("shards"), workers=0)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that not even root can write to")
def test_a_destination_that_cannot_be_written_is_a_clear_error(raw_tree: Path) -> None:
    with pytest.raises(DatasetError, match=r"/proc/.*: cannot be written \(.*same command again") as told:
        convert(raw_tree, "/proc/self/out", small_recipe("shards"), workers=0)
    assert "kept" not in str(told.value), "nothing was begun"


def test_an_interrupted_run_is_continued_to_the_same_bytes(
    raw_tree: Path, tmp_path: Path, converted: dict[str, Path]
) -> None:
    out = tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if done == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(raw_tree, out, small_recipe("webdataset"), workers=0, on_progress=stop)
    assert not (out / MANIFEST_NAME).exists()
    finished = len((out / JOURNAL_NAME).read_text().splitlines()) - 1
    assert finished == 2
    first_shard = next(out.glob("*00000.tar"))
    untouched = first_shard.stat().st_mtime_ns
    next(out.glob("*00001.tar")).write_bytes(b"damaged since")
    with open(out / JOURNAL_NAME, "a") as journal:
        journal.write('{"entry": {"na')  # killed while it wrote a line
    resumed = convert(raw_tree, out, small_recipe("webdataset"), workers=0)
    assert 0 < resumed.converted < IMAGES
    assert first_shard.stat().st_mtime_ns == untouched
    assert contents(out) == contents(converted["webdataset"])


def test_a_killed_parent_leaves_a_resumable_folder(
    raw_tree: Path, tmp_path: Path, converted: dict[str, Path]
) -> None:
    out = tmp_path / "out"
    script = (
        "from tests.conftest import small_recipe; from precache import convert; import sys\n"
        "if __name__ == '__main__':\n"
        "    convert(sys.argv[1], sys.argv[2], small_recipe('shards'), workers=0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, raw_tree, out])
    deadline = time.monotonic() + 60
    while not list(out.glob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.wait()
    convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert contents(out) == contents(converted["shards"])


DAMAGE = {
    "deleted": Path.unlink,
    "cut": lambda shard: os.truncate(shard, 100),
    "a folder": lambda shard: (shard.unlink(), shard.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("moment", ["converting", "overwriting", "updating", "finished", "to be updated"])
def test_no_run_is_done_while_a_shard_is_missing(
    moment: str, damage: str, tree: Path, tmp_path: Path
) -> None:
    """Whoever took it away, and whenever; and what is said to be done about it is enough."""
    out, name = tmp_path / "out", "train-00006" if moment == "updating" else "train-00000"
    options: dict[str, Any] = {"workers": 0}
    if moment != "converting":
        convert(tree, out, small_recipe("shards"), **options)
    if "updat" in moment:
        next(tree.glob("*/*.jpg")).unlink()
        for number in range(20):
            Image.new("RGB", (9, 9), (number, 0, 0)).save(next(tree.iterdir()) / f"new-{number}.png")
        options["update"] = True
    options["overwrite"] = moment == "overwriting"
    damaged: list[Path] = []

    def spoil(done: int = 0, total: int = 0) -> None:
        for shard in tmp_path.glob(f"{'.out.*.precache' if moment == 'overwriting' else 'out'}/{name}.*"):
            if not damaged:
                DAMAGE[damage](shard)
                damaged.append(shard)

    if moment in ("finished", "to be updated"):
        spoil()
    with pytest.raises(DatasetError, match=rf"{name}.safetensors: (missing|expected|cannot)"):
        convert(tree, out, small_recipe("shards"), on_progress=spoil, **options)
    if damage == "a folder":
        damaged[0].rmdir()
    if moment in ("finished", "to be updated"):
        options.update(update=False, overwrite=True)
    convert(tree, out, small_recipe("shards"), **options)
    assert verify(out) == []


def test_an_unfinished_conversion_of_another_recipe_is_refused(raw_tree: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(raw_tree, tmp_path / "out", small_recipe("dali"), workers=0, on_progress=stop)
    with pytest.raises(DatasetError, match="seed 0, asked for 7"):
        convert(raw_tree, tmp_path / "out", small_recipe("dali", seed=7), workers=0)
