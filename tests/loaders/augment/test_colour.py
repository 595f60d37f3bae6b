"""Operations on colours equal torchvision's on bytes, for pictures on the CPU and for batches."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional

from loaders.augment.colour import (
    apply_tables,
    autocontrast,
    blur,
    blur_kernels,
    contrast,
    equalize,
    linear_matrices,
    recolour,
    recolour_linear,
    sharpen,
    shift_hue,
    tables,
)
from loaders.augment.operations import Operation
from precache.pictures.jpeg import Pixels

SHAPES = ((1, 1), (1, 9), (2, 5), (7, 2), (3, 3), (13, 4), (31, 18), (40, 64))
DRAWS = 5  # values for each picture


def make_pictures(rng: np.random.Generator, height: int, width: int) -> list[Pixels]:
    """Make noise, a smooth picture, few dark values, a narrow range, and pictures of one colour."""
    noise = rng.integers(0, 256, (height, width, 3), np.uint8)
    smooth = cv2.resize(
        rng.integers(0, 256, (4, 4, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC
    )
    colors = [rng.integers(0, 256, 3), (0, 0, 0), (255, 255, 255), (130, 130, 130)]
    constant = [np.full_like(noise, color) for color in colors]
    return [noise, smooth, noise // 64, noise // 32 + 100, *constant]


def solarize_add(image: torch.Tensor, addend: float) -> torch.Tensor:
    """Do what timm's function of this name does, in timm/data/auto_augment.py."""
    table = [min(255, level + int(addend)) if level < 128 else level for level in range(256)]
    return torch.tensor(table, dtype=torch.uint8)[image.long()]


def gaussian_blur(image: torch.Tensor, sigma: float) -> torch.Tensor:
    """torchvision's function, which refuses pictures smaller than the border: all get a border before."""
    radius = math.ceil(3 * sigma)
    border = ((0, 0), (radius, radius), (radius, radius))
    padded = torch.from_numpy(np.pad(image.numpy(), border, mode="reflect"))
    blurred = functional.gaussian_blur(padded, 2 * radius + 1, sigma)
    return blurred[:, radius : radius + image.shape[1], radius : radius + image.shape[2]]


def grey(image: torch.Tensor, _: float) -> torch.Tensor:
    return image if len(image) == 1 else functional.rgb_to_grayscale(image, num_output_channels=3)


EXPECTED: dict[Operation, Callable[[torch.Tensor, float], torch.Tensor]] = {
    Operation.SATURATION: functional.adjust_saturation,
    Operation.GREY: grey,
    Operation.BRIGHTNESS: functional.adjust_brightness,
    Operation.POSTERIZE: lambda image, bits: functional.posterize(image, int(bits)),
    Operation.SOLARIZE: lambda image, level: functional.solarize(image, level) if level <= 255 else image,
    Operation.SOLARIZE_ADD: solarize_add,
    Operation.INVERT: lambda image, _: functional.invert(image),
    Operation.CONTRAST: functional.adjust_contrast,
    Operation.AUTOCONTRAST: lambda image, _: functional.autocontrast(image),
    Operation.EQUALIZE: lambda image, _: functional.equalize(image),
    Operation.SHARPNESS: functional.adjust_sharpness,
    Operation.HUE: functional.adjust_hue,
    Operation.BLUR: gaussian_blur,
}
FACTORS = (0, 2, (0.0, 1.0, 1.9))
VALUES: dict[Operation, tuple[float, float, tuple[float, ...]]] = {
    Operation.SATURATION: FACTORS,
    Operation.BRIGHTNESS: FACTORS,
    Operation.CONTRAST: FACTORS,
    Operation.SHARPNESS: FACTORS,
    Operation.POSTERIZE: (0, 8.99, (0, 1, 8)),
    Operation.SOLARIZE: (0, 256, (0, 128, 256)),
    Operation.SOLARIZE_ADD: (0, 128, (0, 110)),
    Operation.HUE: (-0.5, 0.5, (-0.5, 0.0, 0.5)),
    Operation.BLUR: (0.1, 2.5, (0.1, 2.0)),
}
"""Lowest and highest value, between which values are drawn, and some that are always tried."""
WHOLE = (Operation.POSTERIZE, Operation.SOLARIZE_ADD)
EXACT = (
    Operation.BRIGHTNESS,
    Operation.POSTERIZE,
    Operation.SOLARIZE,
    Operation.SOLARIZE_ADD,
    Operation.INVERT,
)


def draw_values(rng: np.random.Generator, code: Operation, count: int) -> np.ndarray:
    low, high, fixed = VALUES.get(code, (0, 0, ()))
    values = rng.uniform(low, high, count)
    values[: len(fixed)] = fixed[:count]
    rng.shuffle(values)
    return np.floor(values) if code in WHOLE else values


