"""Train the same model from several loaders of the same pictures: is it worse than from ImageFolder?

    python -m bench.lab.accuracy splits TREE splits.csv --per-class 30
    precache convert TREE keep128 --format shards --size 128 --splits splits.csv
    python -m bench.lab.accuracy train TREE pytorch keep128=shards:keep128 --json accuracy.json
    python -m bench.lab.accuracy show accuracy.json

All train with the pictures of the split train of the converted folders, as many steps, and for each seed from
the same weights; all are tested on the pictures of val in TREE, by torchvision's Resize and CenterCrop.
Finished trainings are kept in the JSON file: the same command goes on.

Trainings are paired by seed. The interval of the mean difference decides. It is Student's t, two-sided, and
so wide that in 95% of tables it holds for all rows at once (Bonferroni). 'Worse' and 'better': it leaves 0
out. 'As good': it lies within the margin and holds 0. Anything else is within noise.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import click
import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader

import loaders
from bench.lab import harness
from bench.machine.hardware import DTYPES, describe_machine, resolve_amp
from bench.measure.candidates import CHOICES
from bench.measure.imagefolder import NAME as IMAGEFOLDER
from bench.measure.recipes import make_mix, make_transform, mix_samples
from bench.measure.trials import Trials, read_document
from bench.report.result import Document, Trial
from bench.report.table import Table
from bench.report.words import machine_line
from loaders.batch import Batch
from loaders.dataset import RAW, SplitData, open_split
from loaders.device import find_device
from loaders.examples.models import MODELS, build_model, build_optimizer, check_size
from loaders.examples.train import Learner
from loaders.settings import AugmentName
from loaders.transfer import normalise
from precache.cli.terminal import ProgressBar
from precache.errors import DatasetError, SettingError, check_choice
from precache.sources.tree import scan_tree

LEVEL = 0.95
_PATH = click.Path(path_type=Path)
_RECIPES = sorted({*get_args(AugmentName)} - {"crop", "dino", "eval", "simclr"})  # of one view, for training
_VALIDATION_BATCH = 250  # pictures
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecipe:
    """Settings that all trainings share; a training has a loader and a seed besides.

    Attributes:
        model: name in `loaders.examples.models.MODELS`.
        size: side of the pictures, pixels.
        epochs: epochs of a training, each of all full batches.
        amp: precision of the model: "bf16", "fp16", or "off" for float32.
        augment: augmentation recipe, by its name in `loaders.build`.
        workers: processes or threads of each loader.
    """

    model: str
    size: int
    epochs: int
    batch_size: int
    amp: str
    device: str
    workers: int
    augment: AugmentName = "train"


@dataclass(frozen=True, slots=True)
class Contender:
    """A loader whose trainings are compared with those of others.

    Attributes:
        name: its name in tables and files.
        backend: name in `bench.measure.candidates.CHOICES`.
        data: the tree, or the split train of the converted folder, that it reads.
    """

    name: str
    backend: str
    data: SplitData


@dataclass(frozen=True, slots=True)
class TreeSplits:
    """Pictures of a raw tree that all contenders train with, and those that all models are tested on.

    Attributes:
        tree: the whole tree.
        train, val: int64 [n], ascending positions in `tree`.
    """

    tree: SplitData
    train: Positions
    val: Positions

    def files(self, positions: Positions) -> list[str]:
        """Return the paths of the pictures at these positions."""
        return [self.tree.files[position] for position in positions.tolist()]


def open_contender(text: str, tree: Path) -> Contender:
    """Open a loader: `NAME=BACKEND:FOLDER`, or a backend that reads `tree`, which may have a name, too."""
    match = re.fullmatch(r"(?:([\w.-]+)=)?(\w+)(?::(.+))?", text, re.DOTALL)
    if match is None:
        raise SettingError(f"loader {text!r} is not of the form NAME=BACKEND:FOLDER or BACKEND")
    name, backend, folder = match.groups()
    check_choice("backend", backend, CHOICES)
    return Contender(name or backend, backend, open_split(Path(folder) if folder else tree, "train"))


def find_pictures(tree: Path, contenders: Sequence[Contender]) -> TreeSplits:
    """Find the pictures of `tree` that are in the splits train and val of the converted folders.

    Raises:
        DatasetError: the folders have other pictures than `tree`, or not the same in each split.
        SettingError: no contender is a converted folder.
    """
    whole = open_split(tree, "train")
    positions = {sample: position for position, sample in enumerate(_samples(whole))}
    tree_splits: TreeSplits | None = None
    for contender in contenders:
        if contender.data.kind == RAW:
            continue
        splits = []
        for split in (contender.data, open_split(contender.data.path, "val")):
            samples = _samples(split)
            if missing := set(samples) - positions.keys():
                raise DatasetError(f"has {min(missing)}, which {tree} lacks", path=split.path)
            splits.append(np.array(sorted(positions[sample] for sample in samples)))
        if tree_splits is not None and not all(
            map(np.array_equal, splits, (tree_splits.train, tree_splits.val))
        ):
            raise DatasetError(
                "its splits hold other pictures than those of another loader",
                path=contender.data.path,
                remedy="convert both with the same --splits",
            )
        tree_splits = TreeSplits(whole, *splits)
    if tree_splits is None:
        raise SettingError(
            f"no loader says which pictures of {tree} train and which validate",
            remedy="add a folder that was converted with --splits, which has the splits train and val",
        )
    return tree_splits


def _samples(data: SplitData) -> list[tuple[str, str]]:
    """Return the path and the class name of each sample."""
    labels = np.asarray(data.labels[:]).tolist()
    return [(data.path_at(position), data.classes[label]) for position, label in enumerate(labels)]


@contextmanager
def open_batches(
    contender: Contender, pictures: TreeSplits, recipe: TrainingRecipe, seed: int
) -> Iterator[Callable[[], Iterable[Batch]]]:
    """Yield a function that returns the batches of the next epoch, cropped and mirrored at random."""
    if contender.backend == IMAGEFOLDER:
        files = pictures.files(pictures.train)
        dataset = ImageFolder(
            Path(files[0]).parent.parent,
            make_transform(recipe.augment, recipe.size, floats=True),
            is_valid_file=frozenset(files).__contains__,
        )
        mix = make_mix(recipe.augment, len(pictures.tree.classes))
        loader = DataLoader(
            dataset,
            recipe.batch_size,
            collate_fn=None if mix is None else partial(mix_samples, mix),
            shuffle=True,
            drop_last=True,
            num_workers=recipe.workers,
            persistent_workers=recipe.workers > 0,
            generator=torch.Generator().manual_seed(seed),
        )
        yield lambda: (Batch(images, labels, torch.zeros_like(labels)) for images, labels in loader)
        return
    is_tree = contender.data.kind == RAW
    backend: Any = contender.backend  # a Literal of `loaders.build`, which a str is not
    with loaders.build(
        contender.data.path,
        backend=backend,
        batch_size=recipe.batch_size,
        size=recipe.size,
        seed=seed,
        augment=recipe.augment,
        device=recipe.device,
        sampling=loaders.Sampling(subset=pictures.train if is_tree else None, last="drop"),
        reading=loaders.Reading(workers=recipe.workers),
    ) as served:
        yield lambda: served


def decode_validation(pictures: TreeSplits, size: int) -> list[torch.Tensor]:
    """Decode the pictures that models are tested on as torchvision does; each uint8 [3, size, size]."""
    transform = transforms.Compose([pil_loader, make_transform("eval", size, floats=False)])
    with ThreadPoolExecutor() as pool:
        return list(pool.map(transform, pictures.files(pictures.val)))


def train(
    contender: Contender,
    seed: int,
    pictures: TreeSplits,
    recipe: TrainingRecipe,
    validation: Sequence[torch.Tensor],
) -> Trial:
    """Train a model from the contender; return its top-1 accuracy on the validation pictures."""
    device, tree = torch.device(recipe.device), pictures.tree
    steps = len(pictures.train) // recipe.batch_size * recipe.epochs
    model = build_model(recipe.model, len(tree.classes), seed).to(device)
    optimizer, schedule = build_optimizer(recipe.model, model, steps)
    learner = Learner(model, optimizer, schedule, dtype=DTYPES[recipe.amp])
    with open_batches(contender, pictures, recipe, seed) as next_epoch:
        for _ in range(recipe.epochs):
            learner.train(batch.to(device) for batch in next_epoch())
    if schedule.last_epoch != steps:
        raise DatasetError(f"{contender.name} served {schedule.last_epoch:,} batches, expected {steps:,}")
    labels = torch.from_numpy(np.asarray(tree.labels[pictures.val]))

    def batches() -> Iterator[Batch]:
        for start in range(0, len(validation), _VALIDATION_BATCH):
            part = slice(start, start + _VALIDATION_BATCH)
            images = normalise(torch.stack(list(validation[part])).to(device), torch.float32)
            yield Batch(images, labels[part].to(device), labels[part])

    top1 = learner.validate(batches())["validation_accuracy"]
    return Trial(key={"loader": contender.name, "seed": seed}, numbers={"top1_accuracy": top1})


def judge(differences: Sequence[float], level: float, margin: float) -> tuple[float, float, str]:
    """Return the interval of the mean of what `differences` are drawn from, and the verdict."""
    mean, error = fmean(differences), stats.sem(differences)
    low, high = stats.t.interval(level, len(differences) - 1, mean, error) if error else (mean, mean)
    if high < 0:
        return low, high, "worse"
    if low > 0:
        return low, high, "better"
    return low, high, "as good" if -margin <= low and high <= margin else "within noise"


def make_table(trials: Sequence[Trial], baseline: str, margin: float) -> Table:
    """Make a row for each loader, the baseline first: top-1 over its seeds, and the difference in points."""
    contenders: dict[str, dict[int, float]] = {baseline: {}}
    for trial in trials:
        by_seed = contenders.setdefault(trial.key["loader"], {})
        by_seed[trial.key["seed"]] = 100 * trial.numbers["top1_accuracy"]
    first = contenders[baseline]
    level = 1 - (1 - LEVEL) / max(1, len(contenders) - 1)
    rows = []
    for name, by_seed in contenders.items():
        seeds = by_seed.keys() & first.keys()
        text = ""
        if name != baseline and len(seeds) > 1:
            differences = [by_seed[seed] - first[seed] for seed in seeds]
            low, high, verdict = judge(differences, level, margin)
            text = f"{fmean(differences):+.2f} ({low:+.2f} to {high:+.2f}), {verdict}"
        rows.append([name, str(len(by_seed)), f"{fmean(by_seed.values()):.2f}", text])
    return Table(["pictures from", "seeds", "top-1", f"beside {baseline}"], rows)


def show(document: Document, baseline: str, margin: float) -> None:
    """Print the table of a file, and below it what was trained, and the machine."""
    if not any(trial.key["loader"] == baseline for trial in document.trials):
        raise SettingError(f"no training of the baseline {baseline!r}", remedy="name another with --baseline")
    settings = document.settings
    click.echo(make_table(document.trials, baseline, margin).markdown())
    click.echo(
        f"\n{settings['model']} at {settings['size']} pixels, {settings['epochs']} epochs of batches of "
        f"{settings['batch_size']}; as good: within ±{margin:g} points; "
        f"{machine_line(document.machine, ('torch', 'torchvision', 'pillow'))}"
    )


def _judging(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what is compared, and what does not matter."""
    margin = click.option("--margin", default=1.0, show_default=True, help="Points that do not matter.")
    baseline = click.option("--baseline", default=IMAGEFOLDER, show_default=True)
    return baseline(margin(function))


