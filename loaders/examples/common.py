"""Parts that the examples share: command line, loaders, checkpoints, reports, SIGTERM and errors.

Options are parsed with argparse, which most training scripts use.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import loaders
from loaders.device import find_device
from loaders.examples.models import MODELS, check_size
from precache.engines.cpus import read_launcher
from precache.errors import PrecacheError, SettingError, check_range, os_reason

__all__ = [
    "Sigterm",
    "build_loaders",
    "is_first_rank",
    "main",
    "parser",
    "read_checkpoint",
    "read_launcher",
    "report",
    "run",
    "save_checkpoint",
]


def main(
    parser: argparse.ArgumentParser,
    train: Callable[[argparse.Namespace, "Sigterm"], int],
    arguments: list[str] | None = None,
) -> int:
    """Parse the command line, call `train(args, sigterm)`, and return its exit code."""
    args = parser.parse_args(arguments)
    with Sigterm() as sigterm:
        return run(parser.prog.rpartition(".")[2], lambda: train(args, sigterm), args.device)


def parser(name: str, docstring: str) -> argparse.ArgumentParser:
    """Make a parser with the options of every example.

    Args:
        name: name of the example's module.
        docstring: the module's; its first line describes the command.
    """
    description = docstring.partition("\n")[0]
    parser = argparse.ArgumentParser(f"python -m loaders.examples.{name}", description=description)
    add = parser.add_argument
    add("path", help="a tree of class folders, or what 'precache convert' made of one, also at a URL")
    add("--val", help="tree or dataset to validate on (default: the split val of PATH, if it has one)")
    add("--splits", help="shares of the splits of a tree that has none, such as train=0.9,val=0.1")
    add("--out", type=Path, default=Path("runs", name), help=f"folder of checkpoints (default: runs/{name})")
    add("--resume", action="store_true", help="go on from the checkpoint in OUT, or start if there is none")
    add("--model", default="resnet18", choices=MODELS, help="which ResNet (default: resnet18)")
    add("--epochs", type=int, default=10, help="passes over the training pictures (default: 10)")
    add("--batch-size", type=int, default=64, help="pictures of a batch, of all ranks together (default: 64)")
    add("--size", type=int, help="side of the pictures (default: 224, or what is stored if less)")
    add("--lr", type=float, help="the highest learning rate (default: the model's, 0.05 for resnet18)")
    add("--seed", type=int, default=0, help="seed of the order, the crops and the first weights (default: 0)")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=default_device, help="cpu or cuda (default: cuda if it is there)")
    add("--bf16", action="store_true", help="compute in bfloat16 where that is safe")
    return parser


def is_first_rank() -> bool:
    """Whether this process is the one that saves and reports."""
    return not dist.is_initialized() or dist.get_rank() == 0


def build_loaders(args: argparse.Namespace, ranks: int) -> tuple[loaders.Loader, loaders.Loader | None]:
    """Build the training loader, and the validation loader if there is data to validate on.

    Args:
        args: options of `parser`; the loaders serve on `args.device`.
        ranks: number of processes, each of which serves its share of every batch of `args.batch_size`.

    Raises:
        PrecacheError: an option is out of range, or the data cannot be opened.
    """
    check_range("--epochs", args.epochs, 1)
    check_range("--batch-size", args.batch_size, 1)
    if args.batch_size % ranks:
        even = max(1, round(args.batch_size / ranks)) * ranks
        raise SettingError(
            f"--batch-size {args.batch_size} cannot be shared by {ranks} ranks", remedy=f"use {even}"
        )
    settings: dict[str, Any] = {
        "batch_size": args.batch_size // ranks,
        "device": args.device,
        "seed": args.seed,
    }
    size = MODELS[args.model].size if args.size is None else args.size
    train = loaders.build(args.path, size=size, augment="train", splits=args.splits, **settings)
    check_size(args.model, train.size)
    if not train.classes:
        raise SettingError("its samples have no classes; the examples learn to tell classes", path=args.path)
    settings |= {"size": train.size, "shuffle": False}
    try:
        if args.val:
            val = loaders.build(args.val, **settings)
        else:
            val = loaders.build(args.path, split="val", splits=args.splits, **settings)
    except SettingError as error:
        if args.val:
            raise
        if is_first_rank():
            print(f"no validation: {args.path}: {error}; give --val, or --splits", flush=True)
        return train, None
    if val.classes != train.classes:
        raise SettingError(f"--val {args.val}: has other classes than {args.path}; both need the same")
    return train, val


def report(epoch: int, figures: dict[str, float], tensorboard: Path | None = None) -> None:
    """Print the figures of an epoch, counted from 0, on one line.

    Args:
        tensorboard: folder in which to write the figures for TensorBoard, too.
    """
    line = ", ".join(_format_figure(name, value) for name, value in figures.items())
    print(f"epoch {epoch + 1}: {line}", flush=True)
    if tensorboard is not None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tensorboard)) as writer:
            for name, value in figures.items():
                writer.add_scalar(name, value, epoch + 1)


def _format_figure(name: str, value: float) -> str:
    """Format a figure: `accuracy 91.2%`, `1,234 images/s`, `loss 0.1234`."""
    if "_per_" in name:
        return f"{value:,.0f} {name.replace('_per_', '/')}"
    label = name.replace("_", " ")
    return f"{label} {value:.1%}" if "accuracy" in name else f"{label} {value:.4f}"


class Sigterm:
    """Records SIGTERM instead of ending the process; further signals do not disturb a save in progress."""

    def __enter__(self) -> "Sigterm":
        self._flag = torch.tensor(0)
        self._previous_handler = self.install_handler()
        return self

    def install_handler(self) -> Any:
        """Install the handler; return the one that it replaces, which a framework may have installed."""
        return signal.signal(signal.SIGTERM, lambda *_: self._flag.fill_(1))

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._previous_handler)

    def is_set(self) -> bool:
        """Whether any rank has received SIGTERM; all ranks must call this after the same batch."""
        flag = self._flag.clone()  # on the CPU, where gloo reduces it without waiting for a GPU
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)


def run(name: str, main: Callable[[], int], device: str = "cpu") -> int:
    """Run `main()` and return its exit code; bad input is one line on stderr, and exit code 2.

    Args:
        name: name of the program, for that line.
        device: the device that has to be there.
    """
    try:
        find_device(device)
        return main()
    except PrecacheError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{name}: error: {error.filename or 'disk'}: {os_reason(error)}", file=sys.stderr)
    finally:
        if dist.is_initialized():  # otherwise gloo reports a fault in a rank that ends later
            dist.destroy_process_group()
    return 2


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint beside `path`, then rename it: a kill never leaves half a checkpoint."""
    with open(path.with_suffix(".partial"), "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def read_checkpoint(path: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """Read the checkpoint at `path` for --resume; None if there is none.

    Raises:
        SettingError: there is one without --resume, or it is of another model than --model.
        PrecacheError: it is damaged.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return None
    if not args.resume:
        raise SettingError(
            "is there already", path=path, remedy="add --resume to go on, or give another --out"
        )
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        name = content["name"]
    except Exception as error:  # damage raises errors of many kinds
        raise PrecacheError(
            "damaged, or no checkpoint", path=path, remedy="remove it to start anew"
        ) from error
    if name != args.model:
        raise SettingError(f"is of {name}, not of {args.model}", path=path, remedy=f"give --model {name}")
    return content
