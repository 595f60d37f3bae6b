"""Loaders where torch, torchdata, Accelerate and Lightning expect a DataLoader; see also examples/."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, SequentialSampler

import loaders
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE
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


# torch and torchdata.


def test_a_loader_has_what_a_dataloader_has(loader: Any, path: Path) -> None:
    assert repr(loader) == f"<loaders.Loader shards {path}: train, 70 samples, batches of 16, 5 per epoch>"
    assert len(loader.dataset) == len(loader.sampler) == IMAGES
    assert list(loader.dataset.classes) == list(loader.classes) == list(loader.class_to_idx)
    assert list(loader.class_to_idx.values()) == list(loader.dataset.class_to_idx.values()) == list(range(5))
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (16, False, 0)
    assert isinstance(loader.sampler, Sampler)
    assert len(loader.batch_sampler) == len(loader) == BATCHES
    with build(path, last="drop", shuffle=False, rank=1, world_size=2) as dropping:
        assert repr(dropping).endswith("batches of 16, 2 per epoch, rank 1 of 2>")
        assert dropping.drop_last
        assert isinstance(dropping.sampler, SequentialSampler)
        assert list(dropping.sampler) == [*range(16, 32), *range(48, 64)]
        assert len(dropping.sampler) == 32


def test_a_sampler_says_what_comes(loader: Any) -> None:
    loader.sampler.set_epoch(2)
    positions = list(loader.sampler)
    assert [place for batch in loader.batch_sampler for place in batch] == positions
    other = [y for _, labels in loader for y in labels.tolist()]
    loader.set_epoch(2)
    served = [y for _, labels in loader for y in labels.tolist()]
    assert [loader.dataset.targets[position] for position in positions] == served
    assert other != served, "the batch sampler's iteration was one, too"


def test_torchs_dataloader_takes_a_loader_or_its_parts(loader: Any, path: Path) -> None:
    whole = epochs_of(path, 4)
    parts: DataLoader[Any] = DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )
    assert [ids_of(parts) for _ in range(2)] == whole[:2]
    wrapped: DataLoader[Any] = DataLoader(loader, batch_size=None)
    assert len(wrapped) == len(loader)
    assert [ids_of(wrapped) for _ in range(2)] == whole[2:]
    elsewhere: DataLoader[Any] = DataLoader(
        loader, batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    for refused, remedy in (
        (lambda: loader.dataset[3], "iterate over the loader"),
        (lambda: next(iter(DataLoader(loader.dataset, batch_size=4))), "`batch_sampler` together"),
        (lambda: list(elsewhere), "build it in the process that uses it"),
    ):
        with pytest.raises(SettingError, match=remedy):
            refused()


@pytest.fixture
def torchdata() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")


@pytest.mark.parametrize("served", [0, 3, 5, 6])
def test_states_mean_what_those_of_statefuldataloader_do(served: int, torchdata: Any, path: Path) -> None:
    """Of a last batch: the epoch's rest is empty. Of an ended iterator, 6: the next epoch starts."""

    def rests(make: Any) -> list[list[int]]:
        loader = make()
        iterator = iter(loader)
        taken = [next(iterator, None) for _ in range(served)]
        assert taken[BATCHES:] in ([], [None])
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator
        resumed = make()
        resumed.load_state_dict(state)
        return [[i for batch in resumed for i in getattr(batch, "ids", batch).tolist()] for _ in range(2)]

    ids = torch.tensor(epochs_of(path, 1, shuffle=False)[0])
    reference = rests(lambda: torchdata.StatefulDataLoader(ids, batch_size=16))
    assert rests(lambda: build(path, shuffle=False)) == reference


@pytest.mark.parametrize("served", [2, 5])
def test_a_loader_resumes_inside_statefuldataloader(served: int, torchdata: Any, path: Path) -> None:
    first, second, third = epochs_of(path, 3)
    with build(path) as loader, build(path) as again:
        outer = torchdata.StatefulDataLoader(loader, batch_size=None)
        assert ids_of(outer) == first
        iterator = iter(outer)
        taken = [next(iterator) for _ in range(served)]
        state = json.loads(json.dumps(outer.state_dict()))
        assert ids_of(taken) + ids_of(iterator) == second
        resumed = torchdata.StatefulDataLoader(again, batch_size=None)
        resumed.load_state_dict(state)
        assert [ids_of(resumed), ids_of(resumed)] == [second[served * 16 :], third]


# Accelerate.


@pytest.fixture
def accelerate() -> Any:
    return pytest.importorskip("accelerate", reason="pip install accelerate")


