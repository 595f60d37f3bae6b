"""What the examples share: the command line, the two loaders, checkpoints, a line per epoch, errors.

Options are read by argparse, as most scripts that an example is copied into have it.
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
from precache.errors import PrecacheError, SettingError, check_range, os_reason


def main(
    parser: argparse.ArgumentParser,
    train: Callable[[argparse.Namespace, "Sigterm"], int],
    arguments: list[str] | None = None,
) -> int:
    """The exit code of `train(args, sigterm)`, with what `parser` makes of the command line."""
    args = parser.parse_args(arguments)
    with Sigterm() as sigterm:
        return run(parser.prog.rpartition(".")[2], lambda: train(args, sigterm), args.device)


def parser(name: str, described: str) -> argparse.ArgumentParser:
    """The options that every example takes; `name` is that of its file, and `described` its docstring."""
    description = described.partition("\n")[0]
    made = argparse.ArgumentParser(f"python -m loaders.examples.{name}", description=description)
    add = made.add_argument
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
    found = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=found, help="cpu or cuda (default: cuda if it is there)")
    add("--bf16", action="store_true", help="compute in bfloat16 where that is safe")
    made.set_defaults(compile=False, tensorboard=False)  # options of `train` alone
    return made


def is_first() -> bool:
    """Whether this is the process that saves and reports."""
    return not dist.is_initialized() or dist.get_rank() == 0


def build_loaders(args: argparse.Namespace, ranks: int) -> tuple[loaders.Loader, loaders.Loader | None]:
    """The loader of training, and that of validation where there is something to validate on.

    On `args.device`, for `ranks` that share a batch; a PrecacheError where that cannot be.
    """
    check_range("--epochs", args.epochs, 1)
    check_range("--batch-size", args.batch_size, 1)
    if args.batch_size % ranks:
        even = max(1, round(args.batch_size / ranks)) * ranks
        raise SettingError(f"--batch-size {args.batch_size} cannot be shared by {ranks} ranks; use {even}")
    settings: dict[str, Any] = {
        "batch_size": args.batch_size // ranks,
        "device": args.device,
        "seed": args.seed,
    }
    size = MODELS[args.model].size if args.size is None else args.size
    train = loaders.build(args.path, size=size, augment="train", splits=args.splits, **settings)
    check_size(args.model, train.size)
    if not train.classes:
        raise SettingError(f"{args.path}: its samples have no classes; the examples learn to tell classes")
    settings |= {"size": train.size, "shuffle": False}
    try:
        if args.val:
            val = loaders.build(args.val, **settings)
        else:
            val = loaders.build(args.path, split="val", splits=args.splits, **settings)
    except SettingError as error:
        if args.val:
            raise
        if is_first():
            print(f"no validation: {args.path}: {error}; give --val, or --splits", flush=True)
        return train, None
    if val.classes != train.classes:
        raise SettingError(f"--val {args.val}: has other classes than {args.path}; both need the same")
    return train, val


def report(epoch: int, figures: dict[str, float], tensorboard: Path | None = None) -> None:
    """Print the figures of an epoch, counted from 0, on one line; and write them for TensorBoard."""
    print(f"epoch {epoch + 1}: {', '.join(_said(*figure) for figure in figures.items())}", flush=True)
    if tensorboard is not None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tensorboard)) as writer:
            for name, value in figures.items():
                writer.add_scalar(name, value, epoch + 1)


def _said(name: str, value: float) -> str:
    """As people say it: `accuracy 91.2%`, `1,234 images/s`, `loss 0.1234`."""
    if "_per_" in name:
        return f"{value:,.0f} {name.replace('_per_', '/')}"
    return f"{name.replace('_', ' ')} {value:{'.1%' if 'accuracy' in name else '.4f'}}"


class Sigterm:
    """Remembers SIGTERM. A second one changes nothing: what is being saved is saved whole."""

    def __enter__(self) -> "Sigterm":
        self._flag = torch.tensor(0)
        self._before = self.listen()
        return self

    def listen(self) -> Any:
        """Take it over from who else has set a handler meanwhile, which is returned."""
        return signal.signal(signal.SIGTERM, lambda *_: self._flag.fill_(1))

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def came(self) -> bool:
        """To any rank: all ask after the same batch, and so all stop there."""
        came = self._flag.clone()  # on the CPU, where gloo reduces: no GPU is waited for
        if dist.is_initialized():
            dist.all_reduce(came, dist.ReduceOp.MAX)
        return bool(came)


def run(name: str, main: Callable[[], int], device: str = "cpu") -> int:
    """The exit code of `main()`; 2 and one line on stderr where input is bad, or there is no `device`."""
    try:
        find_device(device)
        return main()
    except PrecacheError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{name}: error: {error.filename or 'disk'}: {os_reason(error)}", file=sys.stderr)
    finally:
        if dist.is_initialized():  # or a rank that ends later may end with a fault of gloo's
            dist.destroy_process_group()
    return 2


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write beside, then rename: whenever this is killed, there is a whole checkpoint."""
    with open(path.with_suffix(".partial"), "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def read_checkpoint(path: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """What torch saved at `path`, for --resume, with the model's `name`; None: there is nothing.

    A PrecacheError: it is there, and --resume is not given; is of another model than --model; is damaged.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return None
    if not args.resume:
        raise SettingError(f"{path}: is there already; add --resume to go on, or give another --out")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        name = content["name"]
    except Exception as error:  # there are many kinds of damage
        raise PrecacheError(f"{path}: damaged, or no checkpoint; remove it to start anew") from error
    if name != args.model:
        raise SettingError(f"{path}: is of {name}, not of {args.model}; give --model {name}")
    return content


def restore(loader: loaders.Loader, state: dict[str, Any], path: Path) -> None:
    """Have it go on where `state`, read from `path`, was taken; SettingError names `path`."""
    try:
        loader.load_state_dict(state)
    except SettingError as error:
        raise SettingError(f"{path}: {error}, or give another --out") from None
