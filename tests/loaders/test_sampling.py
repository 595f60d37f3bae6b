"""`classes`, `subset`, `weights` and `views` of `loaders.build`; their contracts are in test_backends."""

import json
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import random_split

from loaders.augment.policies import RandomAugmentation
from loaders.dataset import open_split
from loaders.order import draw_samples, shuffle_in_windows
from precache import convert
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import IMAGES, small_recipe
from tests.damage import damage_tree

RNG = np.random.default_rng((1, 62))
IDS = RNG.permutation(4000)
TRAIN: dict[str, Any] = {"augment": "train", "size": 32, "batch_size": 16}
VIEWS: dict[str, Any] = {**TRAIN, "augment": RandomAugmentation(views=2)}


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    weights = np.array([0.0, 1.0, 5.0])[IDS % 3]
    samples = np.concatenate([draw_samples(weights, 0, epoch) for epoch in range(50)])
    shares = np.bincount(IDS[samples] % 3, minlength=3) / len(samples)
    assert shares[0] == 0
    assert abs(shares[2] / shares[1] - 5) < 0.15
    assert np.array_equal(np.unique(samples), np.flatnonzero(weights)), "even the last sample is drawn"
    counts = np.bincount(samples, minlength=len(IDS))[weights == 5]
    assert abs(counts.var() / counts.mean() - 1) < 0.1, "counts of independent draws are Poisson's"
    for extreme in ([0, 1, 0], [1e-300, 0, 0], [0, 0, 1e300], [5e-324, 0, 5e-324]):
        assert (np.array(extreme)[draw_samples(np.array(extreme, float), 0, 0)] > 0).all()


def test_drawn_samples_are_shuffled_within_windows_of_shards() -> None:
    samples = draw_samples(np.ones(4000), 0, 0)
    order = shuffle_in_windows(samples, np.arange(0, 4001, 100), 0, 0, 8)
    assert np.array_equal(np.sort(order), np.sort(samples))
    shards = order // 100
    places = [np.flatnonzero(shards == shard) for shard in range(40)]
    for place in range(0, 4000, 10):
        open_shards = sum(part.min() <= place <= part.max() for part in places)
        assert open_shards <= 8
    assert np.mean(shards[1:] == shards[:-1]) < 0.2


@pytest.mark.parametrize("kind", ["shards", "webdataset"])
def test_a_repeated_sample_is_augmented_anew_alike_on_all_ranks(
    kind: str, converted: dict[str, Path]
) -> None:
    rare = np.zeros(IMAGES)
    rare[:4] = 1  # each is drawn about 17 times
    settings: dict[str, Any] = {"weights": rare, "augment": "train", "size": 32, "batch_size": 10}
    with build_loader(converted[kind], workers=1, **settings) as loader:
        batches = list(loader)
    pictures = torch.cat([batch.images for batch in batches])
    assert len({picture.numpy().tobytes() for picture in pictures}) > 0.9 * IMAGES
    settings |= {"batch_size": 5, "world_size": 2}
    ranks = [build_loader(converted[kind], **settings, rank=rank) for rank in range(2)]
    for expected, *parts in zip(batches, *ranks, strict=True):
        assert torch.equal(torch.cat([part.images for part in parts]), expected.images)
    for rank in ranks:
        rank.close()


def test_balanced_weights_draw_each_class_equally_often(converted: dict[str, Path]) -> None:
    data = open_split(converted["shards"], "train")
    labels = np.asarray(data.labels)
    few, many = np.flatnonzero(labels == 0)[:2], np.flatnonzero(labels == 1)
    subset = [*few, *many]
    with build_loader(converted["shards"], subset=subset, weights="balanced", workers=1) as loader:
        assert loader.samples == len(subset)
        served = np.concatenate([batch.labels.numpy() for _ in range(400) for batch in loader])
    assert abs(np.mean(served == 0) - 0.5) < 0.03, f"2 samples of class 0, {len(many)} of class 1"


@pytest.mark.parametrize("kind", ["raw", "shards", "webdataset", "list"])
def test_positions_choose_the_samples_that_targets_show(
    kind: str, raw_tree: Path, converted: dict[str, Path], other: dict[str, Path]
) -> None:
    paths = {**converted, "raw": raw_tree, "list": [converted["shards"], other["shards"]]}
    options: dict[str, Any] = {"path": paths[kind], "workers": 1, "size": 24}
    with build_loader(**options) as whole:
        targets, ids = np.array(whole.dataset.targets), whole.dataset.ids
    chosen = np.flatnonzero(targets == 1)
    drawn = random_split(range(len(ids)), [0.5, 0.5], torch.Generator().manual_seed(0))[0]  # type: ignore[arg-type]
    subsets = [
        (chosen, chosen), (chosen[::-1].tolist(), chosen), (set(chosen.tolist()), chosen),
        (torch.from_numpy(chosen), chosen), (chosen.astype(np.uint64), chosen),
        (np.flatnonzero(np.isin(ids, ids[chosen])), chosen), (drawn, [*drawn]), (drawn.indices, [*drawn]),
    ]  # fmt: skip
    for subset, positions in subsets:
        with build_loader(**options, subset=subset) as loader:
            assert sorted(i for batch in loader for i in batch.ids.tolist()) == sorted(ids[positions])
    with build_loader(**options, subset=range(0, len(ids), 2), weights=targets == 1) as loader:
        served = [i for batch in loader for i in batch.ids.tolist()]
    assert {*served} <= {*ids[chosen[chosen % 2 == 0]].tolist()}, "weights stand in the order of targets"