def recolour_batch(code: Operation, images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    codes, columns = np.full(len(values), code, np.int8), np.zeros((len(values), 4))
    columns[:, 0] = values
    factors = torch.from_numpy(values.astype(np.float32)).to(images.device)
    simple = {Operation.CONTRAST: contrast, Operation.SHARPNESS: sharpen, Operation.HUE: shift_hue}
    if code in simple:
        return simple[code](images, factors)
    if code in (Operation.AUTOCONTRAST, Operation.EQUALIZE):
        return autocontrast(images) if code == Operation.AUTOCONTRAST else equalize(images)
    if code == Operation.BLUR:
        return blur(images, torch.from_numpy(blur_kernels(values)).to(images.device))
    if code in EXACT:
        return apply_tables(images, torch.from_numpy(tables(codes, columns)).to(images.device))
    return recolour_linear(images, torch.from_numpy(linear_matrices(codes, columns)).to(images.device))


def planes(pictures: np.ndarray) -> torch.Tensor:
    """Return pictures [n, height, width, channels] as [n, channels, height, width]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("code", EXPECTED, ids=lambda code: code.name)
def test_both_forms_equal_torchvision_on_bytes(code: Operation, channels: int) -> None:
    rng = np.random.default_rng((code, channels))
    for shape in SHAPES:
        pictures = np.stack(DRAWS * make_pictures(rng, *shape))[..., :channels].copy()
        values = draw_values(rng, code, len(pictures))
        images = planes(pictures)
        pairs = zip(images, values.tolist(), strict=True)
        expected = torch.stack([EXPECTED[code](image.contiguous(), value) for image, value in pairs]).int()

        batch = recolour_batch(code, images.float(), values)
        assert batch.dtype == torch.float32
        assert torch.equal(batch, batch.round().clamp(0, 255))
        assert (batch - expected).abs().max() <= (0 if code in EXACT else 1)

        for picture, value in zip(pictures, values.tolist(), strict=True):
            recolour(picture, code, value)
        assert (images - expected).abs().max() <= 1


@pytest.mark.parametrize("code", EXPECTED, ids=lambda code: code.name)
def test_results_are_those_of_torchvision_on_average(code: Operation) -> None:
    """A value that is one too high is as frequent as one that is one too low."""
    rng = np.random.default_rng(code)
    pictures = np.stack([picture for _ in range(8) for picture in make_pictures(rng, 48, 48)[:2]])
    values = draw_values(rng, code, len(pictures))
    images = planes(pictures)
    expected = torch.stack(
        [EXPECTED[code](*pair) for pair in zip(images, values.tolist(), strict=True)]
    ).int()
    batch = recolour_batch(code, images.float(), values)
    for picture, value in zip(pictures, values.tolist(), strict=True):
        recolour(picture, code, value)
    for result in (batch, images):
        assert abs((result - expected).float().mean()) < 0.1


@pytest.mark.parametrize(
    ("code", "neutral"),
    [(Operation.SATURATION, 1), (Operation.BRIGHTNESS, 1), (Operation.CONTRAST, 1), (Operation.SHARPNESS, 1),
     (Operation.HUE, 0), (Operation.POSTERIZE, 8), (Operation.SOLARIZE, 256), (Operation.SOLARIZE_ADD, 0)],
)  # fmt: skip
def test_a_neutral_value_changes_nothing(code: Operation, neutral: float) -> None:
    pictures = np.stack(make_pictures(np.random.default_rng(0), 20, 30))
    images = planes(pictures.copy())
    assert torch.equal(recolour_batch(code, images.float(), np.full(len(images), float(neutral))), images)
    for picture in pictures:
        recolour(picture, code, neutral)
    assert torch.equal(planes(pictures), images)


def test_matrices_and_tables_of_other_operations_change_nothing() -> None:
    codes = np.array(list(Operation), np.int8)
    values = np.full((len(codes), 4), 4.0)
    linear = np.isin(codes, (Operation.SATURATION, Operation.GREY))
    assert (linear_matrices(codes, values) == np.eye(3, 4)).all(axis=(1, 2)).tolist() == (~linear).tolist()
    by_table = np.isin(codes, EXACT)
    assert (tables(codes, values) == np.arange(256)).all(axis=1).tolist() == (~by_table).tolist()


@pytest.mark.parametrize("code", EXPECTED, ids=lambda code: code.name)
def test_batch_form_reads_no_value_of_the_device(code: Operation) -> None:
    """Tensors of the device `meta` have no values: reading one, or a shape that depends on them, raises."""
    images = torch.empty((4, 3, 24, 32), device="meta")
    values = draw_values(np.random.default_rng(0), code, len(images))
    assert recolour_batch(code, images, values).shape == images.shape


def test_threads_recolour_pictures_at_the_same_time() -> None:
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (side, 64, 3), np.uint8) for side in (64, 65) for _ in range(100)]
    codes = [code for code in EXPECTED for _ in pictures]

    def recoloured(code: Operation, picture: Pixels) -> Pixels:
        copy = picture.copy()
        recolour(copy, code, 2.0 if code == Operation.BLUR else 0.3)
        return copy

    expected = list(map(recoloured, codes, pictures * len(EXPECTED)))
    with ThreadPoolExecutor(8) as executor:
        results = list(executor.map(recoloured, codes, pictures * len(EXPECTED)))
    assert all(map(np.array_equal, results, expected))
