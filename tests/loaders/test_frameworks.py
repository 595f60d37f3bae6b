"""Loaders in the place of a DataLoader of torch, torchdata, Accelerate and Lightning; see also examples/."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

import loaders
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import IMAGES
from tests.loader_contract import ids_of

BATCHES = 5


def build(path: Path, **settings: Any) -> loaders.Loader:
    return build_loader(path, **{"batch_size": 16, "workers": 1, **settings})


def epochs_of(path: Path, count: int, **settings: Any) -> list[list[int]]:
    with build(path, **settings) as loader:
        return [ids_of(loader) for _ in range(count)]


@pytest.fixture
def path(converted: dict[str, Path]) -> Path:
    return converted["shards"]


@pytest.fixture
def loader(path: Path) -> Iterator[Any]:
    with build(path, dtype="float32") as built:
        yield built


def test_a_loader_has_dataset_and_samplers_of_a_dataloader(loader: Any, path: Path) -> None:
    """The sampler yields the positions of the samples that come."""
    assert len(loader.dataset) == len(loader.sampler) == IMAGES
    assert list(loader.dataset.class_to_idx) == list(loader.classes)
    assert f" {path}: train, {IMAGES} samples" in repr(loader.dataset)
    assert (loader.batch_size, loader.drop_last, len(loader.batch_sampler)) == (16, False, len(loader))
    loader.sampler.set_epoch(2)
    positions = list(loader.sampler)
    assert [place for batch in loader.batch_sampler for place in batch] == positions
    loader.set_epoch(2)
    served = [y for _, labels in loader for y in labels.tolist()]
    assert [loader.dataset.targets[position] for position in positions] == served
    with build(path, last="drop", shuffle=False, rank=1, world_size=2) as dropping:
        assert dropping.drop_last
        assert isinstance(dropping.sampler, SequentialSampler)
        assert list(dropping.sampler) == [*range(16, 32), *range(48, 64)]


def test_torchs_dataloader_takes_a_loader_or_its_parts(loader: Any, path: Path) -> None:
    whole = epochs_of(path, 4)
    parts: DataLoader[Any] = DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )
    assert [ids_of(parts) for _ in range(2)] == whole[:2]
    wrapped: DataLoader[Any] = DataLoader(loader, batch_size=None)
    assert len(wrapped) == len(loader)
    assert [ids_of(wrapped) for _ in range(2)] == whole[2:]


def test_a_loader_is_refused_in_the_process_of_a_dataloader(loader: Any, path: Path) -> None:
    elsewhere: DataLoader[Any] = DataLoader(
        loader, batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(SettingError, match=f"{path}.* num_workers=0"):  # torch makes it again from its text
        list(elsewhere)


def test_a_loaders_dataset_is_refused_without_its_batch_sampler(loader: Any) -> None:
    with pytest.raises(SettingError, check=lambda error: "`batch_sampler`" in error.remedy):
        next(iter(DataLoader(loader.dataset, batch_size=4)))


@pytest.mark.parametrize("served", [2, 5])
def test_a_loader_resumes_inside_statefuldataloader(served: int, path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    first, second, third = epochs_of(path, 3)
    with build(path) as loader, build(path) as again:
        outer = torchdata.StatefulDataLoader(loader, batch_size=None)
        assert ids_of(outer) == first
        iterator = iter(outer)
        batches = [next(iterator) for _ in range(served)]
        state = json.loads(json.dumps(outer.state_dict()))
        assert ids_of(batches) + ids_of(iterator) == second
        resumed = torchdata.StatefulDataLoader(again, batch_size=None)
        resumed.load_state_dict(state)
        assert [ids_of(resumed), ids_of(resumed)] == [second[served * 16 :], third]


@pytest.fixture
def accelerate() -> Any:
    return pytest.importorskip("accelerate", reason="pip install accelerate")


@pytest.mark.parametrize("method", [False, True])
def test_accelerate_prepares_a_loader_and_skips_its_batches(
    method: bool, accelerate: Any, loader: Any, path: Path
) -> None:
    epochs = epochs_of(path, 4)
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.prepare(loader) is loader, "it divides each epoch among ranks by itself"
    prepare = accelerator.prepare_data_loader if method else accelerate.data_loader.prepare_data_loader
    prepared = prepare(loader)
    gathered = [y for _, labels in prepared for y in accelerator.gather_for_metrics(labels).tolist()]
    assert len(gathered) == IMAGES, "no sample is dropped as a repeat"
    skipped = accelerate.skip_first_batches(prepared, 3)
    assert (len(prepared), len(skipped)) == (BATCHES, 2)
    assert ids_of(skipped) == epochs[1][48:]
    prepared.set_epoch(2)
    assert [ids_of(prepared), ids_of(accelerate.skip_first_batches(loader, 1))] == [epochs[2], epochs[3][16:]]


def test_dividing_batches_among_processes_again_is_refused(accelerate: Any, path: Path) -> None:
    """Half of the samples would be lost without an error."""
    for batch_size, rank in ((14, 0), (14, 1), (16, 0), (16, 1)):  # without and with a shorter last batch
        with build(path, batch_size=batch_size) as built:
            divided = accelerate.data_loader.prepare_data_loader(built, num_processes=2, process_index=rank)
            with pytest.raises(SettingError, check=lambda error: "accelerator.prepare()" in error.remedy):
                list(divided)


@pytest.fixture
def lightning() -> Any:
    module = pytest.importorskip("pytorch_lightning", reason="pip install pytorch-lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    return module


def fit(lightning: Any, folder: Path, epochs: int, loader: Any, **settings: Any) -> dict[int, list[int]]:
    """Train a model, and return the ids that it is trained on, by epoch."""
    trained: dict[int, list[int]] = {}
    start = settings.pop("start", None)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: loaders.Batch, number: int) -> torch.Tensor:
            trained.setdefault(self.current_epoch, []).extend(batch.ids.tolist())
            return self.weight * batch.images.mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-4)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": "callbacks" in settings, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=epochs, default_root_dir=folder, **quiet, **settings)
    trainer.fit(Model(), loader, ckpt_path=start)
    return trained


@pytest.mark.parametrize("every", [2, 5, 7, None], ids=["middle", "last batch", "second epoch", "epoch end"])
@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_where_its_checkpoint_was_written(
    every: int | None, lightning: Any, loader: Any, path: Path, tmp_path: Path
) -> None:
    """An epoch has 5 batches. StatefulDataLoader skips an epoch after a checkpoint at the last batch."""
    whole, steps = epochs_of(path, 3), every or 5
    checkpoints = lightning.callbacks.ModelCheckpoint(
        tmp_path, "{step}", save_top_k=-1, every_n_train_steps=every, every_n_epochs=None if every else 1
    )
    assert fit(lightning, tmp_path, 2, loader, callbacks=[checkpoints]) == dict(enumerate(whole[:2]))
    with build(path, dtype="float32") as again:
        trained = fit(lightning, tmp_path, 3, again, start=tmp_path / f"step={steps}.ckpt")
    epoch, batches = divmod(steps, 5)
    later = {number: whole[number] for number in range(epoch + 1, 3)}
    assert trained == {epoch: whole[epoch][batches * 16 :], **later}
