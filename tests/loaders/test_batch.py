"""A batch is a list of two that keeps what else it knows through what frameworks do with a DataLoader's."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import update_bn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from loaders import Batch


def make(n: int = 6, **more: Any) -> Batch:
    images = torch.arange(n * 3 * 4 * 4, dtype=torch.float32).reshape(n, 3, 4, 4)
    return Batch(images, torch.arange(n) % 3, torch.arange(n) + 100, **more)


def test_a_batch_is_a_sequence_of_two() -> None:
    batch, other = make(), make()
    images, labels = batch
    assert isinstance(batch, (list, tuple))
    assert len(batch) == 2
    assert images is batch[0] is batch[-2] is batch.images
    assert labels is batch[1] is batch.labels
    assert batch[:1] == [images]
    assert batch.fields == {}
    assert batch.padding.tolist() == [False] * 6
    assert repr(batch) == "<loaders.Batch: images torch.float32 [6, 3, 4, 4], labels torch.int64 [6]>"
    # compared as objects, not by their pixels
    assert batch == batch  # noqa: PLR0124
    assert batch != other
    assert len({batch, other, batch}) == 2
    assert batch in [other, batch]
    assert images in batch
    assert other.images not in batch
    assert "labels" not in batch, "as Hugging Face's Trainer asks"


class Batches(IterableDataset[Batch]):
    def __init__(self, *batches: Batch) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def by_lightning(batch: Batch) -> Any:
    lightning = pytest.importorskip("pytorch_lightning.utilities", reason="pip install pytorch-lightning")
    assert [part.device.type for part in lightning.move_data_to_device(batch, torch.device("meta"))] == [
        "meta"
    ] * 2
    return lightning.move_data_to_device(batch, torch.device("cpu"))


def by_accelerate(batch: Batch) -> Any:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    return accelerate.utils.send_to_device(batch, torch.device("cpu"), non_blocking=True)


@pytest.mark.parametrize(
    "through",
    [
        copy.copy,
        copy.deepcopy,
        lambda batch: pickle.loads(pickle.dumps(batch)),
        lambda batch: batch.to("cpu", non_blocking=True),
        default_convert,
        lambda batch: tree_map(torch.clone, batch),
        lambda batch: next(iter(DataLoader(Batches(batch), batch_size=None))),
        by_lightning,
        by_accelerate,
    ],
    ids=["copy", "deepcopy", "pickle", "to", "convert", "tree_map", "DataLoader", "Lightning", "Accelerate"],
)
def test_what_copies_a_batch_keeps_all_of_it(through: Callable[[Batch], Batch]) -> None:
    fields = {"name": ["a"] * 6, "place": torch.arange(12.0).reshape(6, 2), "tokens": [torch.ones(3)] * 6}
    batch = make(padding=torch.arange(6) > 3, fields=fields, other_views=[torch.zeros(6, 3, 4, 4)])
    other = through(batch)
    assert type(other) is Batch
    for name in ("images", "labels", "ids", "padding"):
        assert torch.equal(getattr(other, name), getattr(batch, name))
    assert all(torch.equal(a, b) for a, b in zip(other.views, batch.views, strict=True))
    assert other.fields["name"] == fields["name"]
    assert torch.equal(other.fields["place"], fields["place"])
    assert torch.equal(other.fields["tokens"][5], fields["tokens"][5])


@pytest.mark.parametrize(
    "anew", [lambda b: type(b)(list(b)), lambda b: type(b)(part for part in b), lambda b: type(b)(*b)]
)
def test_a_batch_made_anew_of_its_items_says_that_it_has_no_ids(anew: Callable[[Batch], Batch]) -> None:
    batch = make()
    other = anew(batch)
    assert other.images is batch.images
    assert other.labels is batch.labels
    assert not hasattr(other, "ids")
    for name in ("ids", "padding"):
        with pytest.raises(AttributeError, match=r"this batch has no ids: a framework .* rebuilt it"):
            getattr(other, name)
    assert not hasattr(other.to("cpu"), "ids")


def test_stacked_batches_do_not_go_by_the_ids_of_the_first() -> None:
    for batch in (make(), make(2)):
        stacked = default_collate([batch, batch])
        assert stacked[0].shape == (2, *batch.images.shape)
        assert not hasattr(stacked, "ids")
    replaced = make()
    replaced[0] = replaced.images * 2
    replaced[1] = torch.zeros(6, 3)
    assert replaced.ids.tolist() == list(range(100, 106)), "other pixels of the same samples"


@pytest.mark.parametrize("parts", [[], [torch.zeros(1)], [torch.zeros(1)] * 3, torch.zeros(2, 3)])
def test_anything_but_two_is_no_batch(parts: Any) -> None:
    with pytest.raises(TypeError, match="a batch is images and labels, got"):
        Batch(parts)


def test_to_moves_images_labels_and_views() -> None:
    moved = make(other_views=[torch.zeros(6, 3, 4, 4)]).to("meta")
    assert [part.device.type for part in (*moved, *moved.views)] == ["meta"] * 4
    assert moved.ids.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_batch_is_pinned_whole() -> None:
    pinned = next(iter(DataLoader(Batches(make()), batch_size=None, pin_memory=True)))
    assert type(pinned) is Batch
    assert pinned.images.is_pinned()
    assert pinned.labels.is_pinned()
    assert pinned.ids.tolist() == list(range(100, 106))


def test_update_bn_takes_the_images() -> None:
    batches = [make(6), make(5)]
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    update_bn(batches, model)
    means = torch.stack([batch.images.mean(dim=(0, 2, 3)) for batch in batches]).mean(dim=0)
    assert torch.allclose(model[0].running_mean, means)
