"""Train a ResNet on a folder of pictures with plain PyTorch. Run it as it is, or copy it and change it.

    python -m loaders.examples.train data/shards --epochs 20
    torchrun --nproc-per-node 8 -m loaders.examples.train data/shards --epochs 90 --bf16 --compile --resume

SIGTERM saves and ends with exit code 143; the same command with --resume goes on with the batches left.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import loaders
from loaders.examples import common
from loaders.settings import read_launcher

Step: TypeAlias = Callable[[torch.Tensor], object]
"""Learns from the loss of a batch."""


def run_epoch(
    model: torch.nn.Module,
    loader: loaders.Loader,
    args: argparse.Namespace,
    ends: Callable[[], bool],
    step: Step | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Train on what is left of an epoch, or validate, without a `step`, until `ends` says so behind a batch.

    Returns:
        Its figures, and the state of `loader` at its end.
    """
    model.train(step is not None)
    sums, state, started = torch.zeros(3, device=args.device), loader.state_dict(), time.perf_counter()
    for batch in loader:
        state = loader.state_dict()  # this batch counts as served
        amp = torch.autocast(batch.images.device.type, torch.bfloat16, enabled=args.bf16)
        with amp, torch.set_grad_enabled(step is not None):
            logits = model(batch.images)
            loss = cross_entropy(logits, batch.labels, label_smoothing=0.1)
        if step is not None:
            step(loss)
        real = ~batch.padding.to(args.device, non_blocking=True)
        right = (logits.argmax(1) == batch.labels) & real
        sums += torch.stack([loss.detach() * real.sum(), right.sum(), real.sum()])
        if ends():
            break
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss_sum, right_sum, samples = sums.tolist()
    if not samples:  # all of it was served before the resume
        return {}, state
    figures = {"loss": loss_sum / samples, "accuracy": right_sum / samples}
    if step is None:
        return {f"validation_{name}": figure for name, figure in figures.items()}, state
    return figures | {"images_per_s": samples / (time.perf_counter() - started)}, state


class Training:
    """What one rank trains: a model on a loader, and what its optimizer and schedule need to go on.

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
        backward: Step = torch.Tensor.backward,
    ) -> None:
        self.args, self.backward = args, backward
        loader, self.validation = common.build_loaders(args, ranks)
        net = common.build_model(args, loader).to(args.device)
        optimizer, schedule = common.build_optimizer(net, args, len(loader))
        self.model, self.optimizer, self.loader = prepare(net, optimizer, loader)
        self.parts: dict[str, Any] = {"model": net, "optimizer": self.optimizer, "schedule": schedule}

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.backward(loss)
        self.optimizer.step()
        self.parts["schedule"].step()

    def states(self, of_loader: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds."""
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {**parts, "name": self.args.model, "loader": of_loader, "classes": self.loader.classes}

    def restore(self, states: dict[str, Any], path: Path) -> None:
        """Go on where `states`, read from `path`, were taken."""
        common.restore(self.loader, states["loader"], path)
        for name, part in self.parts.items():
            part.load_state_dict(states[name])

    def fit(self, sigterm: common.Sigterm) -> int:
        """Train for the epochs that are left; 143 where SIGTERM ended it, and what was done is saved."""
        args, path, first = self.args, self.args.out / "checkpoint.pt", common.is_first()
        found = [common.read_checkpoint(path, args) if first else None]
        if dist.is_initialized():  # the first rank's disk may be the only one
            dist.broadcast_object_list(found, device=torch.device("cpu"))
        if found[0] is not None:
            self.restore(found[0], path)
        for epoch in range(self.loader.state_dict()["epoch"], args.epochs):
            figures, state = run_epoch(self.model, self.loader, args, sigterm.came, self.step)
            if first and figures:  # before the validation: who is ended there need not train again
                common.save_checkpoint(path, self.states(state))
            if self.validation is not None and not sigterm.came():
                figures |= run_epoch(self.model, self.validation, args, sigterm.came)[0]
            if sigterm.came():
                return 143
            if first:
                common.report(epoch, figures, args.out if getattr(args, "tensorboard", False) else None)
        return 0


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """The exit code."""
    if args.device == "cuda":
        args.device = f"cuda:{read_launcher('LOCAL_RANK', 0, least=0)}"
    if read_launcher("RANK", -1, least=0) >= 0:  # by torchrun
        dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl")
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def prepare(net: torch.nn.Module, *others: Any) -> tuple[Any, ...]:
        return torch.nn.parallel.DistributedDataParallel(net) if ranks > 1 else net, *others

    training = Training(args, ranks, prepare)
    if args.compile:
        training.model.compile()
    return training.fit(sigterm)


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; the exit code."""
    parser = common.parser("train", __doc__)
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--tensorboard", action="store_true", help="write what is printed to OUT, too")
    return common.main(parser, train, arguments)


if __name__ == "__main__":
    sys.exit(main())
