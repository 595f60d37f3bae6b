"""Larger photographs out of small ones, to measure conversions on: what `bench photos` writes.

Neighbouring pictures of a tree are set side by side in a grid, which is then resized. A plain
enlargement of one picture would be smoother, and so a smaller JPEG, than a photograph of that size is.
"""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from precache import executors, images, jpeg
from precache.console.progress import Progress, unseen
from precache.errors import check_range
from precache.sources.base import check_apart
from precache.sources.tree import TreeSource, scan_tree
from precache.storage import atomic_folder, check_new_folder

_CELL = (300, 200)
_SPREAD = 0.3  # sides are up to this share longer or shorter than the mean
_TAG = 21
_QUALITY = 90


@dataclass(frozen=True, slots=True)
class _Task:
    cells: tuple[str, ...]
    size: tuple[int, int]
    path: Path


def make_photos(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    mean: tuple[int, int],
    pictures: int,
    on_progress: Progress = unseen,
) -> None:
    """Write `pictures` JPEGs of quality 90, `mean` (width, height) in size on average, in class folders.

    Raises:
        SourceError: `source` is no image tree.
        SettingError: a value is out of range, or `destination` is not empty.
    """
    for name, value in (("width", mean[0]), ("height", mean[1])):
        check_range(name, value, 8, images.MAX_SIZE)
    scan = scan_tree(source)
    check_range("pictures", pictures, 1, len(scan.samples))
    destination = Path(destination)
    check_apart(TreeSource(Path(source)), destination)
    check_new_folder(destination)
    columns = max(1, round(mean[0] / _CELL[0]))
    report = executors.counted(on_progress, pictures)

    with atomic_folder(destination) as folder:
        tasks = []
        for number in range(pictures):
            first = number * len(scan.samples) // pictures
            refs = [scan.samples[(first + cell) % len(scan.samples)] for cell in range(columns**2)]
            factors = np.random.default_rng((_TAG, number)).uniform(1 - _SPREAD, 1 + _SPREAD, 2)
            width, height = (round(side * factor) for side, factor in zip(mean, factors, strict=True))
            path = folder / scan.classes[refs[0].label] / f"{number:06d}.jpg"
            path.parent.mkdir(exist_ok=True)
            cells = tuple(f"{scan.root}/{ref.path}" for ref in refs)
            tasks.append(_Task(cells, (width, height), path))
        workers = min(executors.available_cpus(), pictures)
        with closing(executors.run(_write_photo, tasks, workers, report)) as finished:
            for _ in finished:
                pass


def _write_photo(task: _Task, tick: Callable[[], None]) -> None:
    columns = round(len(task.cells) ** 0.5)
    width, height = _CELL
    grid = Image.new("RGB", (columns * width, columns * height))
    for number, path in enumerate(task.cells):
        cell = images.decode(images.read_bytes(path), path).resize(_CELL, Image.Resampling.BICUBIC)
        grid.paste(cell, (number % columns * width, number // columns * height))
    photo = grid.resize(task.size, Image.Resampling.BICUBIC)
    task.path.write_bytes(jpeg.encode_jpeg(np.asarray(photo), _QUALITY))
    tick()
