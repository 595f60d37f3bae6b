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

Step: TypeAlias = Callable[[torch.Tensor, dict[str, Any]], None]
"""Of the loss of a batch, and the state of the loader behind it."""


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
        step: what to do with the loss of each batch; None: it is validation.
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
            step(loss, state)
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
    speed = samples / (time.perf_counter() - started)
    return {"loss": loss_sum / samples, "accuracy": right_sum / samples, "images_per_s": speed}, state


def make_step(optimizer: torch.optim.Optimizer, args: argparse.Namespace, batches: int) -> Step:
    """What `run_epoch` does with the loss of each of the `batches` of an epoch, to train."""

    def step(loss: torch.Tensor, state: dict[str, Any]) -> None:
        number = state["epoch"] * batches + state["served_batches"] - 1
        optimizer.param_groups[0]["lr"] = args.lr * common.rate(number, args.epochs * batches)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """The exit code: 143 where SIGTERM ended it, and what was done is saved."""
    training, validation = common.build_loaders(args, dist.get_world_size())
    net = common.build_model(args, training).to(args.device, memory_format=torch.channels_last)
    model = torch.nn.parallel.DistributedDataParallel(net) if dist.get_world_size() > 1 else net
    if args.compile:
        model.compile()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    step = make_step(optimizer, args, len(training))
    path, first = args.out / "checkpoint.pt", dist.get_rank() == 0
    found = [common.read_checkpoint(path, args) if first else None]
    dist.broadcast_object_list(found, device=torch.device("cpu"))  # the first rank's disk may be the only one
    if found[0] is not None:
        common.restore(training, found[0]["loader"], path)
        net.load_state_dict(found[0]["model"])
        optimizer.load_state_dict(found[0]["optimizer"])
    with training, validation or nullcontext():
        for epoch in range(training.state_dict()["epoch"], args.epochs):
            figures, state = run_epoch(model, training, args, sigterm.came, step)
            if first and figures:  # before the validation: who is ended there need not train again
                weights = {"name": args.model, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
                common.save_checkpoint(path, weights | {"loader": state, "classes": training.classes})
            if validation is not None and not sigterm.came():
                validated, _ = run_epoch(model, validation, args, sigterm.came)
                figures |= {f"validation_{name}": validated[name] for name in ("loss", "accuracy")}
            if sigterm.came():
                return 143
            if first:
                common.report(epoch, figures, args.out if args.tensorboard else None)
    return 0


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
