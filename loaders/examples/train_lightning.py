"""Train a ResNet on a folder of pictures with Lightning (`pip install pytorch-lightning`).

    python -m loaders.examples.train_lightning data/shards --epochs 20
    torchrun --nproc-per-node 8 -m loaders.examples.train_lightning data/shards --epochs 90 --bf16 --resume

SIGTERM saves and ends with exit code 143; the same command with --resume goes on with the batches left.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch

from loaders import Batch
from loaders.examples import common
from loaders.examples.models import build_model, build_optimizer, smoothed_cross_entropy


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A ResNet with its loss and loaders; saves a checkpoint after each epoch, and on SIGTERM."""

    def __init__(self, args: argparse.Namespace, path: Path, sigterm: common.Sigterm) -> None:
        super().__init__()
        self.args, self.path, self.sigterm = args, path, sigterm

    def setup(self, stage: str) -> None:
        """Build loaders and model, in each process, once the process group is there.

        Only then does a loader know with how many ranks it shares each epoch.
        """
        self.args.device = str(self.trainer.strategy.root_device)
        self.train_loader, self.val_loader = common.build_loaders(self.args, self.trainer.world_size)
        self.net = build_model(self.args.model, len(self.train_loader.classes), self.args.seed)

    def train_dataloader(self) -> Any:
        """Return the loader; Lightning saves and restores its state with the checkpoints."""
        return self.train_loader

    def val_dataloader(self) -> Any:
        return [] if self.val_loader is None else self.val_loader

    def validation_step(self, batch: Batch, number: int) -> None:
        self.training_step(batch, number, "validation_")

    def training_step(self, batch: Batch, number: int, prefix: str = "") -> torch.Tensor:
        """Compute the loss, and log loss and accuracy, which Lightning averages over the epoch."""
        images, labels = batch
        logits = self.net(images)
        loss = smoothed_cross_entropy(logits, labels)
        figures = {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}
        named = {prefix + name: value for name, value in figures.items()}
        self.log_dict(named, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        return loss

    def configure_optimizers(self) -> Any:
        steps = self.args.epochs * len(self.train_loader)
        optimizer, schedule = build_optimizer(self.args.model, self.net, steps, self.args.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the model's name, which `common.read_checkpoint` compares with --model."""
        checkpoint["name"] = self.args.model

    def on_train_start(self) -> None:
        """Replace Lightning's handler of SIGTERM.

        Lightning's broadcasts at once, while another rank may be within a different collective operation.
        """
        self.sigterm.install_handler()
        self.served, self.started = 0, time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Batch, number: int) -> None:
        self.served += len(batch.ids) * self.trainer.world_size
        should_stop = self.sigterm.is_set()
        if should_stop or number + 1 == self.trainer.num_training_batches:
            self.trainer.save_checkpoint(self.path)  # with the loader's state
        if should_stop:
            raise SystemExit(143)

    def on_validation_batch_end(self, *_: Any) -> None:
        """End on SIGTERM; the trained model has been saved before the validation."""
        if self.sigterm.is_set():
            raise SystemExit(143)

    def on_train_epoch_end(self) -> None:
        """Report the epoch; Lightning calls this after the validation."""
        figures = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        if self.served:
            figures["images_per_s"] = self.served / (time.perf_counter() - self.started)
        if self.trainer.is_global_zero:
            common.report(self.trainer.current_epoch, figures)
        self.served, self.started = 0, time.perf_counter()


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """Train on the devices of this machine; return the exit code."""
    path = args.out / "checkpoint.ckpt"
    checkpoint = common.read_checkpoint(path, args)
    trainer = lightning.Trainer(
        accelerator="cpu" if args.device == "cpu" else "cuda",
        devices=common.read_launcher("LOCAL_WORLD_SIZE", 1),
        num_nodes=common.read_launcher("GROUP_WORLD_SIZE", 1),
        max_epochs=args.epochs,
        precision="bf16-mixed" if args.bf16 else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(args, path, sigterm), ckpt_path=None if checkpoint is None else path)
    return 0


main = partial(common.main, common.parser("train_lightning", __doc__), train)

if __name__ == "__main__":
    sys.exit(main())
