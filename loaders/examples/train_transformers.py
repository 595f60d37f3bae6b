"""Train a ResNet on a folder of pictures with Hugging Face's Trainer (`pip install transformers accelerate`).

    python -m loaders.examples.train_transformers data/shards --epochs 20
    torchrun --nproc-per-node 8 -m loaders.examples.train_transformers data/shards --epochs 90 --bf16 --resume

SIGTERM saves and ends with exit code 143; the same command with --resume goes on with the batches left.
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from loaders.batch import Batch
from loaders.examples import common
from loaders.examples.models import build_model, build_optimizer, smoothed_cross_entropy
from loaders.examples.train import Learner

_FOLDER = "hugging-face"
"""Folder in OUT of the Trainer's checkpoints, of which it removes all but the latest.

A checkpoint is complete when it has `loader.pt`, which is written last.
"""


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer on our loaders, which split epochs among the ranks by themselves."""

    def get_train_dataloader(self) -> Any:
        """Return the loader; the Trainer sets its epoch, and skips batches without reading them."""
        return self.training

    def compute_loss(self, model: torch.nn.Module, batch: Batch, **_: Any) -> torch.Tensor:
        """Compute the loss of a batch of our loaders, which is no dictionary of named inputs."""
        return smoothed_cross_entropy(model(batch.images), batch.labels)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Evaluate all samples on all ranks; the Trainer's own loss weights short batches like full ones."""
        figures: dict[str, float] = self.learner.validate(self.validation, self.sigterm.is_set)
        self.log(figures)
        return figures


class EpochCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Reports each epoch, ends the training on SIGTERM, and completes the Trainer's checkpoints."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.stopped = trainer, False

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.served, self.started = 0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop after this batch if SIGTERM has been received."""
        self.served += self.trainer.options.batch_size
        if self.trainer.sigterm.is_set():
            control.should_save = control.should_training_stop = self.stopped = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure the epoch; one that SIGTERM has ended is neither reported nor validated nor saved again."""
        self.figures = {"images_per_s": self.served / (time.perf_counter() - self.started)}
        if self.stopped:
            control.should_log = control.should_evaluate = control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Collect the figures, which come after the training and after the validation; then report them."""
        names = ("loss", "validation_loss", "validation_accuracy")
        self.figures |= {name: logs[name] for name in names if name in logs}
        last = "loss" if self.trainer.validation is None else "validation_loss"
        if last in logs and state.is_world_process_zero:
            common.report(round(state.epoch) - 1, self.figures)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Complete a checkpoint with the loader's state; called after the validation, if there is one."""
        self.trainer.accelerator.wait_for_everyone()  # until each rank has written its part
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}/loader.pt"
            content = {"name": self.trainer.options.model, "loader": self.trainer.training.state_dict()}
            common.save_checkpoint(path, content)
        if self.trainer.sigterm.is_set():
            control.should_training_stop = self.stopped = True


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """Train on this process's device; return the exit code, 143 if SIGTERM ended it, after saving."""
    settings = transformers.TrainingArguments(
        output_dir=str(args.out / _FOLDER),
        save_total_limit=2,  # the latest may be incomplete
        num_train_epochs=args.epochs,
        use_cpu=args.device == "cpu",
        bf16=args.bf16,
        max_grad_norm=0,
        logging_strategy="epoch",
        save_strategy="epoch",
        disable_tqdm=True,
    )
    args.device = str(settings.device)
    training, validation = common.build_loaders(args, settings.world_size)
    net = build_model(args.model, len(training.classes), args.seed)
    net = net.to(memory_format=torch.contiguous_format)  # the Trainer saves contiguous weights only
    optimizer, schedule = build_optimizer(args.model, net, args.epochs * len(training), args.lr)
    settings.eval_strategy = "no" if validation is None else "epoch"
    trainer = Trainer(
        model=net,
        args=settings,
        train_dataset=training.dataset,
        eval_dataset=None if validation is None else validation.dataset,
        optimizers=(optimizer, schedule),
    )
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    trainer.learner = Learner(net, optimizer, schedule, dtype=dtype)
    trainer.training, trainer.validation = training, validation
    trainer.options, trainer.sigterm = args, sigterm
    trainer.remove_callback(transformers.PrinterCallback)
    callback = EpochCallback(trainer)
    trainer.add_callback(callback)
    resumed_folder = None
    complete = sorted(args.out.glob(f"{_FOLDER}/checkpoint-*/loader.pt"), key=os.path.getmtime)
    if complete:
        path = complete[-1]
        checkpoint = common.read_checkpoint(path, args)
        if checkpoint is not None:
            # Only checks that the data is the same: the Trainer itself restores the epoch and the batch.
            common.restore_loader(training, {**checkpoint["loader"], "epoch": 0, "served_batches": 0}, path)
            resumed_folder = str(path.parent)
    trainer.train(resume_from_checkpoint=resumed_folder)
    return 143 if callback.stopped else 0


main = partial(common.main, common.parser("train_transformers", __doc__), train)

if __name__ == "__main__":
    sys.exit(main())
