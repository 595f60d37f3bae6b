"""Trainings of the same model from several sources of the same pictures: what `bench accuracy` measures.

Each training is a trial, with a key such as `{"source": "crop", "seed": 0}`, so that a run that was killed
goes on. The state of the training under way is written after every epoch, to a file beside that of the
trials.
"""

import csv
import hashlib
import io
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchvision import transforms
from torchvision.datasets.folder import pil_loader

import loaders
from bench.machine.hardware import DTYPES, describe_machine
from bench.machine.monitor import OtherProcesses
from bench.measure.candidates import CHOICES, READS
from bench.measure.imagefolder import NAME as IMAGEFOLDER
from bench.measure.imagefolder import ImageFolderLoader, resize_transforms
from bench.measure.settings import LAST, check_fills_batch
from bench.measure.trials import Trials, can_keep_trials
from bench.report.accuracy import make_result
from bench.report.result import Result, Trial
from loaders.augment import RandomAugmentation, augment_batch
from loaders.batch import Batch
from loaders.dataset import RAW, SplitData, open_split
from loaders.examples.models import MODELS, build_model, build_optimizer, check_size
from loaders.examples.train import Learner
from loaders.read import choose_backend
from loaders.transfer import normalise
from precache.errors import DatasetError, PrecacheError, SettingError, check_choice, check_range
from precache.reporting import Progress
from precache.sources.tree import scan_tree
from precache.storage import atomic_write
from precache.storage.urls import Location, locate

AUGMENT = ("auto", "cpu", "device")
_NAMED_SOURCE = re.compile(r"([A-Za-z0-9][\w.-]*)=(.*)", re.DOTALL)
_EVALUATIONS = 10
"""Evaluations of a model during its training; fewer where the training has fewer epochs."""
_EVALUATION_BATCH = 250  # pictures
SourceLoader = loaders.Loader | ImageFolderLoader
Positions = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecipe:
    """Settings that all trainings of a run share; a training has a seed and a source besides.

    Attributes:
        model: name in `loaders.examples.models.MODELS`.
        size: side of the pictures, pixels.
        epochs: epochs of a training, each of all full batches.
        batch_size: samples per step.
        lr: the highest learning rate.
        amp: precision that the model computes in: "bf16", "fp16", or "off" for float32.
        workers: processes or threads of each loader.
    """

    model: str
    size: int
    epochs: int
    batch_size: int
    lr: float
    amp: str
    device: torch.device
    workers: int

    def __post_init__(self) -> None:
        check_choice("model", self.model, MODELS)
        check_choice("amp", self.amp, DTYPES)
        for name in ("size", "epochs", "batch_size"):
            check_range(name, getattr(self, name), 1)
        check_size(self.model, self.size)
        if not 0 < self.lr < math.inf:
            raise SettingError(f"lr must be positive, got {self.lr}")

    def build_learner(self, classes: int, steps: int, seed: int) -> Learner:
        """Return the untrained model, its weights drawn by `seed`, with a schedule of `steps` steps."""
        model = build_model(self.model, classes, seed).to(self.device)
        optimizer, schedule = build_optimizer(self.model, model, steps, self.lr)
        return Learner(model, optimizer, schedule, dtype=DTYPES[self.amp])


