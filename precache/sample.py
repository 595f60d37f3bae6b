"""A generated image tree shaped like Caltech-256, for trying things out and for tests.

Each class has a colour and a stripe pattern of its own, which a small network can learn, on a
background of fractal noise. Sizes, aspects and bytes per pixel spread like those of photographs.
"""

import colorsys
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from precache import executors
from precache.errors import SettingError, check_range
from precache.storage import atomic_folder

_TAG = 2
_NAMES = (
    "anchor", "basket", "candle", "drum", "easel", "feather", "guitar", "harp",
    "ivy", "jar", "kettle", "lantern", "mask", "needle", "oar", "piano",
)  # fmt: skip
# Every 32 pictures, one of each: as rare as in a real tree, yet there in the smallest sample.
_GREY, _PNG, _ROTATED, _CMYK, _PERIOD = 5, 11, 17, 29, 32
_EXIF_ORIENTATION = 0x0112
# A picture's stored pixels are the upright ones with this transposition undone (Exif 2.3, 4.6.4).
_UNDO_ORIENTATION = {
    3: Image.Transpose.ROTATE_180,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Task:
    folder: Path
    label: int
    classes: int
    images: int
    first_index: int
    seed: int

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
    workers: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write `images` pictures in `classes` folders to the new folder `destination`.

    Mostly RGB JPEGs; of every 32 pictures one each is greyscale, a PNG, EXIF-rotated and CMYK. The
    same arguments and library versions give the same bytes. `on_progress` gets (pictures
    written, pictures in all).

    Raises:
        SettingError: a value is out of range, or `destination` exists and is not empty.
    """
    check_range("classes", classes, 1, 999)
    check_range("images", images, classes)
    check_range("seed", seed, 0)
    workers = executors.worker_count(workers)
    destination = Path(destination)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise SettingError(f"{destination}: exists and is not empty; choose another DST or remove it")
    bounds = np.linspace(0, images, classes + 1).astype(int).tolist()
    report = executors.counted(on_progress, images)

    with atomic_folder(destination) as folder:
        tasks = []
        for label in range(classes):
            name = _class_name(label)
            (folder / name).mkdir()
            count = bounds[label + 1] - bounds[label]
            tasks.append(_Task(folder / name, label, classes, count, bounds[label], seed))
        with closing(executors.run(_write_class, tasks, min(workers, classes), report)) as finished:
            for _ in finished:
                pass


def _class_name(label: int) -> str:
    repeat = label // len(_NAMES)
    return f"{label + 1:03d}.{_NAMES[label % len(_NAMES)]}{'' if repeat == 0 else f'-{repeat + 1}'}"


def _write_class(task: _Task, tick: Callable[[], None]) -> None:
    for number in range(task.images):
        rng = np.random.default_rng((task.seed, _TAG, task.label, number))
        picture = _picture(rng, task.label, task.classes)
        kind = (task.first_index + number) % _PERIOD
        _save(picture, task.folder / f"{task.label + 1:03d}_{number + 1:04d}", kind, rng)
        tick()


def _save(picture: Image.Image, base: Path, kind: int, rng: np.random.Generator) -> None:
    quality = int(rng.integers(70, 96))
    if kind == _PNG:
        picture.save(base.with_suffix(".png"))
        return
    exif = Image.Exif()
    if kind == _GREY:
        picture = picture.convert("L")
    elif kind == _CMYK:
        picture = picture.convert("CMYK")
    elif kind == _ROTATED:
        orientation = int(rng.choice(list(_UNDO_ORIENTATION)))
        exif[_EXIF_ORIENTATION] = orientation
        picture = picture.transpose(_UNDO_ORIENTATION[orientation])
    picture.save(base.with_suffix(".jpg"), quality=quality, exif=exif)


def _picture(rng: np.random.Generator, label: int, classes: int) -> Image.Image:
    """An upright RGB picture of the class: striped ellipse on fractal noise."""
    area = float(np.clip(np.exp(rng.normal(np.log(120_000), 0.6)), 20_000, 1_500_000))
    aspect = float(np.clip(np.exp(rng.normal(0.15, 0.3)), 0.4, 2.5))
    width, height = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j].astype(np.float32)

    angle = np.pi * label / classes + rng.normal(0, 0.05)
    frequency = 6 + 4 * (label % 3)
    stripes = np.sin(frequency * (x * np.cos(angle) + y * np.sin(angle)) + rng.uniform(0, 2 * np.pi))
    colour = np.array(colorsys.hsv_to_rgb(label / classes, 0.8, 0.9), np.float32) * 255
    object_rgb = colour * (0.65 + 0.35 * stripes[..., None])

    centre_x, centre_y = rng.uniform(-0.25, 0.25, 2)
    radius_x, radius_y = rng.uniform(0.45, 0.8, 2)
    distance = ((x - centre_x) / radius_x) ** 2 + ((y - centre_y) / radius_y) ** 2
    inside = np.clip((1 - distance) * 8, 0, 1)[..., None]

    pixels = inside * object_rgb + (1 - inside) * _fractal_noise(rng, width, height)
    grain = rng.normal(0, rng.uniform(0, 8), (height, width, 1)).astype(np.float32)
    return Image.fromarray(np.clip(pixels + grain, 0, 255).astype(np.uint8))


def _fractal_noise(rng: np.random.Generator, width: int, height: int) -> Floats:
    """float32 [height, width, 3] around 128: octaves of noise, as in natural pictures' 1/f spectra."""
    falloff = rng.uniform(0.45, 0.8)
    noise = np.full((height, width, 3), 128, np.float32)
    amplitude = 60.0
    for cells in (3, 6, 12, 24, 48, 96):
        grid = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        octave = Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)
        noise += (np.asarray(octave, np.float32) - 128) * (amplitude / 128)
        amplitude *= falloff
    return noise
