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
"""In OUT; the Trainer removes all but its last folders there. One is whole when it has `loader.pt`."""


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Takes our loaders for its DataLoaders: they share epochs among processes by themselves."""

    def get_train_dataloader(self) -> Any:
        """It is told the epoch, and skips batches without reading them."""
        return self.training

    def compute_loss(self, model: torch.nn.Module, batch: Batch, **_: Any) -> torch.Tensor:
        """Of a batch as our loaders serve it, which needs no names."""
        return smoothed_cross_entropy(model(batch.images), batch.labels)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Over all samples, on all ranks; the Trainer's own loss is the mean of batches, of any size."""
        figures: dict[str, float] = self.learner.validate(self.validation, self.sigterm.came)
        self.log(figures)
        return figures


class Epochs(transformers.TrainerCallback):  # type: ignore[misc]
    """Reports each epoch, ends it at SIGTERM, and finishes what the Trainer has saved."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.stopped = trainer, False

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.served, self.started = 0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After this batch it is saved and ended."""
        self.served += self.trainer.options.batch_size
        if self.trainer.sigterm.came():
            control.should_save = control.should_training_stop = self.stopped = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Also called of an epoch that was ended within."""
        self.figures = {"images_per_s": self.served / (time.perf_counter() - self.started)}
        if self.stopped:
            control.should_log = control.should_evaluate = control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Of the training, then of the validation."""
        names = ("loss", "validation_loss", "validation_accuracy")
        self.figures |= {name: logs[name] for name in names if name in logs}
        last = "loss" if self.trainer.validation is None else "validation_loss"
        if last in logs and state.is_world_process_zero:
            common.report(round(state.epoch) - 1, self.figures)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the validation, if there is one."""
        self.trainer.accelerator.wait_for_everyone()  # each rank has written its part
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}/loader.pt"
            content = {"name": self.trainer.options.model, "loader": self.trainer.training.state_dict()}
            common.save_checkpoint(path, content)
        if self.trainer.sigterm.came():
            control.should_training_stop = self.stopped = True


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """The exit code: 143 where SIGTERM ended it, and what was done is saved."""
    settings = transformers.TrainingArguments(
        output_dir=str(args.out / _FOLDER),
        save_total_limit=2,  # one of them is whole
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
    net = net.to(memory_format=torch.contiguous_format)  # as it is saved
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
    trainer.add_callback(epochs := Epochs(trainer))
    whole = sorted(args.out.glob(f"{_FOLDER}/checkpoint-*/loader.pt"), key=os.path.getmtime)
    found = common.read_checkpoint(whole[-1], args) if whole else None
    if found is not None:  # the Trainer knows the place, not the data
        common.restore(training, {**found["loader"], "epoch": 0, "served_batches": 0}, whole[-1])
    trainer.train(resume_from_checkpoint=None if found is None else str(whole[-1].parent))
    return 143 if epochs.stopped else 0


main = partial(common.main, common.parser("train_transformers", __doc__), train)

if __name__ == "__main__":
    sys.exit(main())
