"""Trainings of the same model from several sources of the same pictures, one after the other.

A training is a trial, `{"source": "crop", "seed": 0}`, so that a run that was killed goes on. The one that is
under way is kept in a file beside that of the trials, written after every epoch.
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
from bench.measure.imagefolder import ImageFolderLoader, shape
from bench.measure.settings import LAST, check_fills_batch
from bench.measure.trials import Trials, is_kept
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
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)=(.*)", re.DOTALL)
_CURVE = 10
"""How often a model is tried while it is trained, or each epoch where those are fewer."""
Feed = loaders.Loader | ImageFolderLoader
Positions = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]
_EVALUATED = 250  # pictures at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What one training does, but for its seed and where its pictures come from.

    Attributes:
        model: of `loaders.examples.models.MODELS`.
        size: side of the pictures, pixels.
        epochs: each of all full batches.
        batch_size: samples per step.
        lr: the highest learning rate.
        amp: precision that the model computes in: "bf16", "fp16", or "off" for float32.
        workers: of each loader.
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

    def learner(self, classes: int, steps: int, seed: int) -> Learner:
        """The model at the begin of a training of so many steps; `seed` is that of its weights."""
        model = build_model(self.model, classes, seed).to(self.device)
        optimizer, schedule = build_optimizer(self.model, model, steps, self.lr)
        return Learner(model, optimizer, schedule, dtype=DTYPES[self.amp])


@dataclass(frozen=True)
class Pictures:
    """Which pictures of the raw tree are trained with, and which every model is tried on.

    Attributes:
        tree: all of it.
        train, val: int64 [n], ascending positions in `tree`.
    """

    tree: SplitData
    train: Positions
    val: Positions

    @cached_property
    def digest(self) -> str:
        """Of both, with the classes, hex."""
        told = [
            [[self.tree.path_at(at), int(self.tree.labels[at])] for at in part.tolist()]
            for part in (self.train, self.val)
        ]
        return hashlib.sha256(json.dumps([self.tree.classes, told]).encode()).hexdigest()

    def files(self, positions: Positions) -> list[str]:
        """Paths of the pictures at these positions."""
        return [self.tree.files[position] for position in positions.tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A loader that serves the training pictures in its own way.

    Attributes:
        name: in tables and files.
        backend: of `bench.measure.candidates.CHOICES`.
        path: of what it reads.
        data: what that holds, of a converted folder the split train.
        augment: where pictures are cropped and mirrored: by the loader's own choice, by its threads, or by
            the arithmetic that a GPU does, on whichever device trains.
    """

    name: str
    backend: str
    path: Location
    data: SplitData
    augment: str = "auto"

    @property
    def described(self) -> dict[str, Any]:
        """Plain values: backend and folder in words, and what must be the same for a training to go on."""
        where = "" if self.augment == "auto" else f", augment {self.augment}"
        return {
            "name": f"{self.backend} on {self.path}{where}",
            "samples": len(self.data),
            "digest": f"{self.backend} {self.augment} {self.data.digest}",
        }

    def open(self, pictures: Pictures, recipe: Recipe, seed: int) -> Feed:
        """The loader of a training with that seed."""
        if self.backend == IMAGEFOLDER:
            return _open_imagefolder(pictures, recipe, seed)
        backend: Any = self.backend  # `loaders.build` knows its name
        augment: Any = "train"
        if self.augment == "device":
            if self.data.has_varying_sizes:  # a function would be given the middle of each
                raise SettingError(
                    f"augment: {self.path} holds pictures of varying size, and a device crops those of one "
                    f"size; leave out augment=device, or convert with --fit crop"
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


def _open_imagefolder(pictures: Pictures, recipe: Recipe, seed: int) -> ImageFolderLoader:
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
            f"{root}: ImageFolder finds {loader.samples:,} of the {len(files):,} training pictures; move "
            f"pictures that lie deeper than their class folder"
        )
    return loader