@click.group()
def command() -> None:
    """Train the same model from several loaders of the same pictures, and compare them."""


@command.command("splits")
@click.argument("tree", type=_PATH)
@click.argument("path", type=_PATH)
@click.option("--per-class", default=30, show_default=True, help="Pictures of each class that train.")
def write_splits(tree: Path, path: Path, per_class: int) -> None:
    """Write a list for 'precache convert --splits': so many pictures of each class train, the others are val.

    With 30 this is the usual protocol of Caltech-101: Fei-Fei, Fergus, Perona, "Learning generative visual
    models from few training examples" (2004), and later papers.
    """
    samples = list(scan_tree(tree).samples)
    labels = np.array([sample.label for sample in samples])
    rows = [("path", "split")]
    for label in np.unique(labels):
        order = np.random.default_rng((0, label)).permutation(np.flatnonzero(labels == label)).tolist()
        train_rows = set(order[:per_class])
        rows += [(samples[row].path, "train" if row in train_rows else "val") for row in sorted(order)]
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


@command.command("train")
@click.argument("tree", type=_PATH)
@click.argument("others", nargs=-1, required=True, metavar="LOADER...")
@click.option("--json", "json_path", type=_PATH, required=True, help="Keeps finished trainings.")
@click.option("--model", type=click.Choice(list(MODELS)), default="resnet10", show_default=True)
@click.option("--size", default=64, show_default=True, help="Side of the pictures, pixels.")
@click.option("--epochs", default=20, show_default=True)
@click.option("--batch-size", default=64, show_default=True)
@click.option("--seeds", default=5, show_default=True, help="Trainings of each loader.")
@click.option("--amp", default="off", show_default=True, help="Precision: auto, bf16, fp16 or off.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--workers", default=1, show_default=True, help="Processes or threads of each loader.")
@click.option("--augment", type=click.Choice(_RECIPES), default="train", show_default=True)
@_judging
def train_contenders(
    tree: Path,
    others: Sequence[str],
    json_path: Path,
    seeds: int,
    amp: str,
    device: str,
    baseline: str,
    margin: float,
    **settings: Any,
) -> None:
    """Train a model from TREE by ImageFolder, and from each LOADER: NAME=BACKEND:FOLDER, or BACKEND on TREE.

    Loaders take turns in being the first with a seed, so that a machine that warms up affects all alike.
    """
    recipe = TrainingRecipe(**settings, device=device, amp=resolve_amp(amp, find_device(device)))
    check_size(recipe.model, recipe.size)
    contenders = [open_contender(text, tree) for text in (IMAGEFOLDER, *others)]
    pictures = find_pictures(tree, contenders)
    data = {
        contender.name: {"digest": f"{contender.backend} {contender.data.digest}"} for contender in contenders
    }
    machine = describe_machine(torch.device(device))
    trials = Trials(json_path, "accuracy", machine, {**asdict(recipe), "data": data})
    missing = [
        (contender, seed)
        for seed in range(seeds)
        for contender in (*contenders[seed % len(contenders) :], *contenders[: seed % len(contenders)])
        if trials.find({"loader": contender.name, "seed": seed}) is None
    ]
    validation = decode_validation(pictures, recipe.size) if missing else []
    with ProgressBar("accuracy", "training") as bar:
        for number, (contender, seed) in enumerate(missing):
            bar(number, len(missing))
            trials.add(train(contender, seed, pictures, recipe, validation))
    show(read_document(json_path), baseline, margin)


@command.command("show")
@click.argument("path", type=_PATH)
@_judging
def show_file(path: Path, baseline: str, margin: float) -> None:
    """Print the table of the trainings that a file of `train` keeps."""
    show(read_document(path), baseline, margin)


if __name__ == "__main__":
    harness.main(command, "accuracy")
