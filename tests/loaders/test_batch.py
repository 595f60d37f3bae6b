"""A batch is a list of two, and keeps its other attributes when frameworks copy or move it."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate, default_convert

from loaders import Batch


def make(n: int = 6, **more: Any) -> Batch:
    images = torch.arange(n * 3 * 4 * 4, dtype=torch.float32).reshape(n, 3, 4, 4)
    return Batch(images, torch.arange(n) % 3, torch.arange(n) + 100, **more)


def test_a_batch_is_a_sequence_of_two() -> None:
    batch, other = make(), make()
    images, labels = batch
    assert isinstance(batch, (list, tuple)), "as torch's update_bn asks"
    assert images is batch[0] is batch[-2] is batch.images
    assert labels is batch[1] is batch.labels
    assert (len(batch), batch[:1]) == (2, [images])
    assert (batch.fields, batch.padding.tolist()) == ({}, [False] * 6)
    assert batch.partners is None
    assert {batch, other, batch} == {other, batch}, "compared as objects, not by their pixels"
    assert "labels" not in batch, "as Hugging Face's Trainer asks"


def by_lightning(batch: Batch) -> Any:
    lightning = pytest.importorskip("pytorch_lightning.utilities", reason="pip install pytorch-lightning")
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
        lambda batch: next(iter(DataLoader([batch], batch_size=None))),
        by_lightning,
        by_accelerate,
    ],
)
@pytest.mark.parametrize("views", [1, 2])
def test_a_copied_batch_keeps_all_its_attributes(views: int, through: Callable[[Batch], Batch]) -> None:
    fields = {"name": ["a"] * 6, "place": torch.arange(12.0).reshape(6, 2), "tokens": [torch.ones(3)] * 6}
    batch = make(
        padding=torch.arange(6) > 3,
        fields=fields,
        partners=torch.arange(6).roll(1),
    )
    if views == 2:
        batch = Batch([batch.images, torch.zeros(6, 3, 4, 4)], *batch.__reduce__()[1][1:])
    other = through(batch)
    assert type(other) is Batch
    assert type(other.images) is type(batch.images)
    for name in ("labels", "ids", "padding", "partners"):
        assert torch.equal(getattr(other, name), getattr(batch, name))
    assert {view.device.type for view in other.to("meta").views} == {"meta"}
    assert all(torch.equal(a, b) for a, b in zip(other.views, batch.views, strict=True))
    assert other.fields["name"] == fields["name"]
    assert torch.equal(other.fields["place"], fields["place"])
    assert torch.equal(other.fields["tokens"][5], fields["tokens"][5])


def test_a_batch_rebuilt_from_its_items_has_no_ids() -> None:
    batch = make(partners=torch.arange(6).roll(1))
    for other in (type(batch)(list(batch)), type(batch)(*batch), default_collate([batch])):
        assert torch.equal(other.images.view(batch.images.shape), batch.images)
        assert other.partners is None
        for name in ("ids", "padding"):
            with pytest.raises(AttributeError, match="a framework"):
                getattr(other, name)
