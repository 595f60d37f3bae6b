"""Loaders in other people's training code: Lightning, Accelerate, torch's and torchdata's loaders."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import loaders
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE
from tests.loader_contract import ids_of
from tests.loaders.arms import EACH_ARM
from tests.loaders.test_ranks import launch

ACCELERATE_PROGRAM = """
import json, sys, torch
import loaders
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
path, out = sys.argv[1:]
built = loaders.build(path, batch_size=8, reading=loaders.Reading(workers=1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, built)
assert loader is built
served = [[batch.ids.tolist() for batch in loader] for _ in range(2)]
with open(f"{out}/{accelerator.process_index}.json", "w") as file:
    json.dump([accelerator.num_processes, served], file)
built.close()
accelerator.end_training()
"""


def build(path: Path, **settings: Any) -> loaders.Loader:
    return build_loader(path, **{"batch_size": 16, "workers": 1, **settings})


def epochs_of(path: Path, count: int, **settings: Any) -> list[list[int]]:
    with build(path, **settings) as loader:
        return [ids_of(loader) for _ in range(count)]


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("pytorch_lightning", reason="pip install pytorch-lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    return module


def make_module(lightning: Any) -> Any:
    """A model that writes down the ids it is trained on, (epoch, ids), and those it is validated on."""

    class Classifier(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(3 * STORED_SIZE**2, 5)
            self.trained: dict[int, list[int]] = {}
            self.validated: list[list[int]] = []

        def training_step(self, batch: loaders.Batch, number: int) -> torch.Tensor:
            images, labels = batch
            self.trained.setdefault(self.current_epoch, []).extend(batch.ids.tolist())
            loss = torch.nn.functional.cross_entropy(self.model(images.flatten(1)), labels)
            self.log("loss", loss)
            return loss

        def on_validation_epoch_start(self) -> None:
            self.validated.append([])

        def validation_step(self, batch: loaders.Batch, number: int) -> None:
            self.validated[-1] += batch.ids.tolist()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-4)

    return Classifier()


def trainer(lightning: Any, folder: Path, epochs: int, *callbacks: Any, **settings: Any) -> Any:
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        default_root_dir=folder,
        **settings,
    )


@pytest.mark.parametrize(("backend", "kind"), EACH_ARM)
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_on_every_sample_once_per_epoch(
    backend: str, kind: str, lightning: Any, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    path = raw_tree if kind == "raw" else converted[kind]
    settings = {"backend": backend, "size": STORED_SIZE}
    model = make_module(lightning)
    with (
        build(path, dtype=torch.float32, **settings) as train,
        build(path, dtype=torch.float32, shuffle=False, **settings) as validation,
    ):
        run = trainer(lightning, tmp_path, 2)
        run.fit(model, train, validation)
        assert run.train_dataloader is train
        assert run.val_dataloaders is validation
    assert list(model.trained.values()) == epochs_of(path, 2, **settings)
    _, *validated = model.validated  # without the sanity check, two batches ahead of training
    assert validated == epochs_of(path, 2, shuffle=False, **settings)


@pytest.mark.parametrize("every", [2, 5, 7, None], ids=["middle", "last batch", "second epoch", "epoch end"])
@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_where_its_checkpoint_was_written(
    every: int | None, lightning: Any, converted: dict[str, Path], tmp_path: Path
) -> None:
    """5 batches an epoch. With StatefulDataLoader it skips an epoch after the checkpoint at a last batch."""
    path = converted["shards"]
    whole = epochs_of(path, 3)
    checkpoints = lightning.callbacks.ModelCheckpoint(
        tmp_path, "{step}", save_top_k=-1, every_n_train_steps=every, every_n_epochs=None if every else 1
    )
    with build(path, dtype=torch.float32) as loader:
        trainer(lightning, tmp_path, 2, checkpoints).fit(make_module(lightning), loader)
    model = make_module(lightning)
    steps = every or 5
    with build(path, dtype=torch.float32) as loader:
        trainer(lightning, tmp_path, 3).fit(model, loader, ckpt_path=tmp_path / f"step={steps}.ckpt")
    epoch, batches = divmod(steps, 5)
    assert model.trained == {epoch: whole[epoch][batches * 16 :]} | {
        later: whole[later] for later in range(epoch + 1, 3)
    }


def test_accelerate_prepares_a_loader_as_it_is(converted: dict[str, Path], tmp_path: Path) -> None:
    """Its processes share each epoch once: the loader does it, Accelerate does not do it again."""
    pytest.importorskip("accelerate", reason="pip install accelerate")
    launch(ACCELERATE_PROGRAM, 2, tmp_path, converted["shards"], tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [processes for processes, _ in ranks] == [2, 2]
    for epoch in range(2):
        served = [i for _, epochs in ranks for batch in epochs[epoch] for i in batch]
        assert sorted(served) == list(range(IMAGES))


def test_torchs_dataloader_takes_a_loader_as_its_dataset(converted: dict[str, Path]) -> None:
    with build(converted["shards"]) as loader:
        wrapped: DataLoader[Any] = DataLoader(loader, batch_size=None)  # type: ignore[arg-type]
        assert len(wrapped) == len(loader)
        assert [ids_of(wrapped) for _ in range(2)] == epochs_of(converted["shards"], 2)
        in_workers: DataLoader[Any] = DataLoader(
            loader,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=1,
            multiprocessing_context="fork",
        )
        with pytest.raises(SettingError, match="build it in the process that uses it"):
            list(in_workers)


@pytest.fixture
def torchdata() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")


@pytest.mark.parametrize("served", [0, 1, 3, 5, "end"])
def test_states_mean_what_those_of_statefuldataloader_do(
    served: int | str, torchdata: Any, converted: dict[str, Path]
) -> None:
    """Of a last batch: the epoch's rest is empty. Of an ended iterator: the next epoch starts."""

    def rests(make: Any) -> list[list[int]]:
        loader = make()
        iterator = iter(loader)
        for _ in range(5 if served == "end" else int(served)):
            next(iterator)
        if served == "end":
            assert next(iterator, None) is None
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator
        resumed = make()
        resumed.load_state_dict(state)
        return [[i for batch in resumed for i in getattr(batch, "ids", batch).tolist()] for _ in range(2)]

    ids = torch.tensor(epochs_of(converted["shards"], 1, shuffle=False)[0])
    reference = rests(lambda: torchdata.StatefulDataLoader(ids, batch_size=16))
    with build(converted["shards"], shuffle=False) as loader:
        assert isinstance(loader, torchdata.stateful_dataloader.Stateful)
    assert rests(lambda: build(converted["shards"], shuffle=False)) == reference


@pytest.mark.parametrize("served", [0, 2, 5])
@pytest.mark.parametrize(("backend", "kind"), EACH_ARM)
def test_a_loader_resumes_inside_statefuldataloader(
    backend: str, kind: str, served: int, torchdata: Any, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = raw_tree if kind == "raw" else converted[kind]
    settings = {"backend": backend, "size": STORED_SIZE}
    first, second, third = epochs_of(path, 3, **settings)
    with build(path, **settings) as loader:
        outer = torchdata.StatefulDataLoader(loader, batch_size=None)
        assert ids_of(outer) == first
        iterator = iter(outer)
        taken = [next(iterator) for _ in range(served)]
        state = json.loads(json.dumps(outer.state_dict()))
        assert ids_of(taken) + ids_of(iterator) == second
    with build(path, **settings) as loader:
        resumed = torchdata.StatefulDataLoader(loader, batch_size=None)
        resumed.load_state_dict(state)
        assert ids_of(resumed) == second[served * 16 :]
        assert ids_of(resumed) == third


def test_a_loader_that_is_not_asked_for_the_end_goes_on_with_the_next_epoch(
    converted: dict[str, Path],
) -> None:
    """Who knows `len()` need not ask for more, as Lightning does not."""
    with build(converted["shards"]) as loader:
        for expected in epochs_of(converted["shards"], 3):
            iterator = iter(loader)
            assert ids_of(next(iterator) for _ in range(len(loader))) == expected
        loader.set_epoch(2)
        assert ids_of(loader) == expected, "asked for again"


def test_an_iterator_that_is_not_used_takes_nothing_away(converted: dict[str, Path]) -> None:
    (whole,) = epochs_of(converted["shards"], 1)
    with build(converted["shards"]) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with build(converted["shards"]) as resumed:
        resumed.load_state_dict(state)
        iter(resumed)
        assert ids_of(resumed) == whole[16:]


def test_a_state_taken_after_set_epoch_stands_at_the_start_of_that_epoch(converted: dict[str, Path]) -> None:
    with build(converted["shards"]) as loader:
        for _ in loader:
            loader.set_epoch(5)
            assert (loader.state_dict()["epoch"], loader.state_dict()["served_batches"]) == (5, 0)


def test_a_batch_moves_to_a_device(converted: dict[str, Path]) -> None:
    with build(converted["shards"]) as loader:
        batch = next(iter(loader))
        moved = batch.to("meta")
        assert (moved.images.device.type, moved.labels.device.type) == ("meta", "meta")
        assert moved.images.shape == batch.images.shape
        assert torch.equal(moved.ids, batch.ids)
