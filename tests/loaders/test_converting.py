"""Converting while training: `precache=` of `loaders.build` and `loaders.ImageDataset`."""

import filecmp
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import loaders
import precache
from precache import Recipe, SettingError
from precache.errors import DatasetError
from tests.building import build_loader
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.loader_contract import ids_of

RECIPE = small_recipe("shards")
SETTINGS = {"batch_size": 16, "size": 32, "workers": 1, "augment": "train"}


@pytest.fixture
def tree(raw_tree: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(raw_tree, tmp_path / "tree"))


def empty(tree: Path) -> None:
    """Take the pictures away."""
    for picture in tree.rglob("*"):
        if picture.is_file():
            picture.unlink()


def wait_until(holds: Callable[[], bool], most_s: float = 60) -> None:
    deadline = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_finished(folder: Path) -> bool:
    return (folder / "dataset.json").exists()


def same_files(one: Path, other: Path) -> bool:
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(other)) and not any(filecmp.cmpfiles(one, other, names, False)[1:])


def said(batches: Iterable[loaders.Batch]) -> list[tuple[list[int], list[int]]]:
    return [(batch.ids.tolist(), batch.labels.tolist()) for batch in batches]


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_take_the_place_of_the_tree_once_they_are_finished(
    world_size: int, tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Nothing else changes: batches, states, and what `precache convert` would have written."""
    folder = tmp_path / "shards"
    settings = [{**SETTINGS, "rank": rank, "world_size": world_size} for rank in range(world_size)]
    plain = [build_loader(tree, **of_rank) for of_rank in settings]
    expected = [[said(loader) for _ in range(4)] for loader in plain]
    growing = [build_loader(tree, precache=folder, recipe=RECIPE, **of_rank) for of_rank in settings]
    assert [said(loader) for loader in growing] == [epochs[0] for epochs in expected]
    state = growing[0].state_dict()
    wait_until(lambda: is_finished(folder))
    assert same_files(folder, converted["shards"])
    for epoch in (1, 2):  # of which some batches were read ahead
        assert [said(loader) for loader in growing] == [epochs[epoch] for epochs in expected]
    empty(tree)
    assert [said(loader) for loader in growing] == [epochs[3] for epochs in expected]
    growing[0].load_state_dict(state)
    assert said(growing[0]) == expected[0][1]
    plain[0].load_state_dict(growing[0].state_dict())  # as of the tree
    for loader in plain + growing:
        loader.close()


def test_what_is_finished_is_read_from_the_first_epoch_on(tree: Path, converted: dict[str, Path]) -> None:
    """With its pixels; of a part of the tree, that part."""
    folder = converted["shards"]
    names = sorted(path.name for path in tree.iterdir() if path.is_dir())
    part = {**SETTINGS, "classes": [names[3], names[0]]}
    with build_loader(tree, **part) as plain:
        expected = said(plain)
    with (
        build_loader(tree, precache=folder, recipe=RECIPE, **SETTINGS) as ours,
        build_loader(tree, precache=folder, recipe=RECIPE, **part) as of_part,
        build_loader(folder, **SETTINGS) as theirs,
    ):
        empty(tree)
        assert said(of_part) == expected
        pictures, stored = (
            {int(i): image for batch in loader for i, image in zip(batch.ids, batch.images, strict=True)}
            for loader in (ours, theirs)
        )
    assert len(stored) == IMAGES
    assert all(torch.equal(pictures[i], stored[i]) for i in stored)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_dataset_changes_over_in_the_workers_of_a_dataloader(
    workers: int, tree: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    dataset = loaders.ImageDataset(tree, decode="tensor", precache=folder, recipe=RECIPE)
    labels = dataset.targets
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert [label for _, label in loader] == labels
    wait_until(lambda: is_finished(folder))
    dataset._asked = 0  # it looks every 512 samples
    empty(tree)
    stored = [(picture, label) for picture, label in loader]
    assert [label for _, label in stored] == labels
    assert {min(picture.shape[1:]) for picture, _ in stored} == {48}


PROGRAM = """
import sys, time, loaders, precache
if __name__ == "__main__":
    recipe = precache.Recipe(format="shards", size=48, fit="crop", resample="bilinear", shard_bytes=82944)
    loader = loaders.build(sys.argv[1], precache=sys.argv[2], recipe=recipe, size=32, batch_size=16)
    next(iter(loader))
    print("running", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["killed", pytest.param("ended", marks=pytest.mark.slow)])
def test_the_conversion_ends_with_the_training_and_goes_on_with_the_next(
    how: str, tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    training = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tree), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert training.stdout is not None
    assert training.stdout.readline() == "running\n"
    children = psutil.Process(training.pid).children(recursive=True)
    if how == "killed":
        training.kill()
    training.communicate("\n", timeout=60)
    assert training.returncode == (-signal.SIGKILL if how == "killed" else 0)
    assert psutil.wait_procs(children, timeout=30)[1] == []
    with build_loader(tree, precache=folder, recipe=RECIPE, **SETTINGS):
        wait_until(lambda: is_finished(folder))
    assert same_files(folder, converted["shards"])


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("of the user's")
    folder = tmp_path / "file" / "shards"
    with build_loader(tree, precache=folder, recipe=RECIPE, **SETTINGS) as loader:
        wait_until(lambda: len(ids_of(loader)) == IMAGES and len(caplog.messages) > 0)
        assert len(ids_of(loader)) == IMAGES
    assert (tmp_path / "file").read_text() == "of the user's"
    (message,) = caplog.messages
    assert message.startswith(f"{folder} is not converted: ")
    assert message.endswith(f"; reading goes on from {tree}")


def test_a_picture_that_is_left_out_keeps_the_tree(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    next(tree.rglob("*.jpg")).write_bytes(b"no picture")
    folder = tmp_path / "shards"
    settings = {**SETTINGS, "on_error": "skip"}
    with build_loader(tree, precache=folder, recipe=RECIPE, **settings) as loader:
        wait_until(lambda: is_finished(folder))
        for _ in range(3):
            assert len(ids_of(loader)) == IMAGES - 1
    assert len([line for line in caplog.messages if "lacks 1 pictures" in line]) == 1
    precache.check(tree, workers=0)
    with build_loader(tree, precache=folder, recipe=RECIPE, **settings) as loader:
        empty(tree)
        assert len(ids_of(loader)) == IMAGES - 1


def test_what_cannot_take_the_place_of_the_tree_is_refused(
    tree: Path, converted: dict[str, Path], shaped: dict[str, Path], tmp_path: Path
) -> None:
    for recipe in ({"format": "dali"}, {"format": "shards", "splits": "train=0.5,val=0.5"}):
        with pytest.raises(SettingError, match="precache convert"):
            build_loader(tree, precache=tmp_path / "shards", recipe=Recipe(**recipe))
    with pytest.raises(SettingError, match="is converted already"):
        build_loader(converted["dali"], precache=tmp_path / "shards")
    with pytest.raises(SettingError, match=r"s3://bucket/a: .*precache push"):
        build_loader(tree, precache="s3://bucket/a")
    with pytest.raises(SettingError, match="give precache"):
        build_loader(tree, recipe=RECIPE)
    for folder in (converted["shards"], converted["dali"], shaped["grey-shards"]):
        with pytest.raises(DatasetError, match=rf"{folder}: was converted by .*; give its recipe"):
            build_loader(tree, precache=folder)
    shutil.rmtree(next(tree.iterdir()))
    with pytest.raises(DatasetError, match=f"{converted['shards']}: holds something else"):
        build_loader(tree, precache=converted["shards"], recipe=RECIPE)
