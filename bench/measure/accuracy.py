"""What `bench accuracy` compares: sources of the same pictures; and trainings from each, one after the other.

Finished trainings are lines of a file, so that a run that was killed goes on:

    {"arm": "crop", "seed": 0, "conditions": {...}, "source": {...}, "machine": {...}, "epochs": 40,
     "curve": [[2, 31.4, 8.1], ...], "train_s": 162.0, "classes": 102, "steps": 1880, "images": 120320,
     "other_cpu": 0.01, "resumed": 0}

`arm`: the name of the source. `curve`: epochs done, top-1 in percent, seconds of training until then,
evaluations left out. An unfinished training is a file of its own, written after every epoch.
"""

import csv
import hashlib
import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import PIL
import torch
import torchvision
from torchvision import transforms
from torchvision.datasets.folder import pil_loader

import loaders
from bench.machine.hardware import DTYPES
from bench.machine.monitor import OtherProcesses
from bench.measure.candidates import CHOICES, READS
from bench.measure.imagefolder import NAME as IMAGEFOLDER
from bench.measure.imagefolder import ImageFolderLoader, shape
from bench.measure.lines import Lines, check_same
from bench.measure.settings import LAST, check_fills_batch
from loaders.augment import RandomAugmentation, augment_batch
from loaders.batch import Batch
from loaders.dataset import RAW, SplitData, open_split
from loaders.examples.models import MODELS, build_model, build_optimizer, check_size
from loaders.examples.train import Learner
from loaders.read import choose_backend
from loaders.transfer import normalise
from precache.errors import DatasetError, PrecacheError, SettingError, check_choice, check_range
from precache.reporting import Progress, tells
from precache.sources.tree import scan_tree
from precache.storage import atomic_write
from precache.storage.urls import Location, locate