@pytest.mark.parametrize("scale", [2.0**1022, 2.0**1000, 2.0**-1000, 2.0**-1074], ids=str)
def test_weights_of_any_scale_draw_the_same_samples(scale: float, converted: dict[str, Path]) -> None:
    weights = np.arange(IMAGES) % 4.0
    served = []
    for given in (weights, weights * scale):
        with build_loader(converted["shards"], weights=given, size=24) as loader:
            served.append([i for batch in loader for i in batch.ids.tolist()])
    assert served[0] == served[1]


def test_spellings_of_a_split_have_the_same_state(raw_tree: Path, tmp_path: Path) -> None:
    convert(raw_tree, tmp_path / "shards", small_recipe("shards", splits="train=0.5,val=0.3,test=0.2"))
    shares = {"splits": "train=0.5,val=0.3,test=0.2"}
    for path, settings in ((raw_tree, shares), (tmp_path / "shards", {}), ([tmp_path / "shards"] * 2, {})):
        for name, spelling in (
            ("val", "valid"),
            ("val", "validation"),
            ("train", "Training"),
            ("test", "test_set"),
        ):
            options: dict[str, Any] = {"workers": 0, "size": 24, **settings}
            with (
                build_loader(path, split=name, **options) as loader,  # type: ignore[arg-type]
                build_loader(path, split=spelling, **options) as again,  # type: ignore[arg-type]
            ):
                again.load_state_dict(loader.state_dict())


def test_a_state_is_refused_with_other_sampling_settings(
    converted: dict[str, Path], shaped: dict[str, Path]
) -> None:
    ids, both = list(range(20)), [converted["shards"], shaped["rectangle-shards"]]
    choices: list[dict[str, Any]] = [
        {}, {"subset": ids}, {"subset": ids[1:]}, {"classes": ["001.anchor"]}, {"weights": "balanced"},
        {"weights": np.arange(IMAGES)},
        {"path": both}, {"path": both[::-1]}, {"path": both, "subset": ids},
        {"shuffle": "window"}, {"shuffle": "window", "memory_bytes": 400_000},
        {"shuffle": "window", "rank": 0, "world_size": 2, "batch_size": 16, "per_node": 1},
    ]  # fmt: skip
    settings = {"path": converted["shards"], "workers": 1, "batch_size": 32, "size": 24}
    built = [build_loader(**{**settings, **choice}) for choice in choices]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in built]
    for (number, loader), (other, state) in product(enumerate(built), enumerate(states)):
        refused = pytest.raises(SettingError, match="this state was taken with")
        with nullcontext() if number == other else refused:
            loader.load_state_dict(state)
    for loader in built:
        loader.close()


# Views.


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_picture_is_left_out_of_every_view(workers: int, raw_tree: Path, tmp_path: Path) -> None:
    damaged = damage_tree(raw_tree, tmp_path / "tree")
    with build_loader(raw_tree, workers=0, **VIEWS) as whole:
        expected = {int(i): [v[n] for v in b.views] for b in whole for n, i in enumerate(b.ids)}
    with build_loader(tmp_path / "tree", workers=workers, on_error="skip", **VIEWS) as loader:
        served = {int(i): [v[n] for v in b.views] for b in loader for n, i in enumerate(b.ids)}
    assert sorted([*served, *damaged]) == sorted(expected)
    assert all(torch.equal(a, b) for i in served for a, b in zip(served[i], expected[i], strict=True))


BAD: list[dict[str, Any]] = [
    {"classes": ["anchor"]}, {"classes": []},
    {"subset": []}, {"subset": [3, 5000, 6000]}, {"subset": [IMAGES]}, {"subset": [-1]},
    {"subset": np.array([2**64 - 1], np.uint64)}, {"subset": [3, 4, 3]}, {"subset": [0.5]},
    {"subset": np.ones(IMAGES, bool)}, {"subset": [[1], [2, 3]]},
    {"weights": "even"}, {"weights": [1, 2]}, {"weights": [-1.0] * IMAGES}, {"weights": [np.nan] * IMAGES},
    {"weights": [0] * IMAGES}, {"weights": [np.inf] + [1.0] * (IMAGES - 1)}, {"weights": [10**400] * IMAGES},
    {"weights": np.full(IMAGES, np.longdouble("1e400"))}, {"weights": [1.0, 2.0], "subset": [5, 3]},
]  # fmt: skip


@pytest.mark.parametrize("settings", BAD, ids=lambda settings: str(settings)[:40])
def test_wrong_sampling_settings_are_refused(converted: dict[str, Path], settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=rf"^{next(iter(settings))}\b"):
        build_loader(converted["shards"], workers=1, **settings)
