"""Checks that every backend has to pass with subsets, weights, several views, and other sizes."""

from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch

from loaders import RandomAugmentation
from precache.pictures.images import Size, sides
from tests.loader_contract import Build, check_ranks_share_each_epoch, check_resume, ids_of, pairs_of


def check_a_part(build: Build, expected: list[tuple[int, int]], *, full: bool) -> None:
    """Check that a loader of a subset serves its samples with their labels.

    Args:
        expected: id and label of all samples.
        full: whether the shuffle is `full`, in which the subset keeps its order among all samples.
    """
    with build() as whole:
        ids, targets = whole.dataset.ids, whole.dataset.targets
    assert sorted(zip(ids.tolist(), targets, strict=True)) == expected, "ids stand beside targets"
    ids_alone = [sample_id for sample_id, _ in expected[1::3]]
    subset = np.flatnonzero(np.isin(ids, ids_alone))[::-1]
    chosen = expected[1::3]
    with build() as whole, build(subset=subset) as part:
        for _ in range(2):
            among_all = [i for i in ids_of(whole) if i in set(ids_alone)]
            served = pairs_of(part)
            assert sorted(served) == chosen
            assert not full or [i for i, _ in served] == among_all
        assert (part.samples, len(part.dataset)) == (len(chosen), len(chosen))
        assert part.classes == whole.classes
        assert part.path_of(ids_alone[0]) == whole.path_of(ids_alone[0])
        assert np.array_equal(part.dataset.ids, ids[subset[::-1]])
        assert part.dataset.targets == [targets[position] for position in subset[::-1]]
        assert len(whole.dataset) == len(expected)
    with build(classes=[part.classes[2], part.classes[0]]) as loader:
        assert sorted(pairs_of(loader)) == [pair for pair in expected if pair[1] in (0, 2)]
    check_ranks_share_each_epoch(partial(build, subset=subset), ids_alone)


def check_weights(build: Build, expected: list[tuple[int, int]]) -> None:
    """Check that weighted samples are drawn with replacement, the same for any workers and ranks."""
    label_of = dict(expected)
    with build(shuffle=False) as loader:
        weights = [label_of[sample_id] for sample_id in ids_of(loader)]  # none of class 0
    with build(weights=weights) as loader:
        epochs = [ids_of(loader) for _ in range(2)]
        for ids in epochs:
            assert len(ids) == len(expected) == loader.samples
            assert all(label_of[i] > 0 for i in ids)
            assert len(set(ids)) < len(ids)
        assert epochs[0] != epochs[1]
    check_resume(partial(build, weights=weights))
    ranks = [build(batch_size=8, weights=weights, rank=rank, world_size=2, workers=0) for rank in range(2)]
    served = [list(loader) for loader in ranks]
    assert [len(batches) for batches in served] == [len(loader) for loader in ranks]
    assert sorted(i for batches in served for i in ids_of(batches)) == sorted(epochs[0])
    for loader in ranks:
        loader.close()


def check_views(build: Build) -> None:
    """Check that views are independent, depend on seed, epoch, id and view, and begin with the one view."""
    settings: dict[str, Any] = {"batch_size": 16}
    with (
        build(augment="train", **settings) as single_loader,
        build(augment=RandomAugmentation(views=3), **settings) as loader,
    ):
        served = {}
        for single, batch in zip(single_loader, loader, strict=True):
            assert torch.equal(single.ids, batch.ids)
            images, _ = batch
            assert torch.equal(single.images, images[0])
            assert single.views == (single.images,)
            assert len(images) == 3
            assert batch.views == tuple(images)
            for view in batch.views:
                assert (view.shape, view.dtype) == (single.images.shape, single.images.dtype)
                assert view.is_contiguous(memory_format=torch.channels_last)
            served.update({int(i): [v[n] for v in batch.views] for n, i in enumerate(batch.ids)})
    alike = sum(torch.equal(a, b) for views in served.values() for a, b in combinations(views, 2))
    assert alike <= len(served) // 4, "views of pictures of one colour are alike"
    with build(augment=RandomAugmentation(views=2), batch_size=8, workers=1, shuffle=False) as other:
        again, later = (
            [
                torch.equal(view[number], due)
                for batch in other
                for number, i in enumerate(batch.ids.tolist())
                for view, due in zip(batch.views, served[i], strict=False)
            ]
            for _ in range(2)
        )
        assert all(again)
        assert not all(later), "another epoch has other views"


def check_set_size(build: Build, sizes: tuple[Size, Size]) -> None:
    """Check that the next epoch after `set_size` equals that of a loader built with this size."""
    large, small = sizes
    with build(size=large) as loader, build(size=small) as other:
        assert {batch.images.shape[2:] for batch in loader} == {sides(large)}
        list(other)
        loader.set_size(small)
        assert loader.size == small
        for batch, expected in zip(loader, other, strict=True):
            assert torch.equal(batch.ids, expected.ids)
            assert torch.equal(batch.images, expected.images)