@pytest.mark.parametrize("method", [False, True], ids=["function", "method"])
def test_accelerate_prepares_a_loader_and_skips_batches_without_reading_them(
    method: bool, accelerate: Any, loader: Any, path: Path
) -> None:
    epochs = epochs_of(path, 4)
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.prepare(loader) is loader, "it shares each epoch out by itself"
    prepare = accelerator.prepare_data_loader if method else accelerate.data_loader.prepare_data_loader
    prepared = prepare(loader)
    assert len(prepared) == BATCHES
    assert not method or prepared is loader
    gathered = [y for _, labels in prepared for y in accelerator.gather_for_metrics(labels).tolist()]
    assert len(gathered) == IMAGES, "nothing is taken for a repeat"
    skipped = accelerate.skip_first_batches(prepared, 3)
    assert len(skipped) == 2
    assert ids_of(skipped) == epochs[1][48:]
    prepared.set_epoch(2)
    assert [ids_of(prepared), ids_of(accelerate.skip_first_batches(loader, 1))] == [epochs[2], epochs[3][16:]]


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_that_are_shared_out_a_second_time_are_refused_not_lost(
    rank: int, accelerate: Any, path: Path
) -> None:
    for batch_size in (14, 16):  # whole ones, and shorter last ones
        with build(path, batch_size=batch_size) as built:
            second = accelerate.data_loader.prepare_data_loader(built, num_processes=2, process_index=rank)
            with pytest.raises(SettingError, match="by itself"):
                list(second)


# Lightning.


@pytest.fixture
def lightning() -> Any:
    module = pytest.importorskip("pytorch_lightning", reason="pip install pytorch-lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    return module


Trained = dict[int, list[int]]


def fit(
    lightning: Any,
    folder: Path,
    epochs: int,
    *both: Any,
    callbacks: Any = (),
    start: Any = None,
    **settings: Any,
) -> tuple[Trained, list[list[int]]]:
    """Train a model with the loaders `both`: the ids that it is trained on, by epoch, and validated on."""
    trained: Trained = {}
    validated: list[list[int]] = []

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(3 * STORED_SIZE**2, 5)

        def training_step(self, batch: loaders.Batch, number: int) -> torch.Tensor:
            images, labels = batch
            trained.setdefault(self.current_epoch, []).extend(batch.ids.tolist())
            return torch.nn.functional.cross_entropy(self.model(images.flatten(1)), labels)

        def on_validation_epoch_start(self) -> None:
            validated.append([])

        def validation_step(self, batch: loaders.Batch, number: int) -> None:
            validated[-1] += batch.ids.tolist()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-4)

    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **settings,
    )
    trainer.fit(Classifier(), *both, ckpt_path=start)
    return trained, validated


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_and_validates_with_one_loader(
    lightning: Any, loader: Any, path: Path, tmp_path: Path
) -> None:
    """In the middle of an epoch, too; and overfits one that does not shuffle."""
    first, second = epochs_of(path, 2)
    trained, validated = fit(lightning, tmp_path, 2, loader, loader, val_check_interval=2)
    assert trained == {0: first, 1: second}
    assert validated == [first, first, second, second]
    with build(path, dtype="float32", shuffle=False) as stored:
        trained, _ = fit(lightning, tmp_path, 2, stored, overfit_batches=2)
    (expected,) = epochs_of(path, 1, shuffle=False)
    assert trained == {0: expected[:32], 1: expected[:32]}


@pytest.mark.parametrize("every", [2, 5, 7, None], ids=["middle", "last batch", "second epoch", "epoch end"])
@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_where_its_checkpoint_was_written(
    every: int | None, lightning: Any, loader: Any, path: Path, tmp_path: Path
) -> None:
    """5 batches an epoch. With StatefulDataLoader it skips an epoch after the checkpoint at a last batch."""
    whole, steps = epochs_of(path, 3), every or 5
    checkpoints = lightning.callbacks.ModelCheckpoint(
        tmp_path, "{step}", save_top_k=-1, every_n_train_steps=every, every_n_epochs=None if every else 1
    )
    fit(lightning, tmp_path, 2, loader, callbacks=[checkpoints])
    with build(path, dtype="float32") as again:
        trained, _ = fit(lightning, tmp_path, 3, again, start=tmp_path / f"step={steps}.ckpt")
    epoch, batches = divmod(steps, 5)
    later = {number: whole[number] for number in range(epoch + 1, 3)}
    assert trained == {epoch: whole[epoch][batches * 16 :], **later}
