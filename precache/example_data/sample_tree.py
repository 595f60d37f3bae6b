"""Generate an image tree, to try the project and for tests.

Each class has a colour and a stripe pattern of its own, which a small network can learn, on a background:

    caltech     fractal noise; sizes, shapes and bytes per pixel as in Caltech-256, and rare kinds of files
    imagenet    leaves of all sizes that hide one another, with texture, shade and grain; as large in pixels
                and in bytes as ImageNet's photographs, so that decoding costs the same

Leaves whose radii follow a power law give the edges and the 1/f spectrum of natural pictures: Lee, Mumford,
Huang, "Occlusion models for natural images" (2001).
"""

import colorsys
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageChops, ImageDraw, ImageFilter

from precache import engines
from precache.errors import check_choice, check_range
from precache.reporting import Progress, no_progress, progress_counter
from precache.storage import atomic_folder, check_new_folder

_TAG = 2
_NAMES = (
    "anchor", "basket", "candle", "drum", "easel", "feather", "guitar", "harp",
    "ivy", "jar", "kettle", "lantern", "mask", "needle", "oar", "piano",
)  # fmt: skip
# Positions of rare kinds in every 32 pictures: as rare as in a real tree, yet in the smallest sample, too.
_GREY, _PNG, _ROTATED, _CMYK, _PERIOD = 5, 11, 17, 29, 32
# EXIF orientation -> transposition of upright pixels into those that a file with it stores (Exif 2.3, 4.6.4).
_UNDO_ORIENTATION = {
    3: Image.Transpose.ROTATE_180,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}
# Share, width and height of the sizes of most of ImageNet's photographs, which Flickr gave them. The others
# are drawn from a wide distribution, so that the mean is 470x400, the mean of ImageNet's training pictures.
_USUAL_SIZES = (
    (0.44, 500, 375),
    (0.13, 375, 500),
    (0.12, 500, 333),
    (0.06, 333, 500),
)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _ClassTask:
    """The pictures of one class; `first_index` is that of its first picture in the tree."""

    folder: Path
    label: int
    classes: int
    images: int
    first_index: int
    seed: int
    like: str

    @property
    def name(self) -> str:
        """Name in error messages."""
        return self.folder.name


def make_sample(
    destination: str | os.PathLike[str],
    *,
    images: int = 512,
    classes: int = 16,
    seed: int = 0,
    like: str = "imagenet",
    workers: int | None = None,
    on_progress: Progress = no_progress,
) -> None:
    """Write `images` pictures in `classes` folders to the new folder `destination`.

    The same arguments and library versions give the same bytes, whatever `workers` is.

    Args:
        like: 'imagenet': as large in pixels and bytes as ImageNet's photographs, so that decoding costs the
            same; RGB JPEGs, one in 32 greyscale. 'caltech': smaller, as in Caltech-256; mostly RGB JPEGs; in
            every 32 one each is greyscale, a PNG, EXIF-rotated and CMYK.
        workers: processes; default one per CPU, 0 for the calling process.
        on_progress: called with (pictures written, pictures in all).

    Raises:
        SettingError: a value is out of range, or `destination` exists and is not empty.
    """
    classes = check_range("classes", classes, 1, 999)
    images = check_range("images", images, classes)
    seed = check_range("seed", seed, 0)
    check_choice("like", like, PICTURES_LIKE)
    workers = engines.worker_count(workers)
    destination = Path(destination)
    check_new_folder(destination)
    bounds = np.linspace(0, images, classes + 1).astype(int).tolist()
    report = progress_counter(on_progress, images)

    with atomic_folder(destination) as folder:
        tasks = []
        for label in range(classes):
            name = _class_name(label)
            (folder / name).mkdir()
            count = bounds[label + 1] - bounds[label]
            tasks.append(_ClassTask(folder / name, label, classes, count, bounds[label], seed, like))
        with closing(engines.run(_write_class, tasks, min(workers, classes), report)) as results:
            for _ in results:
                pass


def _class_name(label: int) -> str:
    repeat = label // len(_NAMES)
    return f"{label + 1:03d}.{_NAMES[label % len(_NAMES)]}{'' if repeat == 0 else f'-{repeat + 1}'}"


