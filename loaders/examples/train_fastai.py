"""Train a ResNet with fastai: its Learner and its one-cycle schedule, on our batches.

    pip install 'precache[loaders]' fastai
    python -m loaders.examples.train_fastai data/shards --epochs 5 --lr 0.003

`DataLoaders(training, validation)` takes our loaders as they are. Their batches come cropped, normalised
and on the device, so there is no transform of fastai's; `Learner.predict` of a single file needs those, and
is not there.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import fastai.callback.progress
import fastai.callback.schedule  # noqa: F401  (both add methods to Learner)
import torch
from fastai.basics import Callback, DataLoaders, L, Learner, accuracy, default_device

import loaders
from loaders.examples import checkpoints, common
from precache.errors import SettingError


class EachEpoch(Callback):  # type: ignore[misc]  # fastai has no types
    """Prints a line, in the place of fastai's table, and saves what a restart needs."""

    order = 60  # after the Recorder, which is 50

    def __init__(self, path: Path, name: str, training: loaders.Loader) -> None:
        self.path, self.model_name, self.loader, self.first = path, name, training, 0

    def go_on(self, states: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        checkpoints.restore(self.loader, states["loader"], self.path)
        self.model.load_state_dict(states["model"])
        self.learn.create_opt()
        self.opt.load_state_dict({"state": L(states["optimizer"]), "hypers": self.opt.hypers})
        self.first = states["loader"]["epoch"]

    def before_train(self) -> None:
        """Start the clock."""
        self.images, self.started_s = 0, time.perf_counter()

    def after_batch(self) -> None:
        """Count."""
        self.images += len(self.y) if self.training else 0

    def after_train(self) -> None:
        """Stop the clock."""
        self.images_per_s = self.images / (time.perf_counter() - self.started_s)

    def after_epoch(self) -> None:
        """Print and save."""
        if self.epoch < self.first:  # fastai passes by those that were trained before
            return
        loss, validation_loss, right = self.recorder.values[-1]
        # the other half of its state, learning rate and momentum, the schedule makes anew at each batch
        states = {"model": self.model.state_dict(), "optimizer": list(self.opt.state_dict()["state"])}
        checkpoints.save(self.path, states | {"name": self.model_name, "loader": self.loader.state_dict()})
        figures = {"loss": loss, "images_per_s": self.images_per_s}
        common.report(
            self.epoch, figures | {"validation_loss": validation_loss, "validation_accuracy": right}
        )


def train(args: argparse.Namespace) -> int:
    """Train, and save after each epoch."""
    path = args.out / "checkpoint.pt"
    found = checkpoints.read(path, args)
    device = str(default_device(args.device != "cpu"))  # where fastai puts the model
    training, validation = common.build_loaders(args, device=device)
    if validation is None:
        raise SettingError(f"{args.path}: fastai validates each epoch; give --val, or convert with --splits")
    with training, validation:
        learner = Learner(
            DataLoaders(training, validation),
            common.build_model(args, training).to(memory_format=torch.channels_last),
            loss_func=torch.nn.functional.cross_entropy,
            metrics=accuracy,
            cbs=[each_epoch := EachEpoch(path, args.model, training)],
        )
        if found is not None:
            each_epoch.go_on(found)
        if args.bf16:
            learner.to_bf16()
        with learner.no_logging(), learner.no_bar():
            learner.fit_one_cycle(args.epochs, args.lr, start_epoch=each_epoch.first)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; the exit code."""
    parser = common.parser("train_fastai", "Train a ResNet on a folder of pictures with fastai.")
    args = parser.parse_args(arguments)
    return common.run("train_fastai", lambda: train(args))


if __name__ == "__main__":
    sys.exit(main())
