"""Trainings of the kinds that people have, which wait as long as they are told; `bench.lab.watch` runs them.

    python bench/lab/trainings.py plain --wait 0.4 --stage read

Each step takes the accelerator's place: it sleeps, and then an optimizer steps. What a sample takes is slept
(read), decoded (decode) or computed in Python (python).
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

from loaders.examples.models import build_optimizer, smoothed_cross_entropy
from loaders.examples.train import Learner

BATCH, SIDE = 8, 32


class Slow(Dataset[Any]):
    """Samples that take `seconds`, of the kind that is asked for."""

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
        while time.perf_counter() < until_s:
            if self.stage == "decode":
                Image.open(io.BytesIO(self.jpeg)).load()


class Net(torch.nn.Module):
    """Sleeps for as long as a step takes."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.linear, self.step_s = torch.nn.Linear(3, 9), step_s

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the pictures' mean colours."""
        if self.training:
            time.sleep(self.step_s)
        logits: torch.Tensor = self.linear(images.float().mean((2, 3)))
        return logits


def _epoch(
    net: torch.nn.Module, loader: Any, backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
) -> None:
    optimizer, schedule = build_optimizer("resnet18", net, steps=1000)
    learner = Learner(net, optimizer, schedule, backward=backward)
    for batch in loader:
        learner.step(batch)


def plain(net: Net, data: Slow, workers: int) -> None:
    """A loop."""
    _epoch(net, DataLoader(data, BATCH, shuffle=True, num_workers=workers))


def reference(net: Net, data: Slow, workers: int) -> None:
    """As torchvision's reference: samplers, a validation after each epoch, a function for an epoch."""
    sampler: Any = torch.utils.data.RandomSampler(data)
    train = DataLoader(data, BATCH, sampler=sampler, num_workers=workers, pin_memory=False)
    test = DataLoader(Slow(32, data.seconds / 4, data.stage), BATCH)
    for part in range(2):
        net.train()
        _epoch(net, itertools.islice(train, len(train) // 2) if part else train)
        net.eval()
        with torch.inference_mode():
            for batch in test:
                net(batch[0])


def webdataset(net: Net, data: Slow, workers: int) -> None:
    """Tars by the webdataset library."""
    import webdataset as wds

    def decoded(sample: Any) -> Any:
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
        read = wds.WebDataset(shards, shardshuffle=False).map(decoded).batched(BATCH)
        _epoch(net, wds.WebLoader(read, batch_size=None, num_workers=workers))


def lightning(net: Net, data: Slow, workers: int) -> None:
    """A Trainer of Lightning."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        """The net, as Lightning takes it."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            """The loss of a batch."""
            images, labels = batch
            return smoothed_cross_entropy(self.net(images), labels)

        def configure_optimizers(self) -> Any:
            """Plain SGD."""
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(Module(), DataLoader(data, BATCH, num_workers=workers))


def accelerate(net: Net, data: Slow, workers: int) -> None:
    """A loop by Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(net, DataLoader(data, BATCH, num_workers=workers))
    _epoch(model, loader, accelerator.backward)


def transformers(net: Net, data: Slow, workers: int) -> None:
    """The Trainer of Hugging Face."""
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        """The net, as the Trainer takes it."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
            """Loss and logits."""
            return {"loss": smoothed_cross_entropy(self.net(images), labels)}

    def collate(samples: Any) -> Any:
        return {
            "images": torch.stack([one[0] for one in samples]),
            "labels": torch.tensor([one[1] for one in samples]),
        }

    with tempfile.TemporaryDirectory() as folder:
        told = {"per_device_train_batch_size": BATCH, "dataloader_num_workers": workers, "use_cpu": True}
        arguments = TrainingArguments(folder, num_train_epochs=1, report_to=[], save_strategy="no", **told)
        Trainer(Model(), arguments, data_collator=collate, train_dataset=data).train()


def timm(net: Net, data: Slow, workers: int) -> None:
    """As timm's loader: a class around the DataLoader that normalises, one batch ahead."""

    class Ahead:
        """Gives a batch when the next one has been asked for."""

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

    _epoch(net, Ahead(DataLoader(data, BATCH, shuffle=True, num_workers=workers, drop_last=True)))


KINDS: dict[str, Callable[[Net, Slow, int], None]] = {
    each.__name__: each for each in (plain, reference, webdataset, lightning, accelerate, transformers, timm)
}


def sample_seconds(wait: float, step_s: float, workers: int) -> float:
    """What a sample takes so that a training waits that share of its time."""
    if workers:
        return step_s / (1 - wait) * workers / BATCH * (1.0 if wait else 0.5)
    return step_s * wait / (1 - wait) / BATCH


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--wait", default=0.4)
@click.option("--stage", type=click.Choice(["read", "decode", "python"]), default="read")
@click.option("--workers", default=0)
@click.option("--step", "step_s", default=0.05)
@click.option("--batches", default=60)
def main(kind: str, wait: float, stage: str, workers: int, step_s: float, batches: int) -> None:
    """Train one epoch."""
    torch.set_num_threads(1)
    data = Slow(batches * BATCH, sample_seconds(wait, step_s, workers), stage)
    KINDS[kind](Net(step_s), data, workers)


if __name__ == "__main__":
    main()
