"""Sources of the same pictures, and real trainings from them: verdicts, and what was broken off."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.measure.accuracy import Feed, Pictures, Source, find_pictures, open_source, run, train
from bench.measure.training import Recipe
from bench.report.accuracy import SAME, WORSE, compare
from loaders.batch import Batch
from precache.errors import DatasetError, SettingError
from precache.reporting import unseen
from tests.bench.squares import TINY, TRAIN, VAL, Squares


def test_a_source_is_written_in_one_word(squares: Squares) -> None:
    for text, *told in (
        ("{shards}", "shards", "shards", "shards", "auto"),
        ("q75=shards:{shards}", "q75", "shards", "shards", "auto"),
        ("raw=pytorch,augment=cpu", "raw", "pytorch", "tree", "cpu"),
        ("a=synthetic:{tree},augment=device", "a", "synthetic", "tree", "device"),
    ):
        source = open_source(text.format(shards=squares.shards, tree=squares.tree), squares.tree)
        assert [source.name, source.backend, source.path.name, source.augment] == told


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
    for root, sources, error, told in (
        (squares.tree, ("ours=shards", other), DatasetError, rf"{path} .*with the same --splits"),
        (squares.tree, (no_val,), DatasetError, r"no_val: .*convert with --splits FILE"),
        (squares.tree, ("same=shards", "same=pytorch"), SettingError, "'same'"),
        (tree, ("ours=shards",), DatasetError, r"has red/03\.png in class 'red', .*tree does not"),
    ):
        with pytest.raises(error, match=told):
            find_pictures(root, squares.sources(*sources))


class Shuffled(Source):
    """One whose labels say nothing of the pictures."""

    def open(self, pictures: Pictures, recipe: Recipe, seed: int) -> Feed:
        feed = Source.open(self, pictures, recipe, seed)
        generator = torch.Generator().manual_seed(0)

        class Shuffling(type(feed)):  # type: ignore[misc]
            def __iter__(self) -> Iterator[Batch]:
                for images, labels in super().__iter__():
                    yield Batch(images, labels[torch.randperm(len(labels), generator=generator)])

        feed.__class__ = Shuffling
        return feed


def test_the_same_pictures_are_as_good_and_shuffled_labels_are_worse(
    squares: Squares, tmp_path: Path
) -> None:
    baseline, ours = squares.sources("imagefolder", "ours=shards")
    fields = {name: getattr(ours, name) for name in ("backend", "path", "data")}
    task = squares.task(tmp_path)
    lines = run(task, [baseline, ours, Shuffled(name="shuffled", **fields)], range(3), unseen)
    same, worse = compare(lines, margin=5.0)
    assert (same.name, same.verdict, worse.name, worse.verdict) == ("ours", SAME, "shuffled", WORSE)
    assert same.top1 > 95
    assert worse.difference < -30
    written = (tmp_path / "trainings.jsonl").read_text().splitlines()
    first = [row.split('"')[3] for row in written[::3]]
    assert first == ["imagefolder", "ours", "shuffled"]  # each is first in turn
    assert not list(tmp_path.glob("unfinished*"))


class Stop(BaseException):
    """As a signal."""


@pytest.mark.parametrize("text", ["imagefolder", "ours=shards", "pytorch"])
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
