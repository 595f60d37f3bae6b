"""What `classes`, `subset` and `weights` of `loaders.build` take; test_backends.py has each backend."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders.batch import Request
from loaders.dataset import open_split
from loaders.order.order import Epochs, Order, draw, gather_windows, occurrences
from loaders.read.sequential import look_ahead
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import IMAGES
from tests.loader_contract import ids_of

RNG = np.random.default_rng((1, 62))
IDS = RNG.permutation(4000)


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    weights = np.array([0.0, 1.0, 5.0])[IDS % 3]
    drawn = np.concatenate([draw(weights, 0, epoch) for epoch in range(50)])
    shares = np.bincount(IDS[drawn] % 3, minlength=3) / len(drawn)
    assert shares[0] == 0
    assert abs(shares[2] / shares[1] - 5) < 0.15
    often = np.bincount(drawn, minlength=len(IDS))[weights == 5]
    assert abs(often.var() / often.mean() - 1) < 0.1, "independent draws: the counts are Poisson's"
    assert not np.array_equal(drawn[: len(IDS)], drawn[len(IDS) : 2 * len(IDS)])


def test_a_weight_of_none_is_never_drawn_not_even_at_the_bounds() -> None:
    for weights in ([0, 1, 0], [1e-300, 0, 0], [0, 0, 1e300], [5e-324, 0, 5e-324]):
        drawn = draw(np.array(weights, float), 0, 0)
        assert (np.array(weights)[drawn] > 0).all()


def test_occurrences_count_what_came_before() -> None:
    assert occurrences(np.array([5, 3, 5, 5, 3, 9])).tolist() == [0, 0, 1, 2, 1, 0]
    assert occurrences(np.empty(0, np.int64)).tolist() == []
    epochs = Epochs(shard_starts=np.array([0, 500]), kind="full", seed=0, weights=RNG.random(500) ** 8)
    shares = []
    for rank in range(3):
        order = Order(epochs=epochs, batch_size=7, last="partial", rank=rank, world_size=3)
        shares += list(order.batches(0))
    served = [(int(p), int(n)) for s in shares for p, n in zip(s.positions, s.occurrences, strict=True)]  # type: ignore[arg-type]
    assert len(set(served)) == len(served) == 500
    assert {position for position, _ in served} == {p for p, n in served if n == 0}
    assert max(n for _, n in served) > 3


def test_windows_hold_what_was_drawn_of_their_shards() -> None:
    drawn = draw(np.ones(4000), 0, 0)
    order = gather_windows(drawn, np.arange(0, 4001, 100), 0, 0, 8)
    assert np.array_equal(np.sort(order), np.sort(drawn))
    shards = order // 100
    first, last = ({s: f(np.flatnonzero(shards == s)) for s in range(40)} for f in (np.min, np.max))
    open_at_once = max(sum(first[s] <= n <= last[s] for s in range(40)) for n in range(0, 4000, 10))
    assert open_at_once <= 8


@pytest.mark.parametrize("kind", ["shards", "webdataset"])
def test_each_occurrence_is_augmented_anew_and_as_before_by_any_rank(
    kind: str, converted: dict[str, Path]
) -> None:
    rare = np.zeros(IMAGES)
    rare[:4] = 1  # each some 17 times
    settings: dict[str, Any] = {"weights": rare, "augment": "train", "size": 32, "batch_size": 10}
    with build_loader(converted[kind], workers=1, **settings) as loader:
        batches = list(loader)
    pictures = torch.cat([batch.images for batch in batches])
    assert len({picture.numpy().tobytes() for picture in pictures}) > 0.9 * IMAGES
    ranks = [
        build_loader(converted[kind], **{**settings, "batch_size": 5}, rank=rank, world_size=2)
        for rank in range(2)
    ]
    for expected, *parts in zip(batches, *ranks, strict=True):
        assert torch.equal(torch.cat([part.images for part in parts]), expected.images)
    for rank in ranks:
        rank.close()


def test_balanced_draws_each_class_as_often(converted: dict[str, Path]) -> None:
    labels = np.asarray(open_split(converted["shards"], "train").labels)
    one, other = np.flatnonzero(labels == 0)[:2], np.flatnonzero(labels == 1)
    ids = open_split(converted["shards"], "train").ids[np.concatenate((one, other))]
    with build_loader(converted["shards"], subset=ids, weights="balanced", workers=1) as loader:
        assert loader.samples == len(ids)
        served = np.concatenate([batch.labels.numpy() for _ in range(400) for batch in loader])
    assert abs(np.mean(served == 0) - 0.5) < 0.03, f"2 of class 0, {len(other)} of class 1"


def test_weights_may_be_of_the_whole_split_or_of_what_is_left(converted: dict[str, Path]) -> None:
    ids = open_split(converted["shards"], "train").ids
    for stored in (ids, ids[10:20]):
        weights = (stored == ids[12]).astype(float)
        with build_loader(converted["shards"], subset=ids[10:20], weights=weights, workers=1) as loader:
            assert set(ids_of(loader)) == {int(ids[12])}


def test_a_part_of_many_shards_opens_no_more_of_them_at_a_time(converted: dict[str, Path]) -> None:
    """Six shards, windows of one, two samples of each: what is read ahead is counted in these, not in all."""
    whole = open_split(converted["webdataset"], "train")
    data = whole.select(np.sort(np.concatenate([whole.shard_starts[:-1], whole.shard_starts[:-1] + 3])))
    assert data.shard_samples.tolist() == [2] * 6
    opened: list[int] = []
    closed: list[int] = []
    requests = (Request(0, np.array([position])) for position in range(12))
    with ExitStack() as at_end:
        for _ in look_ahead(data, requests, 1, lambda n: opened.append(n) or n, closed.append, at_end):
            assert len(opened) - len(closed) <= 3
    assert sorted(opened) == list(range(6))


def test_a_state_fits_the_same_choice_alone(converted: dict[str, Path]) -> None:
    ids = list(range(20))
    choices: list[dict[str, Any]] = [
        {},
        {"subset": ids},
        {"subset": ids[1:]},
        {"classes": ["001.anchor"]},
        {"weights": "balanced"},
        {"weights": np.arange(IMAGES)},
    ]
    built = [build_loader(converted["shards"], workers=1, **choice) for choice in choices]
    for number, loader in enumerate(built):
        for other, state in enumerate([taken.state_dict() for taken in built]):
            if number == other:
                loader.load_state_dict(state)
            else:
                with pytest.raises(SettingError, match=r"this state was taken with (dataset|weights)"):
                    loader.load_state_dict(state)
    for loader in built:
        loader.close()


BAD: list[dict[str, Any]] = [
    {"classes": "001.anchor"}, {"classes": ["anchor"]}, {"classes": []},
    {"subset": []}, {"subset": [3, 5000, 6000]}, {"subset": [3, 4, 3]}, {"subset": [0.5]},
    {"subset": np.ones(IMAGES, bool)}, {"subset": 7}, {"subset": [[1], [2, 3]]},
    {"weights": "even"}, {"weights": [1, 2]}, {"weights": [-1.0] * IMAGES}, {"weights": [np.nan] * IMAGES},
    {"weights": [0] * IMAGES}, {"weights": [1e308] * IMAGES}, {"weights": ["a"] * IMAGES},
]  # fmt: skip


@pytest.mark.parametrize("settings", BAD, ids=lambda settings: str(settings)[:40])
def test_what_cannot_be_chosen_is_refused(converted: dict[str, Path], settings: dict[str, Any]) -> None:
    with pytest.raises(
        SettingError, match=rf"^{next(iter(settings))}\b.*(must be|; |matches|not in this split)"
    ):
        build_loader(converted["shards"], workers=1, **settings)
