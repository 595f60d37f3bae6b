"""Sources of the same pictures, and real trainings from them: verdicts, and what was broken off."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.measure.accuracy import find_pictures, run, train
from bench.report.accuracy import SAME, compare
from precache.errors import DatasetError, SettingError
from precache.reporting import unseen
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


def test_the_same_pictures_are_as_good(squares: Squares, tmp_path: Path) -> None:
    sources = squares.sources("imagefolder", "ours=shards")
    (same,) = compare(run(squares.task(tmp_path), sources, range(3), unseen), margin=5.0)
    assert (same.name, same.verdict) == ("ours", SAME)
    assert same.top1 > 95


class Stop(BaseException):
    """As a signal."""


@pytest.mark.parametrize("text", ["imagefolder", "ours=shards"])
def test_a_training_that_was_broken_off_ends_with_the_same_weights(
    text: str, squares: Squares, tmp_path: Path
) -> None:
    (source,) = squares.sources(text)
    whole, broken = squares.task(tmp_path / "whole"), squares.task(tmp_path / "broken")
    uninterrupted = train(whole, source, 1, lambda epoch: None)

    def stop(epoch: int) -> None:
        if epoch == 2:
            raise Stop

    with pytest.raises(Stop, match="finished trainings and epochs are kept, and the same command goes on"):
        train(broken, source, 1, stop)
    other = replace(broken, recipe=replace(TINY, lr=0.3))
    with pytest.raises(SettingError, match=r"unfinished-.*lr: 0\.1, here 0\.3\); name another --out"):
        train(other, source, 1, stop)
    resumed = train(broken, source, 1, lambda epoch: None)
    assert (resumed["resumed"], uninterrupted["resumed"]) == (1, 0)
    curves = [[point[:2] for point in line["curve"]] for line in (resumed, uninterrupted)]
    assert curves[0] == curves[1]
    assert [epoch for epoch, _ in curves[0]] == [1, 2, 3, 4, 5]
    states = [torch.load(task.kept(source, 1), weights_only=True)["training"] for task in (whole, broken)]
    torch.testing.assert_close(*states, rtol=0, atol=0)  # of the last epoch but one
