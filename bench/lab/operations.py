"""Time each operation of augmentation on one CPU: `loaders.augment`, and torchvision.

    python -m bench.lab.operations data/shards

Pictures of 224x224, uint8 in main memory: `loaders.augment` changes them in place, torchvision makes new ones
of Pillow's, as in most scripts. Before the crops they have the stored size. A batch is mixed as a whole; the
time is that of one of its pictures.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import cv2
import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, functional

import loaders
from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.report.table import Table
from loaders.augment.applying import apply_to_picture, plan_steps
from loaders.augment.geometry import crop_into
from loaders.augment.mixing import Mixing, mix_images
from loaders.augment.operations import Operation, Operations
from precache.pictures.jpeg import Pixels

_SIDE = 224
_PICTURES = 64
_BATCHES = 8  # mixed one after the other, as their memory is then used again
_BILINEAR = InterpolationMode.BILINEAR
_BOX = (20, 30, 180, 170)  # left, top, width and height


def _affine(picture: Any, *, shift: tuple[int, int] = (0, 0), shear: float = 0) -> Any:
    return functional.affine(picture, 0, shift, 1.0, [shear, 0.0], _BILINEAR)


def _crop(picture: Any) -> Any:
    left, top, width, height = _BOX
    return functional.resized_crop(picture, top, left, height, width, [_SIDE, _SIDE], antialias=True)


_OPERATIONS: dict[str, tuple[Operation, tuple[float, ...], Callable[[Any], Any]]] = {
    "shear by 0.3": (Operation.SHEAR_X, (0.3,), lambda image: _affine(image, shear=16.7)),
    "translate by 30 pixels": (Operation.TRANSLATE_X, (30,), lambda image: _affine(image, shift=(30, 0))),
    "rotate by 20 degrees": (Operation.ROTATE, (20,), lambda image: functional.rotate(image, 20, _BILINEAR)),
    "saturation": (Operation.SATURATION, (1.4,), lambda image: functional.adjust_saturation(image, 1.4)),
    "grey": (Operation.GREY, (), lambda image: functional.rgb_to_grayscale(image, 3)),
    "brightness": (Operation.BRIGHTNESS, (1.4,), lambda image: functional.adjust_brightness(image, 1.4)),
    "posterize": (Operation.POSTERIZE, (4,), lambda image: functional.posterize(image, 4)),
    "solarize": (Operation.SOLARIZE, (128,), lambda image: functional.solarize(image, 128)),
    "invert": (Operation.INVERT, (), functional.invert),
    "contrast": (Operation.CONTRAST, (1.4,), lambda image: functional.adjust_contrast(image, 1.4)),
    "autocontrast": (Operation.AUTOCONTRAST, (), functional.autocontrast),
    "equalize": (Operation.EQUALIZE, (), functional.equalize),
    "sharpness": (Operation.SHARPNESS, (1.4,), lambda image: functional.adjust_sharpness(image, 1.4)),
    "hue": (Operation.HUE, (0.1,), lambda image: functional.adjust_hue(image, 0.1)),
    "blur, sigma 0.5": (Operation.BLUR, (0.5,), lambda image: functional.gaussian_blur(image, [5, 5], [0.5])),
    "blur, sigma 2": (Operation.BLUR, (2,), lambda image: functional.gaussian_blur(image, [13, 13], [2.0])),
}  # fmt: skip
"""Operation, its values, and torchvision's function of a picture of Pillow's, by the name of the row."""
_COLUMNS = [FigureColumn("`loaders`", "loaders"), FigureColumn("torchvision", "torchvision")]
_MIXINGS = {"MixUp": None, "CutMix": (20, 30, 200, 200)}


def _microseconds(function: Callable[..., Any], *pictures: Pixels | Sequence[Any]) -> float:
    """Call the function with each picture, and return the microseconds of one."""
    start_s = time.perf_counter()
    for arguments in zip(*pictures, strict=True):
        function(*arguments)
    return (time.perf_counter() - start_s) * 1e6 / len(pictures[0])


def measure_crop(stored: Pixels) -> Mapping[str, float]:
    """Measure the crop, resized; `stored` are uint8 [n, height, width, 3], at least 200x200."""
    out = np.empty((len(stored), _SIDE, _SIDE, 3), np.uint8)
    pillow = [Image.fromarray(picture) for picture in stored]
    return {
        "loaders": _microseconds(
            lambda picture, space: crop_into(picture, [*_BOX], False, space), stored, out
        ),
        "torchvision": _microseconds(_crop, pillow),
    }


def measure_operation(name: str, pictures: Pixels) -> Mapping[str, float]:
    """Measure an operation of `_OPERATIONS`; `pictures` are uint8 [n, 224, 224, 3]."""
    code, values, function = _OPERATIONS[name]
    padded = np.zeros((len(pictures), 1, 4))
    padded[:, 0, : len(values)] = values
    steps = plan_steps(Operations(np.full((len(pictures), 1), code, np.int8), padded), (_SIDE, _SIDE))
    apply = partial(apply_to_picture, fill=(0, 0, 0))
    pillow = [Image.fromarray(picture) for picture in pictures]
    return {
        "loaders": _microseconds(apply, pictures.copy(), steps),
        "torchvision": _microseconds(function, pillow),
    }


def measure_mixing(name: str, pictures: Pixels) -> Mapping[str, float]:
    """Measure MixUp or CutMix, batch after batch."""
    images = torch.from_numpy(pictures)
    mixing = Mixing(0.3, _MIXINGS[name], np.roll(np.arange(len(images)), 1))
    mix_images(images, mixing)
    start_s = time.perf_counter()
    for _ in range(_BATCHES):
        mix_images(images, mixing)
    return {"loaders": (time.perf_counter() - start_s) * 1e6 / (_BATCHES * len(images))}


def read(path: Path, size: int) -> Pixels:
    """Return the first pictures of a converted folder, uint8 [n, size, size, 3]."""
    reading = loaders.Reading(workers=1)
    with loaders.build(path, batch_size=_PICTURES, size=size, dtype="uint8", reading=reading) as loader:
        return np.ascontiguousarray(next(iter(loader)).images.permute(0, 2, 3, 1).numpy())


@click.command()
@click.argument("converted", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--repeats", default=9, show_default=True, help="Turns of each.")
def command(converted: Path, repeats: int) -> None:
    """Print the microseconds of each operation for a picture of CONVERTED."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    pictures = read(converted, _SIDE)
    runs: dict[str, harness.Run] = {"crop and resize": partial(measure_crop, read(converted, 256))}
    runs |= {name: partial(measure_operation, name, pictures) for name in _OPERATIONS}
    runs |= {name: partial(measure_mixing, name, pictures) for name in _MIXINGS}
    for run in runs.values():  # functions are first called, and memory is first written, before the turns
        run()
    turns = harness.take_turns(runs, repeats)
    table = Table(["operation", *(column.title for column in _COLUMNS)], turns.rows(_COLUMNS))
    harness.show(
        table, turns, f"microseconds of a picture of {_SIDE}x{_SIDE} on one CPU",
        ("python", "torch", "torchvision", "pillow"),
    )  # fmt: skip


if __name__ == "__main__":
    harness.main(command, "operations")