@dataclass(frozen=True)
class TreeSplits:
    """Pictures of a raw tree that every source trains with, and those that every model is validated on.

    Attributes:
        tree: the whole tree.
        train, val: int64 [n], ascending positions in `tree`.
    """

    tree: SplitData
    train: Positions
    val: Positions

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the classes and of the paths and labels of both splits, hex."""
        splits = [
            [[self.tree.path_at(at), int(self.tree.labels[at])] for at in positions.tolist()]
            for positions in (self.train, self.val)
        ]
        return hashlib.sha256(json.dumps([self.tree.classes, splits]).encode()).hexdigest()

    def files(self, positions: Positions) -> list[str]:
        """Return the paths of the pictures at these positions."""
        return [self.tree.files[position] for position in positions.tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A loader whose trainings are compared with those of other loaders of the same pictures.

    Attributes:
        name: its name in tables and files.
        backend: name in `bench.measure.candidates.CHOICES`.
        path: the tree or the converted folder that it reads.
        data: the tree, or the split train of the converted folder.
        augment: place where pictures are cropped and mirrored: "auto", the loader's own choice; "cpu", its
            threads; "device", the device that trains, with the arithmetic that a GPU does.
    """

    name: str
    backend: str
    path: Location
    data: SplitData
    augment: str = "auto"

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values: name in words, number of samples, and a digest of all that a training depends on."""
        suffix = "" if self.augment == "auto" else f", augment {self.augment}"
        return {
            "name": f"{self.backend} on {self.path}{suffix}",
            "samples": len(self.data),
            "digest": f"{self.backend} {self.augment} {self.data.digest}",
        }

    def open(self, pictures: TreeSplits, recipe: TrainingRecipe, seed: int) -> SourceLoader:
        """Return the loader of a training with that seed."""
        if self.backend == IMAGEFOLDER:
            return _open_imagefolder(pictures, recipe, seed)
        backend: Any = self.backend  # a Literal of `loaders.build`, which a str is not
        augment: Any = "train"
        if self.augment == "device":
            if self.data.has_varying_sizes:  # `augment_batch` would be given the middle of each picture alone
                raise SettingError(
                    f"augment: {self.path} holds pictures of varying size, and a device crops those of one "
                    f"size",
                    remedy="leave out augment=device, or convert with --fit crop",
                )
            if recipe.device.type == "cpu":
                augment = partial(augment_batch, RandomAugmentation(), seed, recipe.size)
        return loaders.build(
            self.path,
            backend=backend,
            batch_size=recipe.batch_size,
            size=recipe.size,
            seed=seed,
            augment=augment,
            device="cpu" if self.augment == "cpu" else recipe.device,
            sampling=loaders.Sampling(
                subset=pictures.tree.ids[pictures.train] if self.data.kind == RAW else None, last=LAST
            ),
            reading=loaders.Reading(workers=recipe.workers),
        )


def _open_imagefolder(pictures: TreeSplits, recipe: TrainingRecipe, seed: int) -> ImageFolderLoader:
    files = pictures.files(pictures.train)
    root = Path(files[0]).parent.parent
    loader = ImageFolderLoader(
        root,
        batch_size=recipe.batch_size,
        size=recipe.size,
        workers=recipe.workers,
        device=recipe.device,
        augment="train",
        shuffle=True,
        seed=seed,
        only=frozenset(files).__contains__,
    )
    if loader.samples != len(files) or loader.classes != pictures.tree.classes:
        loader.close()
        raise DatasetError(
            f"ImageFolder finds {loader.samples:,} of the {len(files):,} training pictures",
            path=root,
            remedy="move pictures that lie deeper than their class folder",
        )
    return loader


def open_source(text: str, tree: Path) -> Source:
    """Open a source by its text on the command line.

    Args:
        text: `NAME=BACKEND:FOLDER,augment=cpu`, where all but FOLDER may be left out; or a BACKEND that reads
            raw trees, which then reads `tree`.

    Raises:
        SettingError: an unknown backend or augment, or no folder.
        DatasetError: the folder cannot be read, by this backend or at all.
    """
    match = _NAMED_SOURCE.fullmatch(text)
    name, rest = (match[1], match[2]) if match else ("", text)
    rest, _, augment = rest.partition(",augment=")
    backend, colon, folder = rest.partition(":")
    reads_tree = RAW in READS.get(rest, ())
    if reads_tree:
        backend, folder = rest, str(tree)
    elif not colon or folder.startswith("//"):  # a folder alone, or a URL
        backend, folder = "auto", rest
    check_choice("augment", augment or "auto", AUGMENT)
    check_choice("backend", backend, [*CHOICES, "auto"])
    if not folder:
        raise SettingError(
            f"source {text!r} names no folder",
            remedy="write NAME=BACKEND:FOLDER, such as crop=shards:data/shards",
        )
    path = locate(folder)
    data = open_split(path, "train")
    if backend != IMAGEFOLDER:
        backend = choose_backend(backend, data.kind, path)
    elif data.kind != RAW:
        raise DatasetError(
            f"holds {data.kind}, {IMAGEFOLDER} reads a tree of pictures", path=path, remedy="name that"
        )
    default_name = rest if reads_tree else path.name
    return Source(name=name or default_name, backend=backend, path=path, data=data, augment=augment or "auto")


def find_pictures(tree: Path, sources: Sequence[Source]) -> TreeSplits:
    """Find the pictures of `tree` that all sources train with, and those that models are validated on.

    Both are the splits train and val of the converted folders among the sources.

    Raises:
        SettingError: two sources have one name, or no source is a converted folder.
        DatasetError: a source trains with other pictures or other labels.
    """
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise SettingError(
                f"two sources are called {name!r}",
                remedy="give each a name of its own: NAME=BACKEND:FOLDER",
            )
    whole = open_split(tree, "train")
    tree_samples = _list_paths_and_classes(whole)
    splits: dict[str, set[tuple[str, str]]] = {}
    first_path: Location | None = None  # the converted folder that the splits are read from
    for source in sources:
        path, data = source.path, source.data
        if data.kind == RAW:
            if data.digest != whole.digest:
                raise DatasetError(
                    f"is another tree than {tree}",
                    path=path,
                    remedy="name that, or what was made of it",
                )
            continue
        remedy = "name the tree that it was converted from, or convert it again"
        if first_path is None:
            first_path = path
        for split, split_data in (("train", data), ("val", _open_val(path))):
            samples = set(_list_paths_and_classes(split_data))
            if foreign := samples.difference(tree_samples):
                picture, name = min(foreign)
                raise DatasetError(
                    f"has {picture} in class {name!r}, but {tree} does not", path=path, remedy=remedy
                )
            expected = splits.setdefault(split, samples)
            if different := samples ^ expected:
                raise DatasetError(
                    f"its split {split} holds {len(samples):,} pictures, that of {first_path} "
                    f"{len(expected):,}, and {min(different)[0]} is in only one of them",
                    path=path,
                    remedy="convert both with the same --splits",
                )
        if data.classes != whole.classes:  # a class without pictures would move the labels of those behind it
            raise DatasetError(f"has other classes than {tree}", path=path, remedy=remedy)
    if not splits:
        raise SettingError(
            f"no source says which pictures of {tree} train and which validate",
            remedy="add a folder that was converted with --splits, which has the splits train and val",
        )
    train, val = (
        np.array(
            [position for position, sample in enumerate(tree_samples) if sample in splits[split]], np.int64
        )
        for split in ("train", "val")
    )
    return TreeSplits(whole, train, val)


def _list_paths_and_classes(data: SplitData) -> list[tuple[str, str]]:
    """Return the path and the class name of each sample."""
    labels = np.asarray(data.labels[:]).tolist()
    return [(data.path_at(position), data.classes[label]) for position, label in enumerate(labels)]


def _open_val(path: Location) -> SplitData:
    """Open the split val of a converted folder; DatasetError where it has none."""
    try:
        return open_split(path, "val")
    except SettingError as error:
        raise DatasetError(
            str(error), path=path, remedy="convert with --splits FILE, of lines path,train and path,val"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Task:
    """Recipe and pictures of all trainings of a run.

    Attributes:
        unfinished: file that keeps the state of the training under way; None: it is not kept.
    """

    recipe: TrainingRecipe
    pictures: TreeSplits
    unfinished: Path | None = None

    def __post_init__(self) -> None:
        check_fills_batch(self.recipe.batch_size, len(self.pictures.train))

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return len(self.pictures.train) // self.recipe.batch_size

    @property
    def steps(self) -> int:
        """Batches of a training."""
        return self.batches * self.recipe.epochs

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values that have to be the same for two trainings to be compared."""
        recipe = self.recipe
        return {
            "model": recipe.model,
            "size": recipe.size,
            "epochs": recipe.epochs,
            "batch_size": recipe.batch_size,
            "lr": recipe.lr,
            "amp": recipe.amp,
            "device": str(recipe.device),
            "loader_workers": recipe.workers,
            "threads": torch.get_num_threads(),
            "steps": self.steps,
            "classes": len(self.pictures.tree.classes),
            "pictures": self.pictures.digest,
        }

    @cached_property
    def _validation_pixels(self) -> Pixels:
        return decode_validation(
            self.pictures.files(self.pictures.val), self.recipe.size, self.recipe.workers
        )

    def validation_batches(self) -> Iterator[Batch]:
        """Yield batches of the pictures that models are validated on, normalised float32 on the device."""
        tree, device = self.pictures.tree, self.recipe.device
        for start in range(0, len(self.pictures.val), _EVALUATION_BATCH):
            stop = start + _EVALUATION_BATCH
            rows = self.pictures.val[start:stop]
            pixels = torch.from_numpy(np.array(self._validation_pixels[start:stop])).to(device)
            labels = torch.from_numpy(np.asarray(tree.labels[rows])).to(device)
            images = normalise(pixels.permute(0, 3, 1, 2), torch.float32)
            yield Batch(images, labels, torch.from_numpy(np.asarray(tree.ids[rows])))


