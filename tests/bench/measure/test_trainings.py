"""Real trainings on coloured squares: verdicts, and trainings that were broken off."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.measure.training_sources import Feed
from bench.measure.trainings import Source, run, train
from bench.measure.trainings_file import Trainings
from bench.report.accuracy import SAME, WORSE, compare
from loaders.batch import Batch
from precache.errors import SettingError
from tests.bench.measure.squares import Squares, curves, unseen

SEEDS = range(3)


class WithShuffledLabels:
    """A feed whose labels say nothing of the pictures."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def __enter__(self) -> "WithShuffledLabels":
        return self

    def __exit__(self, *error: object) -> None:
        self._feed.__exit__(*error)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._feed)

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        for images, labels in self._feed:
            yield Batch(images, labels[torch.randperm(len(labels), generator=generator)])


def test_the_same_pictures_are_as_good_and_shuffled_labels_are_worse(
    squares: Squares, tmp_path: Path
) -> None:
    baseline, ours = squares.sources("imagefolder", "ours=shards")
    shuffled = Source("shuffled", lambda seed: WithShuffledLabels(ours.open(seed)), {"data": "shuffled"})
    done = Trainings(tmp_path / "trainings.jsonl")
    run(squares.task(tmp_path), [baseline, ours, shuffled], SEEDS, done, unseen)
    same, worse = compare(list(done.done.values()), margin=5.0)
    assert (same.name, same.verdict, worse.name, worse.verdict) == ("ours", SAME, "shuffled", WORSE)
    assert same.top1 > 95
    assert worse.difference < -30
    assert list(done.done) == [
        *(("imagefolder", 0), ("ours", 0), ("shuffled", 0)),
        *(("ours", 1), ("shuffled", 1), ("imagefolder", 1)),  # each is first in turn
        *(("shuffled", 2), ("imagefolder", 2), ("ours", 2)),
    ]
    assert not list(tmp_path.glob("unfinished*"))


class Stop(BaseException):
    """As a signal."""


@pytest.mark.parametrize("arm", ["imagefolder", "ours=shards", "pytorch"])
def test_a_training_that_was_broken_off_ends_with_the_same_weights(
    arm: str, squares: Squares, tmp_path: Path
) -> None:
    source, _ = squares.sources(arm, "beside=shards")
    whole, broken = squares.task(tmp_path / "whole"), squares.task(tmp_path / "broken")
    uninterrupted = train(whole, source, 1, unseen)

    def stop(epoch: int) -> None:
        if epoch == 2:
            raise Stop

    with pytest.raises(Stop):
        train(broken, source, 1, stop)
    resumed = train(broken, source, 1, unseen)
    assert resumed["resumed"] == 1
    assert uninterrupted["resumed"] == 0
    assert curves([resumed]) == curves([uninterrupted])
    assert [epoch for epoch, _, _ in resumed["curve"]] == [1, 2, 3, 4, 5]
    name = f"unfinished-{source.name}-1.pt"  # of the last epoch but one
    states = [torch.load(task.folder / name, weights_only=True)["training"] for task in (whole, broken)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_what_is_kept_of_other_settings_is_refused_not_gone_on_with(squares: Squares, tmp_path: Path) -> None:
    (source,) = squares.sources("ours=shards")

    def stop(epoch: int) -> None:
        raise Stop

    task = squares.task(tmp_path)
    with pytest.raises(Stop):
        train(task, source, 0, stop)
    other = replace(task, conditions={**task.conditions, "lr": 0.3})
    with pytest.raises(SettingError, match=r"unfinished-ours-0.*lr 0\.1, this is 0\.3; name another --out"):
        train(other, source, 0, unseen)


def test_trainings_of_one_seed_begin_with_the_same_weights_and_serve_the_same_pictures(
    squares: Squares,
) -> None:
    served = []
    for source in squares.sources("imagefolder", "ours=shards", "pytorch", "dev=shards,augment=device"):
        with source.open(4) as feed:
            feed.set_epoch(2)
            batches = list(feed)
            assert [tuple(b.images.shape) for b in batches] == [(8, 3, 16, 16)] * 6, source.name
            assert {b.images.dtype for b in batches} == {torch.float32}
            served.append(sorted(torch.cat([b.labels for b in batches]).tolist()))
    assert all(labels == served[0] for labels in served)


def test_an_epoch_of_imagefolder_follows_seed_and_epoch_whatever_was_served_before(squares: Squares) -> None:
    source, _ = squares.sources("imagefolder", "ours=shards")
    with source.open(0) as first, source.open(0) as second, source.open(1) as other:
        for epoch in (0, 1, 1):
            first.set_epoch(epoch)
            ours = torch.cat([images for images, _ in first])
        second.set_epoch(1)
        other.set_epoch(1)
        assert torch.equal(ours, torch.cat([images for images, _ in second]))
        assert not torch.equal(ours, torch.cat([images for images, _ in other]))
        second.set_epoch(0)
        assert not torch.equal(ours, torch.cat([images for images, _ in second]))
