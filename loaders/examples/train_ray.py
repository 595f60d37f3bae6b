"""Train a ResNet with Ray Train; a training that loses a worker goes on by itself.

    pip install 'precache[loaders]' 'ray[train]'
    python -m loaders.examples.train_ray data/shards --workers 4 --epochs 20

Ray's TorchTrainer starts the workers, here or on the cluster that RAY_ADDRESS names, and joins them by
torch.distributed, where a loader finds its rank. Every `--save-every` batches what a restart needs goes
into a checkpoint of Ray's: model, optimizer, and where the loader stands. `--resume` goes on with
a run that was ended. PATH and OUT have to be where all nodes see them.
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
    """What each of the processes that train does."""
    args = argparse.Namespace(**{**settings, "device": str(get_device())})
    ranks = train.get_context().get_world_size()
    # on its device, in a DistributedDataParallel
    training = Training(args, ranks, lambda net, *others: (prepare_model(net), *others))

    def save(figures: dict[str, float]) -> None:
        """Of all ranks at the same place, which is what the one checkpoint is of."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if common.is_first():
                torch.save(training.states(training.loader.state_dict()), Path(folder) / "checkpoint.pt")
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report(figures, checkpoint)  # waits for the other ranks

    def save_at_times() -> bool:
        if training.loader.state_dict()["served_batches"] % args.save_every == 0:
            save({})
        return False

    if (found := train.get_checkpoint()) is not None:
        with found.as_directory() as folder:
            path = Path(folder) / "checkpoint.pt"
            training.restore(torch.load(path, map_location="cpu"), path)
    for epoch in range(training.loader.state_dict()["epoch"], args.epochs):
        figures = training.learner.train(training.loader, save_at_times)
        if training.validation is not None:
            figures |= training.learner.validate(training.validation)
        save(figures)
        if common.is_first():
            common.report(epoch, figures)


def run(args: argparse.Namespace) -> int:
    """Have the workers train; the exit code."""
    for option, least in (("workers", 1), ("save_every", 1), ("failures", 0)):
        check_range(f"--{option.replace('_', '-')}", getattr(args, option), least)
    for option in ("path", "val"):  # workers have folders of their own
        if (given := getattr(args, option)) and not is_url(given):
            setattr(args, option, str(Path(given).resolve()))
    folder = args.out.resolve()
    if folder.exists() and not args.resume:
        raise SettingError(f"{args.out}: is there already; add --resume to go on, or give another --out")
    uses_gpu, args.device = args.device != "cpu", "cpu"  # workers find their own
    common.build_loaders(args, args.workers)  # what is wrong is said here, and not after each restart
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=vars(args),
        scaling_config=train.ScalingConfig(num_workers=args.workers, use_gpu=uses_gpu),
        run_config=train.RunConfig(
            name=folder.name,  # Ray goes on with the run of this name in this folder
            storage_path=str(folder.parent),
            failure_config=train.FailureConfig(max_failures=args.failures),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; the exit code."""
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