def _write_class(task: _ClassTask, tick: Callable[[], None]) -> None:
    draw = PICTURES_LIKE[task.like]
    for number in range(task.images):
        rng = np.random.default_rng((task.seed, _TAG, task.label, number))
        drawn = draw(rng, task.label, task.classes, task.first_index + number)
        name = f"{task.label + 1:03d}_{number + 1:04d}{drawn.suffix}"
        drawn.image.save(task.folder / name, **drawn.options)
        tick()


@dataclass(frozen=True, slots=True)
class _DrawnPicture:
    """A picture to store in a file with `suffix`, by Pillow's `options`."""

    image: Image.Image
    suffix: str = ".jpg"
    options: Mapping[str, Any] = field(default_factory=dict)


def _caltech(rng: np.random.Generator, label: int, classes: int, index: int) -> _DrawnPicture:
    """Draw a picture like Caltech-256's; its `index` in the tree decides the kind of its file."""
    picture, kind = _caltech_picture(rng, label, classes), index % _PERIOD
    quality = int(rng.integers(70, 96))
    if kind == _PNG:
        return _DrawnPicture(picture, ".png")
    exif = Image.Exif()
    if kind == _GREY:
        picture = picture.convert("L")
    elif kind == _CMYK:
        picture = picture.convert("CMYK")
    elif kind == _ROTATED:
        orientation = int(rng.choice(list(_UNDO_ORIENTATION)))
        exif[ExifTags.Base.Orientation] = orientation
        picture = picture.transpose(_UNDO_ORIENTATION[orientation])
    return _DrawnPicture(picture, options={"quality": quality, "exif": exif})


def _imagenet(rng: np.random.Generator, label: int, classes: int, index: int) -> _DrawnPicture:
    """Draw a picture like ImageNet's: a JPEG of about 110 kB, one in 32 greyscale."""
    size = _photograph_size(rng)
    picture = _leaves(rng, *size).filter(ImageFilter.BoxBlur(rng.uniform(0.2, 0.6)))
    # the object has no fine lines, so it is drawn at half the size, in a quarter of the time
    inside, object_rgb = _object(rng, label, classes, *_axes(size[0] // 2, size[1] // 2))
    shape = Image.fromarray((inside[..., 0] * 255).astype(np.uint8)).resize(size)
    picture.paste(Image.fromarray(object_rgb.astype(np.uint8)).resize(size), mask=shape)
    light = Image.fromarray(np.clip(_texture(rng, *size) + 128, 0, 255).astype(np.uint8))
    picture = ImageChops.add(picture, Image.merge("RGB", (light, light, light)), offset=-128)
    if index % _PERIOD == _GREY:
        picture = picture.convert("L")
    return _DrawnPicture(picture, options={"quality": int(rng.integers(88, 98))})


PICTURES_LIKE: dict[str, Callable[[np.random.Generator, int, int, int], _DrawnPicture]] = {
    "imagenet": _imagenet,
    "caltech": _caltech,
}
"""Name of a dataset -> function (rng, label, classes, index) that draws a picture like its own."""


def _caltech_picture(rng: np.random.Generator, label: int, classes: int) -> Image.Image:
    """Draw an upright RGB picture of the class: a striped ellipse on fractal noise."""
    area = float(np.clip(np.exp(rng.normal(np.log(120_000), 0.6)), 20_000, 1_500_000))
    aspect = float(np.clip(np.exp(rng.normal(0.15, 0.3)), 0.4, 2.5))
    width, height = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
    x, y = _axes(width, height)
    inside, object_rgb = _object(rng, label, classes, x, y)
    pixels = inside * object_rgb + (1 - inside) * _fractal_noise(rng, width, height)
    grain = rng.normal(0, rng.uniform(0, 8), (height, width, 1)).astype(np.float32)
    return Image.fromarray(np.clip(pixels + grain, 0, 255).astype(np.uint8))


def _axes(width: int, height: int) -> tuple[Floats, Floats]:
    """Return x and y of each pixel, float32 [height, width], -1 to 1."""
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j].astype(np.float32)
    return x, y


def _object(
    rng: np.random.Generator, label: int, classes: int, x: Floats, y: Floats
) -> tuple[Floats, Floats]:
    """Draw a class's object: its mask, float32 [height, width, 1] 0-1, and its colours [..., 3] 0-255."""
    angle = np.pi * label / classes + rng.normal(0, 0.05)
    frequency = 6 + 4 * (label % 3)
    stripes = np.sin(frequency * (x * np.cos(angle) + y * np.sin(angle)) + rng.uniform(0, 2 * np.pi))
    colour = np.array(colorsys.hsv_to_rgb(label / classes, 0.8, 0.9), np.float32) * 255
    object_rgb = colour * (0.65 + 0.35 * stripes[..., None])

    centre_x, centre_y = rng.uniform(-0.25, 0.25, 2)
    radius_x, radius_y = rng.uniform(0.45, 0.8, 2)
    distance = ((x - centre_x) / radius_x) ** 2 + ((y - centre_y) / radius_y) ** 2
    return np.clip((1 - distance) * 8, 0, 1)[..., None], object_rgb


def _fractal_noise(rng: np.random.Generator, width: int, height: int) -> Floats:
    """Return octaves of noise around 128, float32 [height, width, 3], with the 1/f spectrum of pictures."""
    falloff = rng.uniform(0.45, 0.8)
    noise = np.full((height, width, 3), 128, np.float32)
    amplitude = 60.0
    for cells in (3, 6, 12, 24, 48, 96):
        grid = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        octave = Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)
        noise += (np.asarray(octave, np.float32) - 128) * (amplitude / 128)
        amplitude *= falloff
    return noise