def compare_sources(
    sources: Sequence[Source],
    pictures: TreeSplits,
    recipe: TrainingRecipe,
    seeds: Sequence[int],
    path: Path | None,
    on_progress: Progress,
    margin: float = 1.0,
) -> Result:
    """Train from each source with each seed; the first source is the baseline.

    All sources train with one seed before any trains with the next, and they take turns in being the first,
    so that a machine that warms up or slows down with time affects all sources alike.

    Args:
        path: file that keeps the trials; the state of the training under way is kept beside it.
        margin: points of top-1 accuracy that do not matter.

    Raises:
        SettingError: the file has trainings of other settings, or a loader cannot be opened.
    """
    unfinished = None
    if path is not None and can_keep_trials(path):
        unfinished = path.with_name(f"{path.name}.unfinished")
    task = Task(recipe=recipe, pictures=pictures, unfinished=unfinished)
    settings = {
        **task.settings,
        "seeds": list(seeds),
        "repeats": len(seeds),
        "baseline": sources[0].name,
        "margin": margin,
        "data": {source.name: source.settings for source in sources},
    }
    trials = Trials(path, "accuracy", describe_machine(recipe.device), settings)
    missing = [
        (source, seed)
        for turn, seed in enumerate(seeds)
        for source in (sources[(turn + at) % len(sources)] for at in range(len(sources)))
        if trials.find(_trial_key(source, seed)) is None
    ]
    for source in sources:
        if any(source is other for other, _ in missing):
            try:  # an error now, not after hours of other sources' trainings
                with source.open(pictures, recipe, seeds[0]):
                    pass
            except PrecacheError as error:
                raise SettingError(f"source {source.name}: {error}") from error
    total = len(sources) * len(seeds) * recipe.epochs
    before = total - len(missing) * recipe.epochs
    on_progress(before, total)
    for source, seed in missing:

        def show(epoch: int, before: int = before) -> None:
            on_progress(before + epoch, total)

        trials.add(train(task, source, seed, show))
        before += recipe.epochs
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
    result = make_result(trials.machine, trials.settings, trials.all(), trials.skipped)
    trials.finish(result)
    return result


