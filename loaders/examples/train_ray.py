"""Train a ResNet with Ray Train; a training that loses a worker goes on by itself.

    pip install 'precache[loaders]' 'ray[train]'
    python -m loaders.examples.train_ray data/shards --workers 4 --epochs 20

Ray's TorchTrainer starts the workers, here or on the cluster that RAY_ADDRESS names, and connects them with
torch.distributed, which tells each loader its rank. Every `--save-every` batches a checkpoint of Ray's gets
what a restart needs: model, optimizer, and position of the loader. `--resume` continues a run that was ended.
All nodes must see PATH and OUT.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train.torch import TorchTrainer, get_device, prepare_model

from loaders.examples import common
from loaders.examples.train import Training
from precache.errors import SettingError, check_range
from precache.storage.urls import is_url


def train_worker(settings: dict[str, Any]) -> None:
    """Train in one worker; `settings` are the command line's options."""
    args = argparse.Namespace(**{**settings, "device": str(get_device())})
    ranks = train.get_context().get_world_size()

    def prepare(model: torch.nn.Module, optimizer: Any, loader: Any) -> tuple[Any, ...]:
        return prepare_model(model), optimizer, loader  # on its device, in a DistributedDataParallel

    training = Training(args, ranks, prepare)

    def save(figures: dict[str, float]) -> None:
        """Save a checkpoint and report figures; all ranks call this after the same batch."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if common.is_first_rank():
                content = training.checkpoint(training.loader.state_dict())
                torch.save(content, Path(folder) / "checkpoint.pt")
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report(figures, checkpoint)  # waits for the other ranks

    def save_regularly() -> bool:
        """Save every `--save-every` batches; False, since the training never stops early."""
        if training.loader.state_dict()["served_batches"] % args.save_every == 0:
            save({})
        return False

    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            path = Path(folder) / "checkpoint.pt"
            training.restore(torch.load(path, map_location="cpu"), path)
    for epoch in range(training.loader.state_dict()["epoch"], args.epochs):
        figures = training.learner.train(training.loader, save_regularly)
        if training.validation is not None:
            figures |= training.learner.validate(training.validation)
        save(figures)
        if common.is_first_rank():
            common.report(epoch, figures)


def run(args: argparse.Namespace) -> int:
    """Start the workers and wait for them; return the exit code."""
    check_range("--workers", args.workers, 1)
    check_range("--save-every", args.save_every, 1)
    check_range("--failures", args.failures, 0)
    # Absolute, because each worker has a working folder of its own.
    if args.path and not is_url(args.path):
        args.path = str(Path(args.path).resolve())
    if args.val and not is_url(args.val):
        args.val = str(Path(args.val).resolve())
    folder = args.out.resolve()
    if folder.exists() and not args.resume:
        raise SettingError(
            "is there already", path=args.out, remedy="add --resume to go on, or give another --out"
        )
    use_gpu = args.device != "cpu"
    args.device = "cpu"  # each worker chooses its own
    common.build_loaders(args, args.workers)  # raises bad input once, here, and not in each worker
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=vars(args),
        scaling_config=train.ScalingConfig(num_workers=args.workers, use_gpu=use_gpu),
        run_config=train.RunConfig(
            name=folder.name,  # Ray continues the run of this name in this folder
            storage_path=str(folder.parent),
            failure_config=train.FailureConfig(max_failures=args.failures),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; return the exit code."""
    parser = common.parser("train_ray", __doc__)
    add = parser.add_argument
    add("--workers", type=int, default=2, help="processes; with --device cuda each has a GPU (default: 2)")
    add("--save-every", type=int, default=100, help="batches from one checkpoint to the next (default: 100)")
    add(
        "--failures", type=int, default=3, help="how often a training that lost a worker goes on (default: 3)"
    )
    args = parser.parse_args(arguments)
    return common.run("train_ray", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
