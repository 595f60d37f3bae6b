"""Train a ResNet on a folder of pictures with Accelerate (`pip install accelerate`).

    python -m loaders.examples.train_accelerate data/shards --epochs 20
    accelerate launch -m loaders.examples.train_accelerate data/shards --epochs 90 --bf16 --resume

SIGTERM saves and ends with exit code 143; the same command with --resume goes on with the batches left.
"""

import argparse
import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from loaders.examples import common
from loaders.examples.train import run_epoch


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """The exit code: 143 where SIGTERM ended it, and what was done is saved."""
    accelerator = Accelerator(cpu=args.device == "cpu", mixed_precision="bf16" if args.bf16 else "no")
    args.device = str(accelerator.device)
    # built when the processes have found each other; they share its epochs, and it serves on their devices
    training, validation = common.build_loaders(args, accelerator.num_processes)
    net = common.build_model(args, training).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    model, optimizer, training = accelerator.prepare(net, optimizer, training)
    schedule = LambdaLR(optimizer.optimizer, lambda step: common.rate(step, args.epochs * len(training)))
    path, parts = args.out / "checkpoint.pt", {"model": net, "optimizer": optimizer, "schedule": schedule}
    if (found := common.read_checkpoint(path, args)) is not None:
        common.restore(training, found["loader"], path)
        for name, part in parts.items():
            part.load_state_dict(found[name])

    def step(loss: torch.Tensor, state: dict[str, Any]) -> None:
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    for epoch in range(training.state_dict()["epoch"], args.epochs):
        figures, state = run_epoch(model, training, args, sigterm.came, step)
        if figures and accelerator.is_main_process:  # before the validation: who is ended there is saved
            states = {name: part.state_dict() for name, part in parts.items()}
            common.save_checkpoint(path, states | {"name": args.model, "loader": state})
        if validation is not None and not sigterm.came():
            validated, _ = run_epoch(model, validation, args, sigterm.came)
            figures |= {f"validation_{name}": validated[name] for name in ("loss", "accuracy")}
        if sigterm.came():
            return 143
        if accelerator.is_main_process:
            common.report(epoch, figures)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; the exit code."""
    parser = common.parser("train_accelerate", "Train a ResNet on a folder of pictures with Accelerate.")
    args = parser.parse_args(arguments)
    with common.Sigterm() as sigterm:
        return common.run("train_accelerate", lambda: train(args, sigterm))


if __name__ == "__main__":
    sys.exit(main())
