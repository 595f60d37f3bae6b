"""Loaders where a DataLoader is expected: its attributes, Accelerate, Lightning, Hugging Face."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from torchvision.transforms import v2

from precache.errors import SettingError
from tests.conftest import IMAGES
from tests.loader_contract import ids_of
from tests.loaders.test_integration import build, epochs_of, lightning, make_module, trainer
from tests.loaders.test_ranks import launch

__all__ = ["lightning"]  # a fixture
BATCHES = 5

TWO_PROCESSES = """
import json, sys
import loaders
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from precache.errors import SettingError

accelerator = Accelerator(cpu=True)
path, out = sys.argv[1:]
with loaders.build(path, batch_size=8, reading=loaders.Reading(workers=1)) as built:
    assert accelerator.prepare_data_loader(built) is built
    served = [[batch.ids.tolist() for batch in built] for _ in range(2)]
    built.set_epoch(0)
    skipped = [batch.ids.tolist() for batch in accelerator.skip_first_batches(built, 2)]
    try:
        list(prepare_data_loader(built))
    except SettingError as error:
        refused = str(error)
with open(f"{out}/{accelerator.process_index}.json", "w") as file:
    json.dump([served, skipped, refused], file)
accelerator.end_training()
"""


@pytest.fixture
def path(converted: dict[str, Path]) -> Path:
    return converted["shards"]


@pytest.fixture
def loader(path: Path) -> Iterator[Any]:
    with build(path, dtype="float32") as built:
        yield built


def network() -> torch.nn.Module:
    pool = torch.nn.AdaptiveAvgPool2d(4)
    return torch.nn.Sequential(torch.nn.BatchNorm2d(3), pool, torch.nn.Flatten(), torch.nn.Linear(48, 5))


def test_a_loader_has_what_a_dataloader_has(loader: Any, path: Path) -> None:
    assert len(loader.dataset) == IMAGES
    assert loader.dataset.classes == loader.classes
    assert loader.class_to_idx == loader.dataset.class_to_idx
    assert [loader.class_to_idx[name] for name in loader.classes] == list(range(5))
    assert sorted(loader.dataset.targets) == sorted(int(y) for _, labels in loader for y in labels)
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (16, False, 0)
    assert isinstance(loader.sampler, Sampler)
    assert len(loader.sampler) == IMAGES
    assert len(loader.batch_sampler) == len(loader) == BATCHES
    with build(path, last="drop", shuffle=False, rank=1, world_size=2) as dropping:
        assert dropping.drop_last
        assert isinstance(dropping.sampler, SequentialSampler)
        assert len(dropping.sampler) == 32
        assert list(dropping.sampler) == [*range(16, 32), *range(48, 64)]


def test_a_loader_is_shown_in_a_line(loader: Any, path: Path) -> None:
    shown = f"<loaders.Loader shards {path}: train, 70 samples, batches of 16, 5 per epoch>"
    assert repr(loader) == shown
    with build(path, rank=1, world_size=2) as one:
        assert repr(one).endswith("batches of 16, 3 per epoch, rank 1 of 2>")


def test_a_sampler_says_what_comes(loader: Any) -> None:
    loader.sampler.set_epoch(2)
    positions = list(loader.sampler)
    assert [batch.tolist() for batch in map(torch.tensor, loader.batch_sampler)] == [
        positions[start:stop] for start, stop in ((0, 16), (16, 32), (32, 48), (48, 59), (59, 70))
    ]
    labels = [y for _, batch in loader for y in batch.tolist()]
    loader.set_epoch(2)
    served = [y for _, batch in loader for y in batch.tolist()]
    assert [loader.dataset.targets[position] for position in positions] == served
    assert labels != served, "the batch sampler's iteration was one, too"


def test_a_dataloader_of_a_loaders_parts_serves_its_batches(loader: Any, path: Path) -> None:
    whole = epochs_of(path, 2)
    parts: DataLoader[Any] = DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )
    assert [ids_of(parts) for _ in range(2)] == whole
    with pytest.raises(SettingError, match="serves whole batches"):
        loader.dataset[3]
    with pytest.raises(SettingError, match="pass on its `dataset` and `batch_sampler` together"):
        next(iter(DataLoader(loader.dataset, batch_size=4)))


def test_torch_and_torchvision_take_its_batches(loader: Any) -> None:
    model = AveragedModel(network())
    update_bn(loader, model)
    assert model.module[0].num_batches_tracked == BATCHES
    for mix in (v2.CutMix(num_classes=5), v2.MixUp(num_classes=5)):
        for batch in loader:
            images, labels = mix(batch)
            assert images.shape == batch.images.shape
            assert labels.shape == (len(batch.ids), 5)


@pytest.fixture
def accelerate() -> Any:
    return pytest.importorskip("accelerate", reason="pip install accelerate")


@pytest.mark.parametrize("method", [False, True], ids=["function", "method"])
def test_accelerate_prepares_a_loader(method: bool, accelerate: Any, loader: Any, path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    prepare = accelerator.prepare_data_loader if method else accelerate.data_loader.prepare_data_loader
    prepared = prepare(loader)
    assert len(prepared) == BATCHES
    gathered = []
    for _ in range(2):
        for _, labels in prepared:
            gathered += accelerator.gather_for_metrics(labels).tolist()
    assert len(gathered) == 2 * IMAGES, "nothing is taken for a repeat"
    loader.set_epoch(2)
    prepared.set_epoch(2)
    assert ids_of(prepared) == epochs_of(path, 3)[2]


@pytest.mark.parametrize("prepared", [False, True])
def test_accelerate_skips_batches_without_reading_them(
    prepared: bool, accelerate: Any, loader: Any, path: Path
) -> None:
    first, second, third = epochs_of(path, 3)
    taken = accelerate.data_loader.prepare_data_loader(loader) if prepared else loader
    assert ids_of(taken) == first
    skipped = accelerate.skip_first_batches(taken, 3)
    assert len(skipped) == 2
    assert ids_of(skipped) == second[48:]
    if prepared:
        taken.set_epoch(2)  # it counts by itself
    assert ids_of(taken) == third


def test_accelerates_processes_share_a_loader_once(accelerate: Any, path: Path, tmp_path: Path) -> None:
    launch(TWO_PROCESSES, 2, tmp_path, path, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):
        assert sorted(i for served, _, _ in ranks for batch in served[epoch] for i in batch) == list(
            range(IMAGES)
        )
    for served, skipped, refused in ranks:
        assert skipped == served[0][2:]
        assert "divides them among processes by itself" in refused


@pytest.mark.parametrize("batch_size", [14, 16], ids=["whole batches", "shorter last ones"])
@pytest.mark.parametrize("rank", [0, 1])
def test_batches_that_are_shared_out_a_second_time_are_refused_not_lost(
    rank: int, batch_size: int, accelerate: Any, path: Path
) -> None:
    with build(path, batch_size=batch_size) as built:
        second = accelerate.data_loader.prepare_data_loader(built, num_processes=2, process_index=rank)
        with pytest.raises(SettingError, match="divides them among processes by itself"):
            list(second)


@pytest.mark.parametrize("every", [None, 2], ids=["epoch end", "within an epoch"])
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_and_validates_with_one_loader(
    every: int | None, lightning: Any, loader: Any, path: Path, tmp_path: Path
) -> None:
    model = make_module(lightning)
    run = trainer(lightning, tmp_path, 2, **({"val_check_interval": every} if every else {}))
    run.fit(model, loader, loader)
    epochs = epochs_of(path, 2)
    assert list(model.trained.values()) == epochs
    _, *validated = model.validated  # without the sanity check
    assert validated == [epoch for epoch in epochs for _ in range(2 if every else 1)]


@pytest.mark.filterwarnings("ignore")
def test_lightning_overfits_a_loader_that_does_not_shuffle(
    lightning: Any, path: Path, tmp_path: Path
) -> None:
    model = make_module(lightning)
    with build(path, dtype="float32", shuffle=False) as stored:
        trainer(lightning, tmp_path, 2, overfit_batches=2).fit(model, stored)
    (expected,) = epochs_of(path, 1, shuffle=False)
    assert list(model.trained.values()) == [expected[:32]] * 2


class Classifier(torch.nn.Module):
    """As those of transformers: a loss where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.seen: list[list[int]] = []

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.network(pixel_values)
        if labels is None:
            return {"logits": logits}
        if self.training:
            self.seen.append(labels.tolist())
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def hugging_face(transformers: Any, folder: Path, serve: Any, **settings: Any) -> Any:
    """A Trainer that takes what `serve` gives for its DataLoader, in training and evaluation."""

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return serve

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return serve

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            if not isinstance(inputs, dict):
                images, labels = inputs
                inputs = {"pixel_values": images, "labels": labels}
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=16,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        **settings,
    )
    return Trainer(model=Classifier(), args=arguments)


