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

import fastai.callback.progress
import fastai.callback.schedule  # noqa: F401  (both add methods to Learner)
import torch
from fastai.basics import Callback, DataLoaders, Learner, accuracy, default_device

from loaders.examples import common
from precache.errors import SettingError


class PrintEpoch(Callback):  # type: ignore[misc]  # fastai has no types
    """One line an epoch, as the other examples print it, in the place of fastai's table."""

    order = 60  # after the Recorder, which is 50

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
        """Print."""
        loss, validation_loss, right = self.recorder.values[-1]
        figures = {"loss": loss, "images_per_s": self.images_per_s}
        common.report(
            self.epoch, figures | {"validation_loss": validation_loss, "validation_accuracy": right}
        )


def train(args: argparse.Namespace) -> int:
    """Train, and save what `Learner.load` reads to OUT."""
    device = str(default_device(args.device != "cpu"))  # where fastai puts the model
    training, validation = common.build_loaders(args, device=device, last="drop")
    if validation is None:
        raise SettingError(
            "fastai's Learner validates after each epoch; give --val, or convert with --splits"
        )
    with training, validation:
        model = common.build_model(args, training).to(memory_format=torch.channels_last)
        learner = Learner(
            DataLoaders(training, validation),
            model,
            loss_func=torch.nn.functional.cross_entropy,
            metrics=accuracy,
            cbs=[PrintEpoch()],
            path=args.out,
            model_dir=".",
        )
        if args.bf16:
            learner.to_bf16()
        with learner.no_logging(), learner.no_bar():
            learner.fit_one_cycle(args.epochs, args.lr)
        learner.save("model")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; the exit code."""
    parser = common.parser("train_fastai", "Train a ResNet on a folder of pictures with fastai.")
    args = parser.parse_args(arguments)
    return common.run("train_fastai", lambda: train(args))


if __name__ == "__main__":
    sys.exit(main())
