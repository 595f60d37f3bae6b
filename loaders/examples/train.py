"""Train a ResNet on a folder of pictures with plain PyTorch. Run it as it is, or copy it and change it.

    python -m loaders.examples.train data/shards --epochs 20
    torchrun --nproc-per-node 8 -m loaders.examples.train data/shards --epochs 90 --bf16 --compile --resume

SIGTERM saves and ends with exit code 143; the same command with --resume goes on with the batches left.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loaders import Batch
from loaders.examples import common
from loaders.examples.models import build_model, build_optimizer, smoothed_cross_entropy
from precache import SettingError

LossAndScores: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Loss of a batch, a scalar, and the model's scores, float [n, classes]."""


class Learner:
    """A model that is trained on batches: forward, loss, backward, update, one learning rate for each step.

    Args:
        model: the model, on the device where batches are served.
        optimizer: its optimizer.
        schedule: sets the optimizer's learning rate after each step.
        dtype: type to compute in; bfloat16 and float16 only where autocast considers them safe.
        compiled: compile the model with torch.compile, in the first step.
        backward: computes the gradients of a loss.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        *,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    ) -> None:
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.dtype, self.backward = dtype, backward
        self.device = next(model.parameters()).device
        # Gradients in float16 underflow unless they are scaled; bfloat16 and float32 have a larger range.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # pays off, because all batches have one shape
        if compiled:
            model.compile()

    def step(self, batch: Any) -> LossAndScores:
        """Train on `images, labels = batch`."""
        loss, scores = self._forward(batch)
        self.optimizer.zero_grad()
        self.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss, scores

    @torch.no_grad()
    def predict(self, batch: Any) -> LossAndScores:
        """Evaluate the model on `images, labels = batch`, without gradients."""
        return self._forward(batch)

    def _forward(self, batch: Any) -> LossAndScores:
        images, labels = batch
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            scores = self.model(images)
            return smoothed_cross_entropy(scores, labels), scores

    def train(
        self, batches: Iterable[Batch], should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Train on batches, at most until `should_stop()` is true after one; return their figures.

        Returns:
            loss, accuracy and images_per_s, over all ranks; empty if there were no batches.
        """
        self.model.train()
        started = time.perf_counter()
        figures, samples = self._run(self.step, batches, should_stop)
        if not samples:
            return {}
        return {**figures, "images_per_s": samples / (time.perf_counter() - started)}

    def validate(
        self, batches: Iterable[Batch], should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Evaluate the model on batches, at most until `should_stop()` is true after one.

        Returns:
            validation_loss and validation_accuracy, over all ranks.
        """
        self.model.eval()
        figures, _ = self._run(self.predict, batches, should_stop)
        return {f"validation_{name}": figure for name, figure in figures.items()}

    def _run(
        self,
        process: Callable[[Batch], LossAndScores],
        batches: Iterable[Batch],
        should_stop: Callable[[], bool],
    ) -> tuple[dict[str, float], float]:
        """Process batches; return mean loss and accuracy over the samples of all ranks, and their count.

        Samples that fill a batch up count neither for the accuracy nor for the count. They are part of the
        mean loss of their batch, which counts as often as the batch has other samples.
        """
        sums = torch.zeros(3, device=self.device)
        for batch in batches:
            loss, scores = process(batch)
            is_real = ~batch.padding.to(self.device, non_blocking=True)
            # of mixed pictures the class that has the larger part counts
            classes = batch.labels.argmax(1) if batch.labels.ndim == 2 else batch.labels
            is_correct = (scores.argmax(1) == classes) & is_real
            sums += torch.stack([loss.detach() * is_real.sum(), is_correct.sum(), is_real.sum()])
            if should_stop():
                break
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss_sum, correct, samples = sums.tolist()  # waits for the GPU
        if not samples:  # resumed at the end of an epoch: no batch is left
            return {}, 0
        return {"loss": loss_sum / samples, "accuracy": correct / samples}, samples

    def state_dict(self) -> dict[str, Any]:
        """State of model, optimizer, schedule and gradient scaler."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore what `state_dict` has returned."""
        for name, part in self._parts().items():
            part.load_state_dict(states[name])

    def _parts(self) -> dict[str, Any]:
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return {
            "model": model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }


def fit(
    args: argparse.Namespace,
    ranks: int,
    sigterm: common.Sigterm,
    prepare: Callable[..., tuple[Any, ...]],
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> int:
    """Train one rank for the remaining epochs; return the exit code, 143 if SIGTERM ended it, after saving.

    Args:
        args: options of `make_parser`.
        ranks: number of processes; each trains on its share of every batch of `args.batch_size`.
        prepare: takes model, optimizer and loader, and returns them wrapped for distributed training.
        backward: computes the gradients of a loss.
    """
    loader, validation = common.build_loaders(args, ranks)
    net = build_model(args.model, len(loader.classes), args.seed).to(args.device)
    optimizer, schedule = build_optimizer(args.model, net, args.epochs * len(loader), args.lr)
    model, optimizer, loader = prepare(net, optimizer, loader)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    learner = Learner(model, optimizer, schedule, dtype=dtype, compiled=args.compile, backward=backward)

    path = args.out / "checkpoint.pt"
    is_first = common.is_first_rank()
    checkpoint = common.read_checkpoint(path, args) if is_first else None
    if dist.is_initialized():  # only the first rank's machine may have the file
        objects = [checkpoint]
        dist.broadcast_object_list(objects, device=torch.device("cpu"))
        checkpoint = objects[0]
    if checkpoint is not None:
        try:
            loader.load_state_dict(checkpoint["loader"])
        except SettingError as error:
            raise SettingError(f"{error}, or give another --out", path=path) from None
        learner.load_state_dict(checkpoint)
    loader_state = loader.state_dict()

    def should_stop() -> bool:
        nonlocal loader_state
        loader_state = loader.state_dict()  # counts the batch that was just trained on
        return sigterm.is_set()

    for epoch in range(loader_state["epoch"], args.epochs):
        figures = learner.train(loader, should_stop)
        if is_first and figures:  # before the validation, which a SIGTERM may end
            content = {"name": args.model, "classes": loader.classes, "loader": loader_state}
            common.save_checkpoint(path, {**learner.state_dict(), **content})
        if validation is not None and not sigterm.is_set():
            figures |= learner.validate(validation, sigterm.is_set)
        if sigterm.is_set():
            return 143
        if is_first:
            common.report(epoch, figures, args.out if args.tensorboard else None)
    return 0


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """Train on this process's device, with the other ranks that torchrun started; return the exit code."""
    if args.device == "cuda":
        args.device = f"cuda:{common.read_launcher('LOCAL_RANK', 0, minimum=0)}"
    if common.read_launcher("RANK", -1, minimum=0) >= 0:  # started by torchrun
        dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl")
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def prepare(model: torch.nn.Module, optimizer: Any, loader: Any) -> tuple[Any, ...]:
        if ranks > 1:
            model = DistributedDataParallel(model)
        return model, optimizer, loader

    return fit(args, ranks, sigterm, prepare)


def make_parser(name: str, docstring: str) -> argparse.ArgumentParser:
    """Make a parser with the options of `common.parser` and those of `fit`."""
    parser = common.parser(name, docstring)
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--tensorboard", action="store_true", help="write what is printed to OUT, too")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; return the exit code."""
    return common.main(make_parser("train", __doc__), train, arguments)


if __name__ == "__main__":
    sys.exit(main())