def _trial_key(source: Source, seed: int) -> dict[str, Any]:
    return {"source": source.name, "seed": seed}


@dataclass
class PartialTraining:
    """Progress of a training after its last finished epoch.

    Attributes:
        epochs: number of finished epochs.
        train_s: seconds that they took, without evaluations.
        other_cpu_s: share of these seconds in which other processes kept the CPUs busy.
        resumed: number of times that a later process went on with the training.
        curve: (finished epochs, top-1 accuracy, train_s) at each evaluation.
    """

    epochs: int = 0
    train_s: float = 0.0
    other_cpu_s: float = 0.0
    resumed: int = 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def to_trial(self, key: dict[str, Any]) -> Trial:
        """Return the trial of the finished training."""
        epochs, top1, train_s = zip(*self.curve, strict=True)
        return Trial(
            key,
            numbers={
                "top1_accuracy": top1[-1],
                "train_s": self.train_s,
                "epochs": self.epochs,
                "resumed": self.resumed,
                "other_cpu_share": self.other_cpu_s / self.train_s,
            },
            series={"epoch": epochs, "top1_accuracy": top1, "train_s": train_s},
        )


def train(task: Task, source: Source, seed: int, on_epoch: Callable[[int], None]) -> Trial:
    """Train a model from the source, or go on with its unfinished training.

    Args:
        on_epoch: called with the number of finished epochs after each epoch.

    Raises:
        DatasetError: an epoch has more or fewer batches than those of other sources.
    """
    recipe = task.recipe
    with source.open(task.pictures, recipe, seed) as loader:
        learner = recipe.build_learner(len(task.pictures.tree.classes), task.steps, seed)
        settings = {**task.settings, **_trial_key(source, seed), **source.settings}
        progress = _resume(task, settings, learner)
        for epoch in range(progress.epochs, recipe.epochs):
            _train_epoch(learner, loader, epoch, progress)
            steps = learner.schedule.last_epoch
            if steps != (epoch + 1) * task.batches:
                raise DatasetError(
                    f"{source.name}: after epoch {epoch} {steps:,} batches were served, expected "
                    f"{(epoch + 1) * task.batches:,}: it does not serve the same pictures as the others"
                )
            if (epoch + 1) % max(1, recipe.epochs // _EVALUATIONS) == 0 or epoch + 1 == recipe.epochs:
                top1 = learner.validate(task.validation_batches())["validation_accuracy"]
                progress.curve.append((epoch + 1, top1, progress.train_s))
            if task.unfinished is not None:
                with atomic_write(task.unfinished) as file:
                    torch.save(
                        {"same": settings, "done": asdict(progress), "learner": learner.state_dict()}, file
                    )
            on_epoch(epoch + 1)
    return progress.to_trial(_trial_key(source, seed))


def _resume(task: Task, settings: dict[str, Any], learner: Learner) -> PartialTraining:
    """Load the state of the unfinished training of these settings into `learner`, if there is one."""
    if task.unfinished is None or not task.unfinished.exists():
        return PartialTraining()
    state = torch.load(task.unfinished, map_location=task.recipe.device, weights_only=True)
    if state["same"] != settings:
        return PartialTraining()
    learner.load_state_dict(state["learner"])
    progress = PartialTraining(**state["done"])
    progress.resumed += 1
    return progress


def _train_epoch(learner: Learner, loader: SourceLoader, epoch: int, progress: PartialTraining) -> None:
    """Train one epoch, and add its time to `progress`."""
    others = OtherProcesses()
    start_s = time.perf_counter()
    loader.set_epoch(epoch)
    learner.train(batch.to(learner.device, non_blocking=True) for batch in loader)
    epoch_s = time.perf_counter() - start_s
    progress.epochs = epoch + 1
    progress.train_s += epoch_s
    progress.other_cpu_s += epoch_s * (others.share() or 0.0)


def decode_validation(files: Sequence[str], size: int, workers: int) -> Pixels:
    """Decode the pictures that models are validated on, by Pillow and torchvision's own recipe.

    Returns:
        uint8 [n, size, size, 3], RGB, 0-255: mapped from a temporary file without a name, which goes with
        this process.

    Raises:
        DatasetError: a picture cannot be decoded.
    """
    transform = transforms.Compose(resize_transforms("eval", size))

    def decode(file: str) -> Pixels:
        try:
            return np.asarray(transform(pil_loader(file)))
        except (OSError, SyntaxError, ValueError) as error:
            raise DatasetError(str(error), path=file) from error

    with tempfile.TemporaryFile() as file, ThreadPoolExecutor(max(1, workers)) as pool:
        pixels = np.memmap(file, np.uint8, "w+", shape=(len(files), size, size, 3))
        for number, picture in enumerate(pool.map(decode, files)):
            pixels[number] = picture
    return pixels


def write_splits(path: Path, tree: Path, per_class: int) -> tuple[int, int]:
    """Write a list for `precache convert --splits` that trains with `per_class` pictures of each class.

    The other pictures validate. With 30 this is the usual protocol of Caltech-101: Fei-Fei, Fergus, Perona,
    "Learning generative visual models from few training examples" (2004), and later papers. The choice in a
    class depends on the class alone.

    Returns:
        Number of pictures that train, and of those that validate.

    Raises:
        SettingError: a class has no more pictures than `per_class`.
    """
    check_range("per_class", per_class, 1)
    scan = scan_tree(tree)
    samples = list(scan.samples)
    labels = np.array([sample.label for sample in samples])
    lines, trained = [("path", "split")], 0
    for label, name in enumerate(scan.classes):
        rows = np.flatnonzero(labels == label)
        if len(rows) <= per_class:
            raise SettingError(
                f"per_class {per_class}: class {name!r} of {scan.root} has {len(rows)} pictures, and none "
                f"would be left to validate",
                remedy="give less",
            )
        train_rows = set(np.random.default_rng((0, label)).permutation(rows)[:per_class].tolist())
        lines += [(samples[row].path, "train" if row in train_rows else "val") for row in rows.tolist()]
        trained += per_class
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    with atomic_write(path) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    return trained, len(samples) - trained
