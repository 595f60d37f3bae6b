"""Train a ResNet on a folder of pictures with Accelerate (`pip install accelerate`).

    python -m loaders.examples.train_accelerate data/shards --epochs 20
    accelerate launch -m loaders.examples.train_accelerate data/shards --epochs 90 --bf16 --resume

SIGTERM saves and ends with exit code 143; the same command with --resume goes on with the batches left.
"""

import argparse
import sys

import torch
from accelerate import Accelerator

from loaders.examples import common
from loaders.examples.train import fit, make_step


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """The exit code."""
    accelerator = Accelerator(cpu=args.device == "cpu", mixed_precision="bf16" if args.bf16 else "no")
    args.device = str(accelerator.device)
    # built when the processes have found each other; they share its epochs, and it serves on their devices
    training, validation = common.build_loaders(args, accelerator.num_processes)
    net = common.build_model(args, training).to(memory_format=torch.channels_last)
    optimizer, schedule = common.build_optimizer(net, args, len(training))
    model, optimizer, training = accelerator.prepare(net, optimizer, training)
    parts = {"model": net, "optimizer": optimizer, "schedule": schedule}
    path = args.out / "checkpoint.pt"
    common.restore(common.read_checkpoint(path, args), path, training, parts)
    step, first = make_step(optimizer, schedule, accelerator.backward), accelerator.is_main_process
    return fit(model, (training, validation), parts, step, args, sigterm, first=first)


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; the exit code."""
    return common.main("train_accelerate", "Train a ResNet with Accelerate.", train, arguments)


if __name__ == "__main__":
    sys.exit(main())
