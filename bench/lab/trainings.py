"""Trainings by several libraries that wait a given share of their time for data; `bench.lab.watch` runs them.

    python bench/lab/trainings.py plain --wait 0.4 --stage read

A step sleeps instead of an accelerator's work, and then an optimizer steps. The time of a sample is slept
(read), spent on decoding (decode), on a transform (transform) or on a loop in Python (python).
"""

import io
import itertools
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose

from loaders.examples.models import build_optimizer, smoothed_cross_entropy
from loaders.examples.train import Learner

BATCH, SIDE = 8, 32


class SlowDataset(Dataset[Any]):
    """Dataset of `samples` samples, each of which takes `seconds` in the stage that is named."""

    def __init__(self, samples: int, seconds: float, stage: str) -> None:
        self.samples, self.seconds, self.stage = samples, seconds, stage
        buffer = io.BytesIO()
        Image.effect_noise((128, 128), 64).convert("RGB").save(buffer, "jpeg")
        self.jpeg = buffer.getvalue()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        self.spend()
        return torch.zeros(3, SIDE, SIDE), index % 9

    def spend(self) -> None:
        """Take the time of a sample."""
        until_s = time.perf_counter() + self.seconds
        if self.stage == "read":
            time.sleep(self.seconds)
        if self.stage == "transform":
            Compose([SlowTransform()])(until_s)
        while time.perf_counter() < until_s:
            if self.stage == "decode":
                Image.open(io.BytesIO(self.jpeg)).load()


class SlowTransform:
    """Transform that computes until a time of `time.perf_counter`."""

    def __call__(self, until_s: float) -> float:
        """Return the time, then."""
        while time.perf_counter() < until_s:
            pass
        return until_s


class SleepingNet(torch.nn.Module):
    """Model that sleeps for `step_s` in each training step."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.linear, self.step_s = torch.nn.Linear(3, 9), step_s

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [batch, 9], of the pictures' mean colours."""
        if self.training:
            time.sleep(self.step_s)
        logits: torch.Tensor = self.linear(images.float().mean((2, 3)))
        return logits


def _train_epoch(
    net: torch.nn.Module, loader: Any, backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
) -> None:
    """Train on the batches of `loader`; `backward` computes gradients from the loss."""
    optimizer, schedule = build_optimizer("resnet18", net, steps=1000)
    learner = Learner(net, optimizer, schedule, backward=backward)
    for batch in loader:
        learner.step(batch)


def plain(net: SleepingNet, data: SlowDataset, workers: int) -> None:
    """Train by a plain loop."""
    _train_epoch(net, DataLoader(data, BATCH, shuffle=True, num_workers=workers))


