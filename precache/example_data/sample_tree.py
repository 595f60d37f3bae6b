"""A generated image tree, for trying things out and for tests; what is on its pictures: `sample_pictures`."""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from precache import executors
from precache.console.progress import Progress, unseen
from precache.errors import check_choice, check_range
from precache.example_data.sample_pictures import LIKE
from precache.storage import atomic_folder, check_new_folder

_TAG = 2
_NAMES = (
    "anchor", "basket", "candle", "drum", "easel", "feather", "guitar", "harp",
    "ivy", "jar", "kettle", "lantern", "mask", "needle", "oar", "piano",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Task:
    folder: Path
    label: int
    classes: int
    images: int
    first_index: int
    seed: int
    like: str

    @property
    def name(self) -> str:
        """How errors call it."""
        return self.folder.name


def make_sample(
    destination: str | os.PathLike[str],
    *,
    images: int = 512,
    classes: int = 16,
    seed: int = 0,
    like: str = "imagenet",
    workers: int | None = None,
    on_progress: Progress = unseen,
) -> None:
    """Write `images` pictures in `classes` folders to the new folder `destination`.

    The same arguments and library versions give the same bytes, whatever `workers` is.

    Args:
        like: 'imagenet': as large in pixels and bytes as ImageNet's photographs, so that decoding costs the
            same; RGB JPEGs, one of 32 greyscale. 'caltech': smaller, as Caltech-256's; mostly RGB JPEGs, of
            every 32 one each is greyscale, a PNG, EXIF-rotated and CMYK.
        workers: processes; default one per CPU, 0 for the calling process.
        on_progress: called with (pictures written, pictures in all).

    Raises:
        SettingError: a value is out of range, or `destination` exists and is not empty.
    """
    check_range("classes", classes, 1, 999)
    check_range("images", images, classes)
    check_range("seed", seed, 0)
    check_choice("like", like, LIKE)
    workers = executors.worker_count(workers)
    destination = Path(destination)
    check_new_folder(destination)
    bounds = np.linspace(0, images, classes + 1).astype(int).tolist()
    report = executors.counted(on_progress, images)

    with atomic_folder(destination) as folder:
        tasks = []
        for label in range(classes):
            name = _class_name(label)
            (folder / name).mkdir()
            count = bounds[label + 1] - bounds[label]
            tasks.append(_Task(folder / name, label, classes, count, bounds[label], seed, like))
        with closing(executors.run(_write_class, tasks, min(workers, classes), report)) as finished:
            for _ in finished:
                pass


def _class_name(label: int) -> str:
    repeat = label // len(_NAMES)
    return f"{label + 1:03d}.{_NAMES[label % len(_NAMES)]}{'' if repeat == 0 else f'-{repeat + 1}'}"


def _write_class(task: _Task, tick: Callable[[], None]) -> None:
    draw = LIKE[task.like]
    for number in range(task.images):
        rng = np.random.default_rng((task.seed, _TAG, task.label, number))
        drawn = draw(rng, task.label, task.classes, task.first_index + number)
        name = f"{task.label + 1:03d}_{number + 1:04d}{drawn.suffix}"
        drawn.image.save(task.folder / name, **drawn.options)
        tick()
