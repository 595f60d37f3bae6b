"""Trainings one after the other, each kept when it is finished, and after every epoch."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.machine.nvml import energy_j
from bench.machine.others import OtherProcesses
from bench.measure.training import Recipe, Training
from bench.measure.training_sources import Open
from bench.measure.trainings_file import Line, Trainings, check_same
from precache.console.progress import Progress, tells
from precache.errors import DatasetError, PrecacheError, SettingError
from precache.storage import atomic_write

_CURVE = 10
"""How often a model is tried while it is trained, or each epoch where those are fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all trainings of a run have in common.

    Attributes:
        images, labels: to try the models on: uint8 [n, side, side, 3], int64 [n].
        conditions: JSON; what must be the same for results to be compared.
        batches: of an epoch.
        machine: of `describe_machine`.
        folder: where unfinished trainings are kept.
    """

    recipe: Recipe
    classes: int
    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    batches: int
    device: torch.device
    conditions: Mapping[str, Any]
    machine: Mapping[str, str]
    folder: Path


@dataclass(frozen=True, slots=True)
class Source:
    """An arm, as far as a training knows it.

    Attributes:
        told: JSON; what must be the same for a training to go on.
    """

    name: str
    open: Open
    told: Mapping[str, Any]


def run(task: Task, sources: Sequence[Source], seeds: Sequence[int], done: Trainings, bar: Progress) -> None:
    """Train what `done` lacks: all sources of a seed, then those of the next.

    The sources take turns in being the first of a seed: what warms up or slows down with time meets all.
    """
    order = [(source, seed) for n, seed in enumerate(seeds) for source in _rotated(sources, n)]
    missing = [(source, seed) for source, seed in order if (source.name, seed) not in done.done]
    epochs = task.recipe.epochs
    total, before = len(order) * epochs, (len(order) - len(missing)) * epochs
    bar(before, total)
    for source, seed in missing:
        with tells(partial(_told, source, seed)):
            done.add(train(task, source, seed, partial(_report, bar, before, total)))
        _kept(task, source, seed).unlink(missing_ok=True)
        before += epochs


def check_opens(sources: Sequence[Source], seeds: Sequence[int], done: Trainings) -> None:
    """SettingError for a loader that cannot be opened: now, not after hours of others' trainings."""
    for source in sources:
        if any((source.name, seed) not in done.done for seed in seeds):
            try:
                with source.open(seeds[0]):
                    pass
            except PrecacheError as error:
                raise SettingError(f"arm {source.name}: {error}") from error


def _told(source: Source, seed: int) -> str:
    return (
        f"in the training of {source.name}, seed {seed}; finished trainings and epochs are kept, and the "
        f"same command goes on"
    )


def _report(bar: Progress, before: int, total: int, epoch: int) -> None:
    bar(before + epoch, total)


def train(task: Task, source: Source, seed: int, on_epoch: Callable[[int], None]) -> Line:
    """One training, from its last finished epoch on; the line that `Trainings` keeps.

    Raises:
        SettingError: what is kept of it was trained otherwise.
        DatasetError: an epoch has more or fewer batches than those of other sources.
    """
    recipe, kept = task.recipe, _kept(task, source, seed)
    with source.open(seed) as feed:
        steps = recipe.epochs * task.batches
        training = Training(recipe, task.classes, steps, seed, task.device)
        line = _load(kept, training, task, source, seed)
        for epoch in range(line["epochs"], recipe.epochs):
            _epoch(training, feed, epoch, line)
            if training.step != (epoch + 1) * task.batches:
                raise DatasetError(
                    f"{source.name}: after epoch {epoch} {training.step:,} batches were served, expected "
                    f"{(epoch + 1) * task.batches:,}: it does not serve the same pictures as the others"
                )
            if (epoch + 1) % max(1, recipe.epochs // _CURVE) == 0 or epoch + 1 == recipe.epochs:
                right = training.right(task.images, task.labels)
                line["curve"].append([epoch + 1, 100 * right / len(task.labels), line["train_s"]])
            if epoch + 1 < recipe.epochs:
                with atomic_write(kept) as file:
                    torch.save({"line": line, "training": training.state()}, file)
            on_epoch(epoch + 1)
    line["other_cpu"] = line["other_cpu_s"] / line["train_s"] if line["train_s"] else 0.0
    del line["other_cpu_s"]
    return {**line, "classes": task.classes, "steps": steps, "images": steps * recipe.batch_size}


def _epoch(training: Training, feed: Any, epoch: int, line: Line) -> None:
    others, energy = OtherProcesses(), energy_j(training.device)
    start_s = time.perf_counter()
    feed.set_epoch(epoch)
    training.train(feed)
    lasted_s = time.perf_counter() - start_s
    now = energy_j(training.device)
    line["epochs"] = epoch + 1
    line["train_s"] += lasted_s
    line["other_cpu_s"] += lasted_s * (others.share() or 0.0)
    line["energy_j"] = None if None in (energy, now, line["energy_j"]) else line["energy_j"] + now - energy


def _load(kept: Path, training: Training, task: Task, source: Source, seed: int) -> Line:
    """What is known of the training, which is brought to the epoch that it stands at."""
    same = {"conditions": task.conditions, "source": source.told, "machine": task.machine}
    if not kept.exists():
        begun = {"curve": [], "train_s": 0.0, "energy_j": 0.0, "other_cpu_s": 0.0, "resumed": 0, "epochs": 0}
        return {"arm": source.name, "seed": seed, **same, **begun}
    state = torch.load(kept, map_location=task.device, weights_only=True)
    check_same(f"{kept}: this training", state["line"], same)
    training.load_state(state["training"])
    line: Line = state["line"]
    line["resumed"] += 1
    return line


def _kept(task: Task, source: Source, seed: int) -> Path:
    return task.folder / f"unfinished-{source.name}-{seed}.pt"


def _rotated(sources: Sequence[Source], by: int) -> list[Source]:
    first = by % len(sources)
    return [*sources[first:], *sources[:first]]