def reference(net: SleepingNet, data: SlowDataset, workers: int) -> None:
    """Train as torchvision's references do: with samplers, and a validation after each of two epochs."""
    sampler: Any = torch.utils.data.RandomSampler(data)
    train = DataLoader(data, BATCH, sampler=sampler, num_workers=workers, pin_memory=False)
    test = DataLoader(SlowDataset(32, data.seconds / 4, data.stage), BATCH)
    for epoch in range(2):
        net.train()
        # the second epoch is a half; its iterator is made when it begins, since workers read ahead at once
        _train_epoch(net, train if epoch == 0 else itertools.islice(train, len(train) // 2))
        net.eval()
        with torch.inference_mode():
            for batch in test:
                net(batch[0])


def webdataset(net: SleepingNet, data: SlowDataset, workers: int) -> None:
    """Train on tars that the library webdataset reads."""
    import webdataset as wds

    def decode(sample: Any) -> Any:
        data.spend()
        return torch.zeros(3, SIDE, SIDE), int(sample["cls"])

    with tempfile.TemporaryDirectory() as folder:
        for shard in range(max(1, workers)):
            with tarfile.open(Path(folder) / f"{shard}.tar", "w") as tar:
                for number in range(len(data) // max(1, workers)):
                    info = tarfile.TarInfo(f"{number:06d}.cls")
                    info.size = 1
                    tar.addfile(info, io.BytesIO(b"3"))
        shards = [str(path) for path in sorted(Path(folder).iterdir())]
        batches = wds.WebDataset(shards, shardshuffle=False).map(decode).batched(BATCH)
        _train_epoch(net, wds.WebLoader(batches, batch_size=None, num_workers=workers))


def lightning(net: SleepingNet, data: SlowDataset, workers: int) -> None:
    """Train by Lightning's Trainer."""
    import pytorch_lightning as pl

    class LightningNet(pl.LightningModule):  # type: ignore[misc]
        """Wrapper of the net for Lightning."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            """Return the loss of a batch."""
            images, labels = batch
            return smoothed_cross_entropy(self.net(images), labels)

        def configure_optimizers(self) -> Any:
            """Return plain SGD."""
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(LightningNet(), DataLoader(data, BATCH, num_workers=workers))


def accelerate(net: SleepingNet, data: SlowDataset, workers: int) -> None:
    """Train by a loop with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(net, DataLoader(data, BATCH, num_workers=workers))
    _train_epoch(model, loader, accelerator.backward)


def transformers(net: SleepingNet, data: SlowDataset, workers: int) -> None:
    """Train by the Trainer of Hugging Face's transformers."""
    from transformers import Trainer, TrainingArguments

    class TransformersNet(torch.nn.Module):
        """Wrapper of the net for the Trainer."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
            """Return the loss, in the form that the Trainer takes."""
            return {"loss": smoothed_cross_entropy(self.net(images), labels)}

    def collate(samples: Any) -> Any:
        return {
            "images": torch.stack([image for image, _ in samples]),
            "labels": torch.tensor([label for _, label in samples]),
        }

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=1,
            report_to=[],
            save_strategy="no",
            per_device_train_batch_size=BATCH,
            dataloader_num_workers=workers,
            use_cpu=True,
        )
        Trainer(TransformersNet(), arguments, data_collator=collate, train_dataset=data).train()


def timm(net: SleepingNet, data: SlowDataset, workers: int) -> None:
    """Train with a class around the DataLoader that normalises one batch ahead, as timm's loader does."""

    class PrefetchLoader:
        """Loader that yields a batch after it has taken the next one from the DataLoader."""

        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            last = None
            for images, labels in self.loader:
                if last is not None:
                    yield last
                last = images.float().sub(0.5), labels
            if last is not None:
                yield last

    _train_epoch(
        net, PrefetchLoader(DataLoader(data, BATCH, shuffle=True, num_workers=workers, drop_last=True))
    )


KINDS: dict[str, Callable[[SleepingNet, SlowDataset, int], None]] = {
    "plain": plain,
    "reference": reference,
    "webdataset": webdataset,
    "lightning": lightning,
    "accelerate": accelerate,
    "transformers": transformers,
    "timm": timm,
}
"""Functions that train one epoch with a number of workers, by the name on the command line."""


def sample_seconds(wait: float, step_s: float, workers: int) -> float:
    """Return the seconds of a sample with which a training waits the share `wait` of its time."""
    if workers:
        return step_s / (1 - wait) * workers / BATCH * (1.0 if wait else 0.5)
    return step_s * wait / (1 - wait) / BATCH


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--wait", default=0.4)
@click.option("--stage", type=click.Choice(["read", "decode", "transform", "python"]), default="read")
@click.option("--workers", default=0)
@click.option("--step", "step_s", default=0.05)
@click.option("--batches", default=60)
def main(kind: str, wait: float, stage: str, workers: int, step_s: float, batches: int) -> None:
    """Train one epoch."""
    torch.set_num_threads(1)
    data = SlowDataset(batches * BATCH, sample_seconds(wait, step_s, workers), stage)
    KINDS[kind](SleepingNet(step_s), data, workers)


if __name__ == "__main__":
    main()
