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
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader

import loaders
from loaders.examples import common

_FOLDER = "hugging-face"
"""In OUT; the Trainer removes all but its last folders there. One is whole when it has `loader.pt`."""


class Classifier(torch.nn.Module):
    """As the models of transformers: it gives the loss where it gets the labels."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, and the logits [batch, classes]."""
        logits = self.net(pixel_values)
        return {"loss": cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits}


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Takes our loaders for its DataLoaders: they share epochs among processes by themselves."""

    def get_train_dataloader(self) -> Any:
        """It is told the epoch, and skips batches without reading them."""
        return self.training

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """With the names that the evaluation looks for, and of several ranks the same number of samples."""
        loader: Any = self.validation
        names = partial(_named, size=loader.batch_size if self.args.world_size > 1 else 0)
        return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=names)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(_named(inputs) if isinstance(inputs, loaders.Batch) else inputs)


def _named(batch: Any, size: int = 0) -> dict[str, torch.Tensor]:
    """Filled up to `size` with black pictures labelled -100, which do not count."""
    more = max(0, size - len(batch.labels))
    labels = batch.labels.masked_fill(batch.padding.to(batch.labels.device), -100)
    labels = pad(labels, (0, more), value=-100)
    return {"pixel_values": pad(batch.images, (0, 0) * 3 + (0, more)), "labels": labels}


def _figures(of: Any) -> dict[str, float]:
    """Over all samples that count; the Trainer's own loss is the mean of batches, however large each is."""
    logits, labels = torch.from_numpy(of.predictions), torch.from_numpy(of.label_ids)
    right = (logits.argmax(1) == labels).sum() / (labels >= 0).sum()
    return {"loss": float(cross_entropy(logits, labels, label_smoothing=0.1)), "accuracy": float(right)}


class Epochs(transformers.TrainerCallback):  # type: ignore[misc]
    """Reports each epoch, ends it at SIGTERM, and finishes what the Trainer has saved."""

    def __init__(self, args: argparse.Namespace, trainer: Trainer, sigterm: common.Sigterm) -> None:
        self.args, self.trainer, self.sigterm = args, trainer, sigterm
        self.served, self.started, self.stopped = 0, 0.0, False

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.served, self.started = 0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After this batch it is saved and ended."""
        self.served += self.args.batch_size
        if self.sigterm.came():
            control.should_save = control.should_training_stop = self.stopped = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Also called of an epoch that was ended within."""
        self.figures = {"images_per_s": self.served / (time.perf_counter() - self.started)}
        if self.stopped:
            control.should_log = control.should_evaluate = control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Of the training, then of the validation."""
        names = {"loss": "loss", "eval_loss": "validation_loss", "eval_accuracy": "validation_accuracy"}
        self.figures |= {names[name]: value for name, value in logs.items() if name in names}
        last = "loss" if self.trainer.validation is None else "eval_accuracy"
        if last in logs and state.is_world_process_zero:
            common.report(round(state.epoch) - 1, self.figures)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the validation, if there is one."""
        self.trainer.accelerator.wait_for_everyone()  # each rank has written its part
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}/loader.pt"
            common.save_checkpoint(
                path, {"name": self.args.model, "loader": self.trainer.training.state_dict()}
            )
        if self.sigterm.came():
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
        label_names=["labels"],
        disable_tqdm=True,
    )
    training, validation = common.build_loaders(args, settings.world_size, str(settings.device))
    net = common.build_model(args, training)
    settings.eval_strategy = "no" if validation is None else "epoch"
    trainer = Trainer(
        model=Classifier(net),
        args=settings,
        train_dataset=training.dataset,
        eval_dataset=None if validation is None else validation.dataset,
        optimizers=common.build_optimizer(net, args, len(training)),
        compute_metrics=_figures,
    )
    trainer.training, trainer.validation = training, validation
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(epochs := Epochs(args, trainer, sigterm))
    whole = sorted(args.out.glob(f"{_FOLDER}/checkpoint-*/loader.pt"), key=os.path.getmtime)
    found = common.read_checkpoint(whole[-1], args) if whole else None
    if found is not None:  # the Trainer knows the place, not the data
        begin = {"loader": {**found["loader"], "epoch": 0, "served_batches": 0}}
        common.restore(begin, whole[-1], training, {})
    trainer.train(resume_from_checkpoint=None if found is None else str(whole[-1].parent))
    return 143 if epochs.stopped else 0


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; the exit code."""
    return common.main("train_transformers", "Train with Hugging Face's Trainer.", train, arguments)


if __name__ == "__main__":
    sys.exit(main())