def open_source(text: str, tree: Path) -> Source:
    """What is written `NAME=BACKEND:FOLDER,augment=cpu` or, short of it, FOLDER; or BACKEND alone, on `tree`.

    Raises:
        SettingError: an unknown backend or augment, or no folder.
        DatasetError: the folder cannot be read, by this backend or at all.
    """
    named = _NAME.fullmatch(text)
    name, rest = (named[1], named[2]) if named else ("", text)
    rest, _, augment = rest.partition(",augment=")
    backend, colon, folder = rest.partition(":")
    reads_tree = RAW in READS.get(rest, ())
    if reads_tree:
        backend, folder = rest, str(tree)
    elif not colon or folder.startswith("//"):
        backend, folder = "auto", rest
    check_choice("augment", augment or "auto", AUGMENT)
    check_choice("backend", backend, [*CHOICES, "auto"])
    if not folder:
        raise SettingError(
            f"source {text!r} names no folder; write NAME=BACKEND:FOLDER, such as crop=shards:data/shards"
        )
    path = locate(folder)
    data = open_split(path, "train")
    if backend != IMAGEFOLDER:
        backend = choose_backend(backend, data.kind, path)
    elif data.kind != RAW:
        raise DatasetError(f"{path}: holds {data.kind}, {IMAGEFOLDER} reads a tree of pictures; name that")
    own_name = rest if reads_tree else path.name
    return Source(name=name or own_name, backend=backend, path=path, data=data, augment=augment or "auto")


def find_pictures(tree: Path, sources: Sequence[Source]) -> Pictures:
    """The pictures that all sources train with, and which the models are tried on.

    Raises:
        SettingError: two sources of one name, or none says which pictures are trained with.
        DatasetError: a source trains with other pictures or other labels.
    """
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise SettingError(
                f"two sources are called {name!r}; give each a name of its own: NAME=BACKEND:FOLDER"
            )
    whole = open_split(tree, "train")
    listed = _held(whole)
    splits: dict[str, tuple[Location, set[tuple[str, str]]]] = {}
    for path, data in ((source.path, source.data) for source in sources):
        if data.kind == RAW:
            if data.digest != whole.digest:
                raise DatasetError(f"{path}: is another tree than {tree}; name that, or what was made of it")
            continue
        made_of = "name the tree that it was converted from, or convert it again"
        for split, held in {"train": set(_held(data)), "val": set(_held(_open_val(path)))}.items():
            if foreign := held.difference(listed):
                picture, name = min(foreign)
                raise DatasetError(f"{path}: has {picture} in class {name!r}, but {tree} does not; {made_of}")
            first, expected = splits.setdefault(split, (path, held))
            if apart := held ^ expected:
                raise DatasetError(
                    f"{path}: its split {split} holds {len(held):,} pictures, that of {first} "
                    f"{len(expected):,}, and {min(apart)[0]} is in only one of them; convert both with the "
                    f"same --splits"
                )
        if data.classes != whole.classes:  # one without pictures would move the numbers of those behind it
            raise DatasetError(f"{path}: has other classes than {tree}; {made_of}")
    if not splits:
        raise SettingError(
            f"no source says which pictures of {tree} train and which validate; add a folder that was "
            f"converted with --splits, which has the splits train and val"
        )
    train, val = (
        np.array([at for at, each in enumerate(listed) if each in splits[split][1]], np.int64)
        for split in ("train", "val")
    )
    return Pictures(whole, train, val)


def _held(data: SplitData) -> list[tuple[str, str]]:
    """Path and class of each sample."""
    labels = np.asarray(data.labels[:]).tolist()
    return [(data.path_at(position), data.classes[label]) for position, label in enumerate(labels)]


