"""Train a ResNet on a folder of pictures with plain PyTorch. Run it as it is, or copy it and change it.

    python -m loaders.examples.train data/shards --epochs 20
    torchrun --nproc-per-node 8 -m loaders.examples.train data/shards --epochs 90 --bf16 --compile --resume

SIGTERM saves and ends with exit code 143; the same command with --resume goes on with the batches left.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loaders.batch import Batch
from loaders.examples import common
from loaders.examples.models import build_model, build_optimizer, smoothed_cross_entropy
from loaders.settings import read_launcher

Scored: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The loss of a batch, and the model's scores: float [n, classes]."""


class Learner:
    """A model that learns from batches: forward, loss, backward, update, one learning rate for each step.

    Args:
        model: on the device where batches are served.
        schedule: sets the learning rate of `optimizer`, step by step.
        dtype: in which the model computes; bfloat16 and float16 where autocast holds them to be safe.
        compiled: whether torch.compile compiles the model, in the first step.
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
        # float16 gradients underflow without scaling; bfloat16 and float32 have range enough
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # all pictures have one size: the first step tunes cuDNN
        if compiled:
            model.compile()

    def step(self, batch: Any) -> Scored:
        """Learn from `images, labels = batch`."""
        loss, scores = self._forward(batch)
        self.optimizer.zero_grad()
        self.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss, scores

    @torch.no_grad()
    def predict(self, batch: Any) -> Scored:
        """Try the model on `images, labels = batch`."""
        return self._forward(batch)

    def _forward(self, batch: Any) -> Scored:
        images, labels = batch
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            scores = self.model(images)
            return smoothed_cross_entropy(scores, labels), scores

    def train(self, batches: Iterable[Batch], ends: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Learn from batches until `ends` says so after one of them; loss, accuracy and images/s."""
        self.model.train()
        started = time.perf_counter()
        figures, samples = self._run(self.step, batches, ends)
        if not samples:
            return {}
        return {**figures, "images_per_s": samples / (time.perf_counter() - started)}

    def validate(
        self, batches: Iterable[Batch], ends: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Try the model on batches, as `train` takes them; loss and accuracy."""
        self.model.eval()
        figures, _ = self._run(self.predict, batches, ends)
        return {f"validation_{name}": figure for name, figure in figures.items()}

    def _run(
        self, score: Callable[[Batch], Scored], batches: Iterable[Batch], ends: Callable[[], bool]
    ) -> tuple[dict[str, float], float]:
        """Means over the samples of all ranks, and how many they are."""
        sums = torch.zeros(3, device=self.device)
        for batch in batches:
            loss, scores = score(batch)
            real = ~batch.padding.to(self.device, non_blocking=True)
            right = (scores.argmax(1) == batch.labels) & real
            sums += torch.stack([loss.detach() * real.sum(), right.sum(), real.sum()])
            if ends():
                break
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss_sum, right_sum, samples = sums.tolist()  # waits for the GPU
        if not samples:  # all of it was served before the resume
            return {}, 0
        return {"loss": loss_sum / samples, "accuracy": right_sum / samples}, samples

    def state_dict(self) -> dict[str, Any]:
        """What the rest of a training depends on."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Go on where `states` were taken."""
        for name, part in self._parts().items():
            part.load_state_dict(states[name])

    def _parts(self) -> dict[str, Any]:
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        parts = {"model": model, "optimizer": self.optimizer}
        return {**parts, "schedule": self.schedule, "scaler": self.scaler}


class Training:
    """What one rank trains: a model on a loader, from checkpoint to checkpoint.

    Args:
        ranks: that share a batch.
        prepare: gets the model, the optimizer and the loader; returns what takes their places.
        backward: computes the gradients of a loss.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        ranks: int,
        prepare: Callable[..., tuple[Any, ...]],
        backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    ) -> None:
        self.args = args
        loader, self.validation = common.build_loaders(args, ranks)
        net = build_model(args.model, len(loader.classes), args.seed).to(args.device)
        optimizer, schedule = build_optimizer(args.model, net, args.epochs * len(loader), args.lr)
        model, optimizer, self.loader = prepare(net, optimizer, loader)
        self.learner = Learner(
            model,
            optimizer,
            schedule,
            dtype=torch.bfloat16 if args.bf16 else torch.float32,
            compiled=args.compile,
            backward=backward,
        )

    def states(self, of_loader: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds."""
        told = {"name": self.args.model, "classes": self.loader.classes, "loader": of_loader}
        return {**self.learner.state_dict(), **told}

    def restore(self, states: dict[str, Any], path: Path) -> None:
        """Go on where `states`, read from `path`, were taken."""
        common.restore(self.loader, states["loader"], path)
        self.learner.load_state_dict(states)

    def fit(self, sigterm: common.Sigterm) -> int:
        """Train for the epochs that are left; 143 where SIGTERM ended it, and what was done is saved."""
        args, path, first = self.args, self.args.out / "checkpoint.pt", common.is_first()
        found = [common.read_checkpoint(path, args) if first else None]
        if dist.is_initialized():  # the first rank's disk may be the only one
            dist.broadcast_object_list(found, device=torch.device("cpu"))
        if found[0] is not None:
            self.restore(found[0], path)
        state = self.loader.state_dict()

        def ends() -> bool:
            nonlocal state
            state = self.loader.state_dict()  # this batch counts as served
            return sigterm.came()

        for epoch in range(state["epoch"], args.epochs):
            figures = self.learner.train(self.loader, ends)
            if first and figures:  # before the validation: who is ended there need not train again
                common.save_checkpoint(path, self.states(state))
            if self.validation is not None and not sigterm.came():
                figures |= self.learner.validate(self.validation, sigterm.came)
            if sigterm.came():
                return 143
            if first:
                common.report(epoch, figures, args.out if args.tensorboard else None)
        return 0


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """The exit code."""
    if args.device == "cuda":
        args.device = f"cuda:{read_launcher('LOCAL_RANK', 0, least=0)}"
    if read_launcher("RANK", -1, least=0) >= 0:  # by torchrun
        dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl")
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def prepare(net: torch.nn.Module, *others: Any) -> tuple[Any, ...]:
        return DistributedDataParallel(net) if ranks > 1 else net, *others

    return Training(args, ranks, prepare).fit(sigterm)


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; the exit code."""
    parser = common.parser("train", __doc__)
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--tensorboard", action="store_true", help="write what is printed to OUT, too")
    return common.main(parser, train, arguments)


if __name__ == "__main__":
    sys.exit(main())
