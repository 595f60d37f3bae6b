"""Converting while training: `precache=` of `loaders.build` and `loaders.ImageDataset`."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import loaders
import precache
from precache import Recipe, SettingError
from precache.conversion.journal import JOURNAL_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError
from tests.building import build_loader
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.loader_contract import ids_of
from tests.precache.destinations import contents

RECIPE = small_recipe("shards")
SETTINGS = {"batch_size": 16, "size": 32, "workers": 1, "augment": "train"}


@pytest.fixture
def tree(raw_tree: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(raw_tree, tmp_path / "tree"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shards"


def build(tree: Path, folder: Path, **settings: Any) -> loaders.Loader:
    return build_loader(tree, precache=folder, recipe=RECIPE, **SETTINGS, **settings)


def remove_pictures(tree: Path) -> None:
    for picture in tree.glob("*/*"):
        picture.unlink()


def wait_for(folder: Path) -> None:
    """Wait until the conversion is finished, which removes its journal after it has written the manifest."""
    deadline_s = time.monotonic() + 60
    while not (folder / MANIFEST_NAME).exists() or (folder / JOURNAL_NAME).exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def ids_and_labels(batches: Iterable[loaders.Batch]) -> list[tuple[list[int], list[int]]]:
    return [(batch.ids.tolist(), batch.labels.tolist()) for batch in batches]


def pictures(batches: Iterable[loaders.Batch]) -> dict[int, torch.Tensor]:
    return {int(i): image for batch in batches for i, image in zip(batch.ids, batch.images, strict=True)}


def test_finished_shards_replace_the_tree_between_epochs(
    tree: Path, converted: dict[str, Path], folder: Path
) -> None:
    """Batches, states and a subset stay the same, and the shards are those of `precache convert`."""
    names = sorted(path.name for path in tree.iterdir() if path.is_dir())
    ranks: list[dict[str, Any]] = [{"rank": rank, "world_size": 2} for rank in range(2)]
    subset = {"classes": [names[3], names[0]]}
    plain = [build_loader(tree, **SETTINGS, **settings) for settings in (*ranks, subset)]
    *expected, subset_expected = [[ids_and_labels(loader) for _ in range(4)] for loader in plain]
    converting = [build(tree, folder, **rank) for rank in ranks]
    assert [ids_and_labels(loader) for loader in converting] == [epochs[0] for epochs in expected]
    state = converting[0].state_dict()
    wait_for(folder)
    assert contents(folder) == contents(converted["shards"])
    for epoch in (1, 2):  # some batches of epoch 1 were read ahead, from the tree
        assert [ids_and_labels(loader) for loader in converting] == [epochs[epoch] for epochs in expected]
    finished = build(tree, folder, **subset)
    remove_pictures(tree)
    assert [ids_and_labels(finished) for _ in range(4)] == subset_expected
    last_epoch = [list(loader) for loader in converting]
    assert [ids_and_labels(batches) for batches in last_epoch] == [epochs[3] for epochs in expected]
    stored = build_loader(folder, **SETTINGS)
    stored.set_epoch(3)
    stored_pictures = pictures(stored)
    assert all(torch.equal(stored_pictures[i], image) for i, image in pictures(chain(*last_epoch)).items())
    converting[0].load_state_dict(state)
    assert ids_and_labels(converting[0]) == expected[0][1]
    plain[0].load_state_dict(converting[0].state_dict())  # states fit loaders of the tree, too
    for loader in (*plain, *converting, finished, stored):
        loader.close()


def test_an_augment_function_may_return_any_size_while_converting(tree: Path, folder: Path) -> None:
    def cut(images: torch.Tensor, ids: torch.Tensor, epoch: int) -> torch.Tensor:
        return images[:, :20, :20]

    for _ in range(2):
        with build_loader(tree, precache=folder, recipe=RECIPE, workers=1, augment=cut) as loader:
            assert next(iter(loader)).images.shape[2:] == (20, 20)
            wait_for(folder)


def test_an_image_dataset_switches_to_shards_in_dataloader_workers(tree: Path, folder: Path) -> None:
    dataset = loaders.ImageDataset(tree, decode="tensor", precache=folder, recipe=RECIPE)
    dataset[0]  # so that workers are forked from a process that has checked for shards
    labels = dataset.targets
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert [label for _, label in loader] == labels
    wait_for(folder)
    remove_pictures(tree)
    for chosen in (slice(None), slice(None, 3, -1)):  # all samples, and some that a script has chosen
        dataset.samples = dataset.samples[chosen]
        served = [(picture, label) for picture, label in loader]
        assert [label for _, label in served] == labels[chosen]
        assert {min(picture.shape[1:]) for picture, _ in served} == {48}
    stored = loaders.ImageDataset(folder, decode="tensor")
    assert all(torch.equal(picture, stored[-1 - place][0]) for place, (picture, _) in enumerate(served))


PROGRAM = """
import sys
from pathlib import Path
from tests.loaders.test_converting import build

