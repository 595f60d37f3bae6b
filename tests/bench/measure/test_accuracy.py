"""Sources of the same pictures, and real trainings from them: verdicts, and trainings that go on."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from bench.measure.accuracy import Task, compare_sources, decode_validation, find_pictures, train
from bench.report.accuracy import AS_GOOD
from loaders.examples import train as example
from precache.errors import DatasetError
from precache.reporting import no_progress
from tests.bench.squares import TINY, TRAIN, VAL, Squares

pytestmark = pytest.mark.usefixtures("tiny_model")


def test_all_sources_serve_the_training_pictures_in_equal_batches(squares: Squares) -> None:
    sources = squares.sources("imagefolder", "ours=shards", "pytorch", "device=shards,augment=device")
    pictures = find_pictures(squares.tree, sources)
    assert (len(pictures.train), len(pictures.val)) == (3 * TRAIN, 3 * VAL)
    expected = set(pictures.tree.ids[pictures.train].tolist())
    for source in sources:
        with source.open(pictures, TINY, seed=4) as loader:
            loader.set_epoch(2)
            batches = list(loader)
        assert [tuple(batch.images.shape) for batch in batches] == [(8, 3, 16, 16)] * 6, source.name
        assert {batch.images.dtype for batch in batches} == {torch.float32}
        labels = torch.cat([batch.labels for batch in batches])
        assert labels.bincount().tolist() == [TRAIN] * 3
        if source.backend != "imagefolder":  # its ids are places in ImageFolder's own list
            assert {sample for batch in batches for sample in batch.ids.tolist()} == expected


def test_find_pictures_refuses_sources_with_other_splits(squares: Squares, tmp_path: Path) -> None:
    header, first, *others = squares.split_list.read_text().splitlines()
    path, split = first.split(",")
    swapped = f"{path},{'val' if split == 'train' else 'train'}"
    (tmp_path / "list").write_text("\n".join([header, swapped, *others]))
    squares.convert("other", tmp_path / "list")
    other = squares.folder / "other"
    with pytest.raises(DatasetError, match=path) as raised:
        find_pictures(squares.tree, squares.sources("ours=shards", str(other)))
    assert raised.value.path == other
    assert "--splits" in raised.value.remedy


def test_find_pictures_refuses_a_source_without_a_val_split(squares: Squares, tmp_path: Path) -> None:
    lines = squares.split_list.read_text().splitlines()
    (tmp_path / "list").write_text("\n".join(line for line in lines if not line.endswith(",val")))
    squares.convert("no_val", tmp_path / "list")
    no_val = squares.folder / "no_val"
    with pytest.raises(DatasetError) as raised:
        find_pictures(squares.tree, squares.sources(str(no_val)))
    assert raised.value.path == no_val
    assert "--splits FILE" in raised.value.remedy


def test_find_pictures_names_a_picture_that_the_tree_lacks(squares: Squares, tmp_path: Path) -> None:
    tree = shutil.copytree(squares.tree, tmp_path / "tree")
    (tree / "red/03.png").unlink()
    with pytest.raises(DatasetError, match=r"red/03\.png in class 'red'") as raised:
        find_pictures(tree, squares.sources("ours=shards"))
    assert raised.value.path == squares.shards


def test_compare_sources_finds_the_same_pictures_as_good(squares: Squares) -> None:
    sources = squares.sources("imagefolder", "ours=shards")
    result = compare_sources(sources, squares.pictures, TINY, range(3), None, no_progress, margin=5.0)
    assert [row.texts["verdict"] for row in result.rows] == ["-", AS_GOOD]
    assert result.rows[1].values["top1_accuracy"].median > 0.95


def ignore_epoch(epoch: int) -> None:
    """Callback of a training that is not interrupted."""


def interrupt(epoch: int) -> None:
    """Interrupt the training after its second epoch."""
    if epoch == 2:
        raise KeyboardInterrupt


def weights(task: Task) -> dict[str, torch.Tensor]:
    """Return the weights of the training that is kept."""
    assert task.unfinished is not None
    state: dict[str, torch.Tensor] = torch.load(task.unfinished, weights_only=True)["learner"]["model"]
    return state


@pytest.mark.parametrize("text", ["imagefolder", "ours=shards"])
def test_an_interrupted_training_ends_with_the_same_weights(
    text: str, squares: Squares, tmp_path: Path
) -> None:
    (source,) = squares.sources(text)
    whole_task, resumed_task = squares.task(tmp_path / "whole"), squares.task(tmp_path / "resumed")
    whole = train(whole_task, source, 1, ignore_epoch)
    with pytest.raises(KeyboardInterrupt):
        train(resumed_task, source, 1, interrupt)
    resumed = train(resumed_task, source, 1, ignore_epoch)
    assert (resumed.numbers["resumed"], whole.numbers["resumed"]) == (1, 0)
    for name in ("epoch", "top1_accuracy"):
        assert resumed.series[name] == whole.series[name]
    assert resumed.series["epoch"] == (1, 2, 3, 4, 5)
    torch.testing.assert_close(weights(resumed_task), weights(whole_task), rtol=0, atol=0)


def test_an_unfinished_training_of_other_settings_is_not_resumed(squares: Squares, tmp_path: Path) -> None:
    (source,) = squares.sources("ours=shards")
    task = squares.task(tmp_path / "unfinished")
    for other_task, seed in ((replace(task, recipe=replace(TINY, lr=0.3)), 1), (task, 2)):
        with pytest.raises(KeyboardInterrupt):
            train(other_task, source, seed, interrupt)
        assert train(task, source, 1, ignore_epoch).numbers["resumed"] == 0


def test_a_source_trains_to_the_weights_of_the_example(squares: Squares, tmp_path: Path) -> None:
    (source,) = squares.sources("ours=shards")
    task = squares.task(tmp_path / "unfinished")
    train(task, source, 3, ignore_epoch)
    options = {
        "out": tmp_path / "out",
        "model": TINY.model,
        "size": TINY.size,
        "seed": 3,
        "epochs": TINY.epochs,
        "batch-size": TINY.batch_size,
        "lr": TINY.lr,
        "device": "cpu",
    }
    words = [str(squares.shards), *(f"--{name}={value}" for name, value in options.items())]
    assert example.main(words) == 0
    trained = torch.load(tmp_path / "out/checkpoint.pt", weights_only=True)["model"]
    torch.testing.assert_close(trained, weights(task), rtol=0, atol=0)


def test_decode_validation_gives_the_pixels_of_torchvision(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    photos = [str(tmp_path / f"{number}.png") for number in range(3)]
    for photo, shape in zip(photos, ((60, 90, 3), (81, 40, 3), (33, 33, 3)), strict=True):
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(photo)
    transform = transforms.Compose([transforms.Resize(32, antialias=True), transforms.CenterCrop(28)])
    for photo, decoded in zip(photos, decode_validation(photos, 28, 2), strict=True):
        assert np.array_equal(decoded, np.asarray(transform(Image.open(photo).convert("RGB"))))
