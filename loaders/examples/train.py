"""Train a ResNet on a folder of pictures with plain PyTorch. Run it as it is, or copy it and change it.

    python -m loaders.examples.train data/shards --epochs 20
    torchrun --nproc-per-node 8 -m loaders.examples.train data/shards --epochs 90 --bf16 --compile --resume

SIGTERM saves and ends with exit code 143; the same command with --resume goes on with the batches left.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import loaders
from loaders.examples import common

Step: TypeAlias = Callable[[torch.Tensor], object]
"""Learns from the loss of a batch."""


def run_epoch(
    model: torch.nn.Module,
    loader: loaders.Loader,
    args: argparse.Namespace,
    ends: Callable[[], bool],
    step: Step | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Train on what is left of an epoch, or validate; its figures, and the state of `loader` at its end.

    Args:
        ends: asked behind each batch whether to end there.
        step: None: it is validation.
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


def make_step(optimizer: Any, schedule: Any, backward: Step = torch.Tensor.backward) -> Step:
    """How `optimizer` learns, at the rate that `schedule` sets."""

    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        schedule.step()

    return step


def fit(
    model: torch.nn.Module,
    both: tuple[loaders.Loader, loaders.Loader | None],
    parts: dict[str, Any],
    step: Step,
    args: argparse.Namespace,
    sigterm: common.Sigterm,
    *,
    first: bool,
) -> int:
    """Train for the epochs that are left; 143 where SIGTERM ended it, and what was done is saved.

    Args:
        both: the loaders of training and of validation.
        parts: what is saved beside the state of the loader, by name.
        step: as of `run_epoch`.
        first: whether this rank saves and reports.
    """
    training, validation = both
    for epoch in range(training.state_dict()["epoch"], args.epochs):
        figures, state = run_epoch(model, training, args, sigterm.came, step)
        if first and figures:  # before the validation: who is ended there need not train again
            states = {name: part.state_dict() for name, part in parts.items()}
            more = {"name": args.model, "loader": state, "classes": training.classes}
            common.save_checkpoint(args.out / "checkpoint.pt", states | more)
        if validation is not None and not sigterm.came():
            figures |= run_epoch(model, validation, args, sigterm.came)[0]
        if sigterm.came():
            return 143
        if first:
            common.report(epoch, figures, args.out if getattr(args, "tensorboard", False) else None)
    return 0


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """The exit code."""
    training, validation = common.build_loaders(args, dist.get_world_size())
    net = common.build_model(args, training).to(args.device, memory_format=torch.channels_last)
    model = torch.nn.parallel.DistributedDataParallel(net) if dist.get_world_size() > 1 else net
    if args.compile:
        model.compile()
    optimizer, schedule = common.build_optimizer(net, args, len(training))
    parts, first = {"model": net, "optimizer": optimizer, "schedule": schedule}, dist.get_rank() == 0
    path = args.out / "checkpoint.pt"
    found = [common.read_checkpoint(path, args) if first else None]
    dist.broadcast_object_list(found, device=torch.device("cpu"))  # the first rank's disk may be the only one
    common.restore(found[0], path, training, parts)
    step = make_step(optimizer, schedule)
    with training, validation or nullcontext():
        return fit(model, (training, validation), parts, step, args, sigterm, first=first)


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; the exit code."""
    parser = common.parser("train", "Train a ResNet on a folder of pictures with plain PyTorch.")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--tensorboard", action="store_true", help="write what is printed to OUT, too")
    args = parser.parse_args(arguments)
    if args.device == "cuda":
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    backend = "gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:  # by torchrun
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    with common.Sigterm() as sigterm:
        return common.run("train", lambda: train(args, sigterm))


if __name__ == "__main__":
    sys.exit(main())