def labels_of(path: Path, epochs: int) -> list[list[int]]:
    with build(path) as loader:
        return [labels.tolist() for _ in range(epochs) for _, labels in loader]


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="pip install transformers")


def test_hugging_face_trains_on_a_loader_and_resumes(
    transformers: Any, loader: Any, path: Path, tmp_path: Path
) -> None:
    whole = labels_of(path, 2)
    run = hugging_face(transformers, tmp_path, loader, save_steps=7)
    run.train()
    assert run.model.seen == whole
    with build(path, dtype="float32") as again:
        resumed = hugging_face(transformers, tmp_path, again, save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert resumed.model.seen == whole[7:]


def test_hugging_face_evaluates_through_a_dataloader_that_names_the_parts(
    transformers: Any, loader: Any, path: Path, tmp_path: Path
) -> None:
    named: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
        collate_fn=lambda batch: {"pixel_values": batch[0], "labels": batch[1]},
    )
    run = hugging_face(transformers, tmp_path, named, save_strategy="no")
    run.train()
    assert run.model.seen == labels_of(path, 2)
    predicted = run.evaluation_loop(named, "evaluation")
    assert len(predicted.label_ids) == predicted.num_samples == IMAGES


def test_a_batch_stays_whole_on_its_way_to_a_device(accelerate: Any, lightning: Any, loader: Any) -> None:
    """Lightning's and Accelerate's own functions, which move what a DataLoader gives."""
    from pytorch_lightning.utilities import move_data_to_device

    batch = next(iter(loader))
    for moved in (
        move_data_to_device(batch, torch.device("cpu")),
        accelerate.utils.send_to_device(batch, torch.device("cpu"), non_blocking=True),
        batch.to("cpu"),
    ):
        images, labels = moved
        assert len(moved) == 2
        assert moved[0] is images
        assert moved[1] is labels
        assert torch.equal(images, batch.images)
        assert torch.equal(moved.ids, batch.ids)
        assert torch.equal(moved.padding, batch.padding)
    meta = move_data_to_device(batch, torch.device("meta"))
    assert [part.device.type for part in meta] == ["meta", "meta"]
    assert meta.ids.tolist() == batch.ids.tolist()
