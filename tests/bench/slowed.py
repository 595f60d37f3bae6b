"""Stages of a loader that sleep, so that what they take does not depend on the machine."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

from bench.measure.trainers import EmulatedTrainer
from loaders.batch import Batch
from loaders.transfer import Pipeline
from precache.pictures import images

BATCH = 8


def make_tree(root: Path) -> Path:
    """48 pictures so small that decoding them takes no time."""
    for number in range(48):
        folder = root / f"{number % 2:03}.class"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng((1, number)).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return root


def later(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, `seconds` later."""

    def slowed(*arguments: Any, **settings: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **settings)

    return slowed


@contextmanager
def slow(picture_s: dict[str, float]) -> Iterator[None]:
    """Stages that sleep so long per picture, in the process of a trial; `compute`, if given, only sleeps."""

    def step(trainer: EmulatedTrainer, batch: Batch) -> None:
        time.sleep(picture_s["compute"] * len(batch.labels))

    with (
        patch.object(images, "read_bytes", later(picture_s["storage"], images.read_bytes)),
        patch.object(images, "decode_for", later(picture_s["decode"], images.decode_for)),
        patch.object(Pipeline, "send", later(BATCH * picture_s["transfer"], Pipeline.send)),
        patch.object(EmulatedTrainer, "step", step if "compute" in picture_s else EmulatedTrainer.step),
    ):
        yield