AUGMENT = ("auto", "cpu", "device")
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)=(.*)", re.DOTALL)
_CURVE = 10
"""How often a model is tried while it is trained, or each epoch where those are fewer."""
Line = dict[str, Any]
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

    @property
    def conditions(self) -> dict[str, Any]:
        """JSON: what must be the same for two trainings to be compared."""
        return {**asdict(self), "device": str(self.device), "threads": torch.get_num_threads()}

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
    def told(self) -> dict[str, str]:
        """JSON: what must be the same for a training to go on, and backend and folder in words."""
        more = "" if self.augment == "auto" else f", augment {self.augment}"
        return {
            "backend": self.backend,
            "augment": self.augment,
            "data": self.data.digest,
            "described": f"{self.backend} on {self.path}{more}",
        }

    def open(self, pictures: Pictures, recipe: Recipe, seed: int) -> Feed:
        """The loader of a training with that seed."""
        if self.backend == IMAGEFOLDER:
            return _open_imagefolder(pictures, recipe, seed)
        backend: Any = self.backend  # `loaders.build` knows its name
        augment: Any = "train"
        if self.augment == "device":
            if self.data.varies:  # a function would be given the middle of each
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
        machine: of `bench.machine.hardware.describe_machine`.
        folder: where trainings are kept.
    """

    recipe: Recipe
    pictures: Pictures
    machine: dict[str, str]
    folder: Path

    def __post_init__(self) -> None:
        check_fills_batch(self.recipe.batch_size, len(self.pictures.train))

    @property
    def batches(self) -> int:
        """Of an epoch."""
        return len(self.pictures.train) // self.recipe.batch_size

    def validation(self) -> Iterator[Batch]:
        """The pictures that models are tried on, as they take them."""
        val, recipe = self.pictures.val, self.recipe
        pictures = validation_pictures(self.pictures.files(val), recipe.size, self.folder, recipe.workers)
        for start in range(0, len(val), _EVALUATED):
            rows = val[start : start + _EVALUATED]
            pixels = torch.from_numpy(np.array(pictures[start : start + _EVALUATED])).to(recipe.device)
            labels = torch.from_numpy(np.asarray(self.pictures.tree.labels[rows])).to(recipe.device)
            images = normalise(pixels.permute(0, 3, 1, 2), torch.float32)
            yield Batch(images, labels, torch.from_numpy(np.asarray(self.pictures.tree.ids[rows])))

    def same(self, source: Source) -> dict[str, dict[str, Any]]:
        """JSON: what must be the same for trainings to be compared, or gone on with."""
        conditions = {**self.recipe.conditions, "pictures": self.pictures.digest}
        return {"conditions": conditions, "source": source.told, "machine": self.machine}

    def kept(self, source: Source, seed: int) -> Path:
        """The file of an unfinished training."""
        return self.folder / f"unfinished-{source.name}-{seed}.pt"


def run(task: Task, sources: Sequence[Source], seeds: Sequence[int], bar: Progress) -> list[Line]:
    """The trainings of these sources and seeds, source by source; those that are not kept yet are done.

    All sources of a seed come before those of the next, and they take turns in being the first: what warms
    up or slows down with time meets all.

    Raises:
        SettingError: the folder has trainings of other settings, or a loader cannot be opened.
    """
    file = Lines(task.folder / "trainings.jsonl", "bench accuracy")
    try:
        done = {(line["arm"], line["seed"]): line for line in file.found}
    except (KeyError, TypeError) as error:
        raise file.error(error) from error
    of = {source.name: source for source in sources}
    for (name, seed), line in done.items():
        if name in of:
            check_same(f"{file.path}, {name} with seed {seed}", line, task.same(of[name]))
    missing = [
        (source, seed)
        for turn, seed in enumerate(seeds)
        for source in (sources[(turn + at) % len(sources)] for at in range(len(sources)))
        if (source.name, seed) not in done
    ]
    for source, seed in {source.name: (source, seed) for source, seed in missing}.values():
        try:  # now, not after hours of others' trainings
            with source.open(task.pictures, task.recipe, seed):
                pass
        except PrecacheError as error:
            raise SettingError(f"source {source.name}: {error}") from error
    total = len(sources) * len(seeds) * task.recipe.epochs
    before = total - len(missing) * task.recipe.epochs
    bar(before, total)

    def show(epoch: int) -> None:
        bar(before + epoch, total)

    for source, seed in missing:
        done[source.name, seed] = train(task, source, seed, show)
        file.add(done[source.name, seed])
        task.kept(source, seed).unlink(missing_ok=True)
        before += task.recipe.epochs
    return [done[source.name, seed] for source in sources for seed in seeds]


def train(task: Task, source: Source, seed: int, on_epoch: Callable[[int], None]) -> Line:
    """One training, from its last finished epoch on; its line.

    Raises:
        SettingError: what is kept of it was trained otherwise.
        DatasetError: an epoch has more or fewer batches than those of other sources.
    """
    recipe, kept, classes = task.recipe, task.kept(source, seed), len(task.pictures.tree.classes)
    steps = recipe.epochs * task.batches
    told = (
        f"in the training of {source.name}, seed {seed}; finished trainings and epochs are kept, and the "
        f"same command goes on"
    )
    with tells(lambda: told), source.open(task.pictures, recipe, seed) as feed:
        learner = recipe.learner(classes, steps, seed)
        line = _begun(task, source, seed, learner)
        for epoch in range(line["epochs"], recipe.epochs):
            _train_epoch(learner, feed, epoch, line)
            if learner.schedule.last_epoch != (epoch + 1) * task.batches:
                raise DatasetError(
                    f"{source.name}: after epoch {epoch} {learner.schedule.last_epoch:,} batches were served, "
                    f"expected {(epoch + 1) * task.batches:,}: it does not serve the same pictures as the others"
                )
            if (epoch + 1) % max(1, recipe.epochs // _CURVE) == 0 or epoch + 1 == recipe.epochs:
                top1 = 100 * learner.validate(task.validation())["validation_accuracy"]
                line["curve"].append([epoch + 1, top1, line["train_s"]])
            if epoch + 1 < recipe.epochs:
                with atomic_write(kept) as file:
                    torch.save({"line": line, "training": learner.state_dict()}, file)
            on_epoch(epoch + 1)
    line["other_cpu"] = line["other_cpu_s"] / line["train_s"] if line["train_s"] else 0.0
    del line["other_cpu_s"]
    return {**line, "classes": classes, "steps": steps, "images": steps * recipe.batch_size}


def _begun(task: Task, source: Source, seed: int, learner: Learner) -> Line:
    """What is known of the training, which is brought to the epoch that it stands at."""
    same, kept = task.same(source), task.kept(source, seed)
    if not kept.exists():
        begun = {"curve": [], "train_s": 0.0, "other_cpu_s": 0.0, "resumed": 0, "epochs": 0}
        return {"arm": source.name, "seed": seed, **same, **begun}
    state = torch.load(kept, map_location=task.recipe.device, weights_only=True)
    check_same(str(kept), state["line"], same)
    learner.load_state_dict(state["training"])
    line: Line = state["line"]
    line["resumed"] += 1
    return line


def _train_epoch(learner: Learner, feed: Feed, epoch: int, line: Line) -> None:
    """One epoch; its time is added to the line."""
    others = OtherProcesses()
    start_s = time.perf_counter()
    feed.set_epoch(epoch)
    learner.train(batch.to(learner.device, non_blocking=True) for batch in feed)
    lasted_s = time.perf_counter() - start_s
    line["epochs"] = epoch + 1
    line["train_s"] += lasted_s
    line["other_cpu_s"] += lasted_s * (others.share() or 0.0)


def validation_pictures(files: Sequence[str], size: int, folder: Path, workers: int) -> Pixels:
    """uint8 [n, size, size, 3], RGB: what every model is tried on, by torchvision's own recipe and Pillow.

    They are decoded once, and kept in a file of `folder` that is named after what made them.

    Raises:
        DatasetError: a picture cannot be decoded.
    """
    stats = [(file, (stat := os.stat(file)).st_size, stat.st_mtime_ns) for file in files]
    made_by = json.dumps([size, PIL.__version__, torchvision.__version__, stats])
    path = folder / f"validation-{hashlib.sha256(made_by.encode()).hexdigest()[:16]}.npy"
    if not path.exists():
        recipe = transforms.Compose(shape("eval", size))

        def decode(file: str) -> Pixels:
            try:
                return np.asarray(recipe(pil_loader(file)))
            except (OSError, SyntaxError, ValueError) as error:
                raise DatasetError(f"{file}: {error}") from error

        with ThreadPoolExecutor(max(1, workers)) as pool, atomic_write(path) as kept:
            pixels = np.empty((len(files), size, size, 3), np.uint8)
            for number, picture in enumerate(pool.map(decode, files)):
                pixels[number] = picture
            np.save(kept, pixels)
    return cast(Pixels, np.load(path, mmap_mode="r"))


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
