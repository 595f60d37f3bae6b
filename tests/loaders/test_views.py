"""`views` of `loaders.build`, beyond what every backend keeps: see test_backends.py."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import loaders
from loaders.augment.draw import draw_keys
from precache.errors import SettingError
from tests.building import build_loader
from tests.damage import damage_tree

TRAIN: dict[str, Any] = {"augment": "train", "size": 32, "batch_size": 16}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_that_is_left_out_is_left_out_of_every_view(
    workers: int, raw_tree: Path, tmp_path: Path
) -> None:
    damaged = damage_tree(raw_tree, tmp_path / "tree")
    settings = {**TRAIN, "workers": workers, "on_error": "skip"}
    with build_loader(raw_tree, views=2, **TRAIN) as whole:
        expected = {int(i): [v[n] for v in b.views] for b in whole for n, i in enumerate(b.ids)}
    with build_loader(tmp_path / "tree", views=2, **settings) as loader:
        for batch in loader:
            assert not set(damaged) & set(batch.ids.tolist())
            for number, sample_id in enumerate(batch.ids.tolist()):
                for view, picture in zip(batch.views, expected[sample_id], strict=True):
                    assert torch.equal(view[number], picture)


def test_colours_are_drawn_for_each_view(converted: dict[str, Path]) -> None:
    jitter = loaders.RandomAugmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, brightness=0.9)
    with build_loader(converted["shards"], **{**TRAIN, "augment": jitter}, views=2) as loader:
        batch = next(iter(loader))
    means = [view.float().mean(dim=(1, 2, 3)) for view in batch.views]
    assert ((means[0] - means[1]).abs() > 1).sum() > 8


def test_views_stay_with_the_batch(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], dtype="float32", views=2, **TRAIN) as loader:
        batch = next(iter(loader))
    assert batch.views[1].dtype == torch.float32
    for copy in (batch.to("cpu"), pickle.loads(pickle.dumps(batch)), tree_map(lambda part: part, batch)):
        assert all(torch.equal(a, b) for a, b in zip(copy.views, batch.views, strict=True))
    assert [view.dtype for view in batch.to("meta").views] == [torch.float32] * 2
    assert batch.to("meta").views[1].device.type == "meta"


def test_a_function_makes_each_view_of_what_is_stored(converted: dict[str, Path]) -> None:
    def darker(images: torch.Tensor, ids: torch.Tensor, epoch: int, view: int) -> torch.Tensor:
        return images.sub_(images // (2 + view))  # in place: it may

    with (
        build_loader(converted["shards"], shuffle=False, batch_size=16) as plain,
        build_loader(converted["shards"], shuffle=False, batch_size=16, augment=darker, views=2) as loader,
    ):
        for stored, batch in zip(plain, loader, strict=True):
            for number, view in enumerate(batch.views):
                assert torch.equal(view, stored.images - stored.images // (2 + number))


def test_the_first_view_draws_by_the_id_and_no_other_draws_alike() -> None:
    ids = torch.arange(10_000).numpy()
    keys = [draw_keys(ids, view, ids * 0 + occurrence) for view in range(4) for occurrence in range(4)]
    assert (keys[0] == ids).all()
    assert len({int(key) for drawn in keys for key in drawn}) == len(keys) * len(ids)


def test_views_that_cannot_be_are_refused(converted: dict[str, Path]) -> None:
    def mix(images: torch.Tensor, ids: torch.Tensor, epoch: int, labels: torch.Tensor) -> Any:
        return images, labels

    refusals: list[tuple[dict[str, Any], str]] = [
        ({}, "views 2 of the centre would be the same picture 2 times; give augment: 'train'"),
        ({"augment": mix}, "views 2: an augment function that returns labels makes one view"),
        ({"views": 0}, "views must be an integer from 1 to 64, got 0"),
        ({"views": 65}, "views must be an integer from 1 to 64, got 65"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for settings, message in refusals:
            with pytest.raises(SettingError, match=message):
                build_loader(converted["shards"], **{"views": 2, **settings})