def _open_val(path: Location) -> SplitData:
    try:
        return open_split(path, "val")
    except SettingError as error:
        raise DatasetError(
            f"{path}: {error}; convert with --splits FILE, of lines path,train and path,val"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all trainings of a run have in common.

    Attributes:
        unfinished: file of the training that is under way; None: it is not kept.
    """

    recipe: Recipe
    pictures: Pictures
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
        """Plain values: what must be the same for two trainings to be compared."""
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
    def _validated(self) -> Pixels:
        return decode_validation(
            self.pictures.files(self.pictures.val), self.recipe.size, self.recipe.workers
        )

    def validation(self) -> Iterator[Batch]:
        """Batches of the pictures that models are tried on."""
        tree, device = self.pictures.tree, self.recipe.device
        for start in range(0, len(self.pictures.val), _EVALUATED):
            rows = self.pictures.val[start : start + _EVALUATED]
            pixels = torch.from_numpy(np.array(self._validated[start : start + _EVALUATED])).to(device)
            labels = torch.from_numpy(np.asarray(tree.labels[rows])).to(device)
            images = normalise(pixels.permute(0, 3, 1, 2), torch.float32)
            yield Batch(images, labels, torch.from_numpy(np.asarray(tree.ids[rows])))


def compare_sources(
    sources: Sequence[Source],
    pictures: Pictures,
    recipe: Recipe,
    seeds: Sequence[int],
    path: Path | None,
    on_progress: Progress,
    margin: float = 1.0,
) -> Result:
    """Train from each source with each seed; the first source is the baseline.

    All sources of a seed come before those of the next, and they take turns in being the first: what warms
    up or slows down with time meets all.

    Args:
        path: file that keeps the trials; the training under way is kept beside it.
        margin: points of top-1 that do not matter.

    Raises:
        SettingError: the file has trainings of other settings, or a loader cannot be opened.
    """
    unfinished = None
    if path is not None and is_kept(path):
        unfinished = path.with_name(f"{path.name}.unfinished")
    task = Task(recipe=recipe, pictures=pictures, unfinished=unfinished)
    settings = {
        **task.settings,
        "seeds": list(seeds),
        "repeats": len(seeds),
        "baseline": sources[0].name,
        "margin": margin,
        "data": {source.name: source.described for source in sources},
    }
    trials = Trials(path, "accuracy", describe_machine(recipe.device), settings)
    missing = [
        (source, seed)
        for turn, seed in enumerate(seeds)
        for source in (sources[(turn + at) % len(sources)] for at in range(len(sources)))
        if trials.find(_of(source, seed)) is None
    ]
    for source in sources:
        if any(source is other for other, _ in missing):
            try:  # now, not after hours of others' trainings
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


def _of(source: Source, seed: int) -> dict[str, Any]:
    return {"source": source.name, "seed": seed}


@dataclass
class PartialTraining:
    """A training up to an epoch.

    Attributes:
        epochs: that are done.
        train_s: seconds of them, without evaluations.
        other_cpu_s: the part of these that other processes took of the CPUs.
        resumed: how often it was gone on with.
        curve: (epochs done, top-1 accuracy, train_s) of each time that the model was tried.
    """

    epochs: int = 0
    train_s: float = 0.0
    other_cpu_s: float = 0.0
    resumed: int = 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def trial(self, of: dict[str, Any]) -> Trial:
        """What it measured."""
        epochs, top1, train_s = zip(*self.curve, strict=True)
        return Trial(
            of,
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
    """One training, from its last finished epoch on.

    Raises:
        DatasetError: an epoch has more or fewer batches than those of other sources.
    """
    recipe = task.recipe
    with source.open(task.pictures, recipe, seed) as feed:
        learner = recipe.learner(len(task.pictures.tree.classes), task.steps, seed)
        same = {**task.settings, **_of(source, seed), **source.described}
        done = _resume(task, same, learner)
        for epoch in range(done.epochs, recipe.epochs):
            _train_epoch(learner, feed, epoch, done)
            served = learner.schedule.last_epoch
            if served != (epoch + 1) * task.batches:
                raise DatasetError(
                    f"{source.name}: after epoch {epoch} {served:,} batches were served, expected "
                    f"{(epoch + 1) * task.batches:,}: it does not serve the same pictures as the others"
                )
            if (epoch + 1) % max(1, recipe.epochs // _CURVE) == 0 or epoch + 1 == recipe.epochs:
                top1 = learner.validate(task.validation())["validation_accuracy"]
                done.curve.append((epoch + 1, top1, done.train_s))
            if task.unfinished is not None:
                with atomic_write(task.unfinished) as file:
                    torch.save({"same": same, "done": asdict(done), "learner": learner.state_dict()}, file)
            on_epoch(epoch + 1)
    return done.trial(_of(source, seed))


def _resume(task: Task, same: dict[str, Any], learner: Learner) -> PartialTraining:
    """Bring `learner` to where the unfinished training of the same settings stands, if there is one."""
    if task.unfinished is None or not task.unfinished.exists():
        return PartialTraining()
    kept = torch.load(task.unfinished, map_location=task.recipe.device, weights_only=True)
    if kept["same"] != same:
        return PartialTraining()
    learner.load_state_dict(kept["learner"])
    done = PartialTraining(**kept["done"])
    done.resumed += 1
    return done


def _train_epoch(learner: Learner, feed: Feed, epoch: int, done: PartialTraining) -> None:
    """One epoch; its time is added to `done`."""
    others = OtherProcesses()
    start_s = time.perf_counter()
    feed.set_epoch(epoch)
    learner.train(batch.to(learner.device, non_blocking=True) for batch in feed)
    lasted_s = time.perf_counter() - start_s
    done.epochs = epoch + 1
    done.train_s += lasted_s
    done.other_cpu_s += lasted_s * (others.share() or 0.0)


def decode_validation(files: Sequence[str], size: int, workers: int) -> Pixels:
    """uint8 [n, size, size, 3], RGB: what every model is tried on, by torchvision's own recipe and Pillow.

    They are decoded once, into a file without a name that goes with this process.

    Raises:
        DatasetError: a picture cannot be decoded.
    """
    recipe = transforms.Compose(shape("eval", size))

    def decode(file: str) -> Pixels:
        try:
            return np.asarray(recipe(pil_loader(file)))
        except (OSError, SyntaxError, ValueError) as error:
            raise DatasetError(f"{file}: {error}") from error

    with tempfile.TemporaryFile() as file, ThreadPoolExecutor(max(1, workers)) as pool:
        pixels = np.memmap(file, np.uint8, "w+", shape=(len(files), size, size, 3))
        for number, picture in enumerate(pool.map(decode, files)):
            pixels[number] = picture
    return pixels


def write_splits(path: Path, tree: Path, per_class: int) -> tuple[int, int]:
    """Write a list for `precache convert --splits`: so many pictures of each class train, others validate.

    With 30 this is how Caltech-101 is used: Fei-Fei, Fergus, Perona, "Learning generative visual models from
    few training examples" (2004), and those after it. Which ones train depends on the class alone.

    Returns:
        How many train and validate.

    Raises:
        SettingError: a class has not more pictures than that.
    """
    check_range("per_class", per_class, 1)
    scan = scan_tree(tree)
    samples = list(scan.samples)
    labels = np.array([sample.label for sample in samples])
    listed, trained = [("path", "split")], 0
    for label, name in enumerate(scan.classes):
        rows = np.flatnonzero(labels == label)
        if len(rows) <= per_class:
            raise SettingError(
                f"per_class {per_class}: class {name!r} of {scan.root} has {len(rows)} pictures, and none "
                f"would be left to validate; give less"
            )
        chosen = set(np.random.default_rng((0, label)).permutation(rows)[:per_class].tolist())
        listed += [(samples[row].path, "train" if row in chosen else "val") for row in rows.tolist()]
        trained += per_class
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(listed)
    with atomic_write(path) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    return trained, len(samples) - trained
