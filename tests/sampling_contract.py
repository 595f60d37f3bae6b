"""Properties that every backend keeps where a part is served, several views, or another size."""

from functools import partial
from itertools import combinations

import torch

from precache.pictures.sizes import Size, sides
from tests.loader_contract import Build, check_ranks_share_each_epoch, check_resume, ids_of, pairs_of


def check_a_part(build: Build, expected: list[tuple[int, int]], *, full: bool) -> None:
    """Of `expected`, (id, label) of all samples: with its labels; `full`: in the order it has among all."""
    chosen = expected[1::3]
    subset = [sample_id for sample_id, _ in reversed(chosen)]
    with build() as whole, build(subset=subset) as part:
        for _ in range(2):
            among_all = [i for i in ids_of(whole) if i in set(subset)]
            served = pairs_of(part)
            assert sorted(served) == chosen
            assert not full or [i for i, _ in served] == among_all
        assert (part.samples, len(part.dataset)) == (len(chosen), len(chosen))
        assert part.classes == whole.classes
        assert part.path_of(subset[0]) == whole.path_of(subset[0])
        assert len(whole.dataset) == len(expected)
    with build(classes=[part.classes[2], part.classes[0]]) as loader:
        assert sorted(pairs_of(loader)) == [pair for pair in expected if pair[1] in (0, 2)]
    check_ranks_share_each_epoch(partial(build, subset=subset), sorted(subset))


def check_weights(build: Build, expected: list[tuple[int, int]]) -> None:
    """Drawn with replacement, as many as before, the same for any number of workers and ranks."""
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
    """Drawn independently, by seed, epoch, id and view alone; the first is what one view gives."""
    settings = {"augment": "train", "batch_size": 16}
    with build(**settings) as one, build(views=3, **settings) as several:
        served = {}
        for single, batch in zip(one, several, strict=True):
            assert torch.equal(single.ids, batch.ids)
            assert torch.equal(single.images, batch.images)
            assert batch.views[0] is batch.images
            assert len(batch.views) == 3
            for view in batch.views:
                assert (view.shape, view.dtype) == (batch.images.shape, batch.images.dtype)
                assert view.is_contiguous(memory_format=torch.channels_last)
            served.update({int(i): [v[n] for v in batch.views] for n, i in enumerate(batch.ids)})
    alike = sum(torch.equal(a, b) for views in served.values() for a, b in combinations(views, 2))
    assert alike <= len(served) // 4, "but for pictures of one colour"
    with build(views=2, **{**settings, "batch_size": 8}, workers=1, shuffle=False) as other:
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
        assert not all(later), "another epoch draws anew"


def check_set_size(build: Build, sizes: tuple[Size, Size]) -> None:
    """From the next epoch on, with the pixels of a loader that was built so."""
    large, small = sizes
    with build(size=large) as loader, build(size=small) as other:
        assert {batch.images.shape[2:] for batch in loader} == {sides(large)}
        list(other)
        loader.set_size(small)
        assert loader.size == small
        for ours, expected in zip(loader, other, strict=True):
            assert torch.equal(ours.ids, expected.ids)
            assert torch.equal(ours.images, expected.images)
