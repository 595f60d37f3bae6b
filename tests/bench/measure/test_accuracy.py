"""Sources of the same pictures, and real trainings from them: verdicts, and what was broken off."""

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


def test_all_sources_serve_the_training_pictures_in_as_many_batches(squares: Squares) -> None:
    sources = squares.sources("imagefolder", "ours=shards", "pytorch", "device=shards,augment=device")
    pictures = find_pictures(squares.tree, sources)
    assert (len(pictures.train), len(pictures.val)) == (3 * TRAIN, 3 * VAL)
    expected = set(pictures.tree.ids[pictures.train].tolist())
    for source in sources:
        with source.open(pictures, TINY, seed=4) as feed:
            feed.set_epoch(2)
            batches = list(feed)
        assert [tuple(batch.images.shape) for batch in batches] == [(8, 3, 16, 16)] * 6, source.name
        assert {batch.images.dtype for batch in batches} == {torch.float32}
        served = torch.cat([batch.labels for batch in batches])
        assert served.bincount().tolist() == [TRAIN] * 3
        if source.backend != "imagefolder":  # which counts the pictures in its own way
            assert {sample for batch in batches for sample in batch.ids.tolist()} == expected


def test_other_pictures_are_refused_and_those_that_the_tree_lacks_named(
    squares: Squares, tmp_path: Path
) -> None:
    rows = squares.listed.read_text().splitlines()
    path, split = rows[1].split(",")
    swapped = [rows[0], f"{path},{'val' if split == 'train' else 'train'}", *rows[2:]]
    for name, listed in {"other": swapped, "no_val": [row for row in rows if row[-3:] != "val"]}.items():
        (tmp_path / name).write_text("\n".join(listed))
        squares.convert(name, tmp_path / name)
    tree = shutil.copytree(squares.tree, tmp_path / "tree")
    (tree / "red/03.png").unlink()
    other, no_val = (str(squares.folder / name) for name in ("other", "no_val"))
    for root, sources, told in (
        (squares.tree, ("ours=shards", other), rf"{path} .*with the same --splits"),
        (squares.tree, (no_val,), r"no_val: .*convert with --splits FILE"),
        (tree, ("ours=shards",), r"has red/03\.png in class 'red', .*tree does not"),
    ):
        with pytest.raises(DatasetError, match=told):
            find_pictures(root, squares.sources(*sources))


def test_the_same_pictures_are_as_good(squares: Squares) -> None:
    sources = squares.sources("imagefolder", "ours=shards")
    result = compare_sources(sources, squares.pictures, TINY, range(3), None, no_progress, margin=5.0)
    assert [row.texts["verdict"] for row in result.rows] == ["-", AS_GOOD]
    assert result.rows[1].values["top1_accuracy"].median > 0.95


def unseen_epoch(epoch: int) -> None:
    """Nobody looks."""


class Stop(BaseException):
    """As a signal."""


def stop(epoch: int) -> None:
    if epoch == 2:
        raise Stop


def weights(task: Task) -> dict[str, torch.Tensor]:
    """Numbers of the training that is kept."""
    assert task.unfinished is not None
    state: dict[str, torch.Tensor] = torch.load(task.unfinished, weights_only=True)["learner"]["model"]
    return state


@pytest.mark.parametrize("text", ["imagefolder", "ours=shards"])
def test_a_training_that_was_broken_off_ends_with_the_same_weights(
    text: str, squares: Squares, tmp_path: Path
) -> None:
    (source,) = squares.sources(text)
    whole, broken = squares.task(tmp_path / "whole"), squares.task(tmp_path / "broken")
    uninterrupted = train(whole, source, 1, unseen_epoch)
    with pytest.raises(Stop):
        train(broken, source, 1, stop)
    resumed = train(broken, source, 1, unseen_epoch)
    assert (resumed.numbers["resumed"], uninterrupted.numbers["resumed"]) == (1, 0)
    for name in ("epoch", "top1_accuracy"):
        assert resumed.series[name] == uninterrupted.series[name]
    assert resumed.series["epoch"] == (1, 2, 3, 4, 5)
    torch.testing.assert_close(weights(broken), weights(whole), rtol=0, atol=0)


def test_an_unfinished_training_of_other_settings_is_begun_anew(squares: Squares, tmp_path: Path) -> None:
    (source,) = squares.sources("ours=shards")
    task = squares.task(tmp_path / "unfinished")
    for other_task, seed in ((replace(task, recipe=replace(TINY, lr=0.3)), 1), (task, 2)):
        with pytest.raises(Stop):
            train(other_task, source, seed, stop)
        assert train(task, source, 1, unseen_epoch).numbers["resumed"] == 0


def test_a_source_trains_to_the_weights_of_the_example(squares: Squares, tmp_path: Path) -> None:
    (source,) = squares.sources("ours=shards")
    task = squares.task(tmp_path / "unfinished")
    train(task, source, 3, unseen_epoch)
    words = [
        squares.shards,
        "--out",
        tmp_path / "out",
        "--model",
        TINY.model,
        "--size",
        TINY.size,
        "--seed",
        3,
    ]
    words += ["--epochs", TINY.epochs, "--batch-size", TINY.batch_size, "--lr", TINY.lr, "--device", "cpu"]
    assert example.main([*map(str, words)]) == 0
    trained = torch.load(tmp_path / "out/checkpoint.pt", weights_only=True)["model"]
    torch.testing.assert_close(trained, weights(task), rtol=0, atol=0)


def test_validation_is_what_torchvision_shows(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    photos = [str(tmp_path / f"{number}.png") for number in range(3)]
    for photo, shape in zip(photos, ((60, 90, 3), (81, 40, 3), (33, 33, 3)), strict=True):
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(photo)
    recipe = transforms.Compose([transforms.Resize(32, antialias=True), transforms.CenterCrop(28)])
    for photo, decoded in zip(photos, decode_validation(photos, 28, 2), strict=True):
        assert np.array_equal(decoded, np.asarray(recipe(Image.open(photo).convert("RGB"))))