def _photograph_size(rng: np.random.Generator) -> tuple[int, int]:
    """Draw the width and height of a photograph, in pixels."""
    drawn = rng.uniform()
    for share, width, height in _USUAL_SIZES:
        drawn -= share
        if drawn < 0:
            return width, height
    area = float(np.clip(np.exp(rng.normal(np.log(170_000), 0.75)), 20_000, 2_000_000))
    aspect = float(np.clip(np.exp(rng.normal(0.12, 0.3)), 0.5, 2.0))
    return round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)


def _leaves(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Draw ellipses of all sizes over a sky, the last ones in front; their radii follow a power law."""
    sky = (rng.integers(70, 190, (3, 3, 1)) + rng.integers(-40, 41, (3, 3, 3))).astype(np.uint8)
    picture = Image.fromarray(sky).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(picture)
    count = 900
    smallest, largest = 0.006, 0.3
    # the inverse of the distribution function of radii whose density falls with the third power
    spread = rng.uniform(0, 1, count)
    radii = (smallest**-2 - spread * (smallest**-2 - largest**-2)) ** -0.5 * min(width, height)
    centres = rng.uniform(0, 1, (count, 2)) * (width, height)
    aspects = rng.uniform(0.5, 1.6, count)  # width over height
    # a brightness, and a small offset for each channel: natural colours are rarely saturated
    palette = rng.integers(20, 235, (12, 1)) + rng.integers(-45, 46, (12, 3))
    colours = np.clip(palette[rng.integers(0, 12, count)] + rng.integers(-25, 26, (count, 1)), 0, 255)
    for (x, y), radius, aspect, colour in zip(centres, radii, aspects, colours.tolist(), strict=True):
        half_width = radius * aspect
        draw.ellipse((x - half_width, y - radius, x + half_width, y + radius), fill=tuple(colour))
    return picture


def _texture(rng: np.random.Generator, width: int, height: int) -> Floats:
    """Return brightness to add, float32 [height, width]: octaves of noise of varying strength, and grain."""
    texture = rng.standard_normal((height, width), np.float32) * np.float32(rng.uniform(2, 5))
    for divisor, amplitude in ((2, 13.0), (4, 13.0), (8, 12.0), (32, 16.0)):
        cells = rng.integers(0, 256, (height // divisor + 1, width // divisor + 1), dtype=np.uint8)
        octave = Image.fromarray(cells).resize((width, height), Image.Resampling.BILINEAR)
        texture += (np.asarray(octave, np.float32) - 128) * np.float32(amplitude / 64)
    strength_map = Image.fromarray(rng.integers(0, 256, (4, 5), dtype=np.uint8)).resize((width, height))
    strength: Floats = np.asarray(strength_map, np.float32) * np.float32(rng.uniform(1.0, 2.1) / 128)
    strength *= texture
    return strength