with build(*map(Path, sys.argv[1:])) as loader:
    next(iter(loader))
    print("running", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["killed", pytest.param("ended", marks=pytest.mark.slow)])
def test_the_conversion_ends_with_its_program_and_resumes_in_the_next(
    end: str, tree: Path, converted: dict[str, Path], folder: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tree), str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as training:  # type: ignore[call-overload]
        assert training.stdout.readline() == b"running\n"
        children = psutil.Process(training.pid).children(recursive=True)
        if end == "killed":
            training.kill()
        training.communicate(b"\n", timeout=60)
    assert training.returncode == (-signal.SIGKILL if end == "killed" else 0)
    assert psutil.wait_procs(children, timeout=30)[1] == []
    with build(tree, folder):
        wait_for(folder)
    assert contents(folder) == contents(converted["shards"])


def test_an_unwritable_precache_folder_is_only_a_warning(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Shards that another run writes there later are read nevertheless."""
    (tmp_path / "file").write_text("of the user's")
    folder = tmp_path / "file" / "shards"
    with build(tree, folder) as loader:
        deadline_s = time.monotonic() + 60
        while not caplog.messages and time.monotonic() < deadline_s:
            assert len(ids_of(loader)) == IMAGES
        assert len(ids_of(loader)) == IMAGES
        assert (tmp_path / "file").read_text() == "of the user's"
        (tmp_path / "file").unlink()
        precache.convert(tree, folder, RECIPE, workers=0)
        assert [len(ids_of(loader)) for _ in range(2)] == [IMAGES] * 2  # some batches were read ahead
        remove_pictures(tree)
        assert len(ids_of(loader)) == IMAGES
    (message,) = caplog.messages
    assert message.startswith(f"{folder} is not converted: ")
    assert message.endswith(f"from {tree}")


def test_the_tree_is_read_on_if_a_picture_cannot_be_converted(
    tree: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    next(tree.rglob("*.jpg")).write_bytes(b"no picture")
    with build(tree, folder, on_error="skip") as loader:
        wait_for(folder)
        assert [len(ids_of(loader)) for _ in range(3)] == [IMAGES - 1] * 3
    assert len([line for line in caplog.messages if "lacks 1 pictures" in line]) == 1
    precache.check(tree, workers=0)
    with build(tree, folder, on_error="skip") as loader:
        remove_pictures(tree)
        assert len(ids_of(loader)) == IMAGES - 1


def test_shards_replace_a_tree_that_is_split_by_shares(tree: Path, folder: Path) -> None:
    """The splits may be given beside the recipe or in it; here classes are two folders deep."""
    deep = tree.parent / "deep"
    deep.mkdir()
    tree.rename(deep / "all")
    splits = "train=0.7,val=0.3"
    settings = {"split": "val", "class_depth": 2, **SETTINGS}
    with build_loader(deep, splits=splits, **settings) as loader:
        expected = [ids_and_labels(loader) for _ in range(2)]
    with build_loader(deep, splits=splits, precache=folder, recipe=RECIPE, **settings) as loader:
        assert ids_and_labels(loader) == expected[0]
        wait_for(folder)
        recipe = small_recipe("shards", splits=splits)
        with build_loader(deep, precache=folder, recipe=recipe, **settings) as finished:
            shutil.rmtree(deep)
            assert ids_and_labels(loader) == expected[1]
            assert ids_and_labels(finished) == expected[0]


def test_shards_of_another_recipe_or_source_are_refused(
    tree: Path, converted: dict[str, Path], shaped: dict[str, Path], folder: Path
) -> None:
    grey = Recipe(format="shards", channels="grey")
    with pytest.raises(SettingError, check=lambda error: "precache convert" in error.remedy):
        build_loader(tree, precache=folder, recipe=grey)
    for other in (converted["dali"], shaped["grey-shards"]):
        with pytest.raises(DatasetError, check=lambda e, p=other: e.path == p and "recipe" in e.remedy):
            build_loader(tree, precache=other)


def replace_a_picture(tree: Path, folder: str = "*") -> None:
    """Replace one picture by another one of the same size in bytes."""
    small, large = sorted(tree.glob(f"{folder}/*.jpg"), key=lambda path: path.stat().st_size)[:2]
    large.write_bytes(small.read_bytes().ljust(large.stat().st_size, b"\0"))


def write_all_again(tree: Path) -> None:
    for path in tree.glob("*/*"):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def last_class(tree: Path) -> Path:
    return sorted(path for path in tree.iterdir() if path.is_dir())[-1]


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "none": (lambda tree: None, "shards"),
    "copied": (write_all_again, "shards"),
    "replaced": (replace_a_picture, "tree"),
    "replaced in the last class": (lambda tree: replace_a_picture(tree, last_class(tree).name), "tree"),
    "copied and replaced": (lambda tree: (write_all_again(tree), replace_a_picture(tree)), "tree"),
    "removed": (lambda tree: next(tree.glob("*/*.jpg")).unlink(), "error"),
    "added": (lambda tree: shutil.copy(next(tree.glob("*/*.jpg")), last_class(tree) / "zz.jpg"), "error"),
    "class renamed": (lambda tree: last_class(tree).rename(tree / "zz"), "error"),
}
"""Changes of a tree after it was converted, and what is read then: the shards, the tree, or an error."""


@pytest.mark.parametrize("change", CHANGES)
def test_shards_of_a_changed_tree_are_not_read(
    change: str, tree: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_tree, read = CHANGES[change]
    precache.convert(tree, folder, RECIPE, workers=0)
    change_tree(tree)
    if read == "error":
        with pytest.raises(DatasetError, check=lambda error: error.path == folder):
            build(tree, folder)
        with pytest.raises(DatasetError, check=lambda error: error.path == folder):
            loaders.ImageDataset(tree, precache=folder, recipe=RECIPE)
        return
    dataset = loaders.ImageDataset(tree, decode="tensor", precache=folder, recipe=RECIPE)
    plain = loaders.ImageDataset(tree, decode="tensor")
    is_tree = all(torch.equal(dataset[row][0], plain[row][0]) for row in range(IMAGES))
    assert is_tree == (read == "tree")
    read_path = tree if read == "tree" else folder
    with build(tree, folder) as loader, build_loader(read_path, **SETTINGS) as expected_loader:
        expected, served = pictures(expected_loader), pictures(loader)
        assert all(torch.equal(expected[i], served[i]) for i in range(IMAGES))
    assert len([line for line in caplog.messages if "--overwrite" in line]) == (2 if read == "tree" else 0)
    caplog.clear()
    other_classes = [
        path.name for path in sorted(tree.iterdir()) if path.is_dir() and path != last_class(tree)
    ]
    build(tree, folder, classes=other_classes).close()
    is_served = read == "tree" and change != "replaced in the last class"
    assert bool(caplog.messages) == is_served, "pictures that are not served may change"


def test_set_size_reads_the_tree_on_if_files_came_since_the_build(
    tree: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    precache.convert(tree, folder, RECIPE, workers=0)
    with build(tree, folder) as loader:
        picture = next(tree.glob("*/*.jpg"))
        shutil.copy(picture, picture.with_name("added.jpg"))
        loader.set_size(24)
        assert len(pictures(loader)) == IMAGES
    (message,) = caplog.messages
    assert message.startswith(f"{folder}: ")
    assert str(tree) in message
