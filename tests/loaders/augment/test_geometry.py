"""Shears, translations and rotations, on the CPU and in batches, against torchvision's."""

import math
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import affine, rotate

from loaders.augment.geometry import inverse_affine, warp, warp_batch
from loaders.augment.operations import Operation
from loaders.read import processes
from tests.cuda.simulator import simulated
from tests.cuda.streams import SCHEDULES

SHAPES = [(1, 1), (1, 9), (7, 1), (2, 3), (8, 8), (13, 17), (31, 20), (33, 64), (65, 40)]
"""Heights and widths."""
GEOMETRIC = [
    Operation.SHEAR_X, Operation.SHEAR_Y, Operation.TRANSLATE_X, Operation.TRANSLATE_Y, Operation.ROTATE
]  # fmt: skip
DRAWS = 200
"""Pictures of each shape and number of channels."""


def make_pictures(shape: tuple[int, int], channels: int, count: int, seed: int = 0) -> np.ndarray:
    """Return uint8 [count, *shape, channels]: noise, smooth colours, and black and white blocks, in turn."""
    rng = np.random.default_rng((seed, *shape, channels))
    pictures = rng.integers(0, 256, (count, *shape, channels), np.uint8)
    for number, picture in enumerate(pictures):
        if number % 3 == 1:
            coarse = np.ascontiguousarray(picture[:4, :5])
            picture[:] = cv2.resize(coarse, shape[::-1], interpolation=cv2.INTER_CUBIC).reshape(picture.shape)
        elif number % 3 == 2:
            picture[:] = picture[(np.arange(shape[0]) // 4)[:, None], np.arange(shape[1]) // 4] // 128 * 255
    return pictures


def draw_operations(shape: tuple[int, int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes, int8 [count], and values, float64 [count, 4], larger than policies have them."""
    rng = np.random.default_rng((1, *shape))
    codes = np.resize(np.array(GEOMETRIC, np.int8), count)
    spans = {
        Operation.SHEAR_X: 1.0,
        Operation.SHEAR_Y: 1.0,
        Operation.TRANSLATE_X: 1.3 * shape[1],
        Operation.TRANSLATE_Y: 1.3 * shape[0],
        Operation.ROTATE: 200.0,
    }
    values = np.zeros((count, 4))
    values[:, 0] = rng.uniform(-1, 1, count) * [spans[Operation(code)] for code in codes]
    # no change, right angles, and a full turn
    special = np.array([0.0, 30.0, 90.0, 180.0, 270.0, 360.0, -90.0, -450.0])
    turns = np.flatnonzero(codes == Operation.ROTATE)[: len(special)]
    values[turns, 0] = special[: len(turns)]
    values[:4, 0] = 0
    return codes, values


def apply_by_torchvision(image: torch.Tensor, code: int, value: float) -> torch.Tensor:
    """Apply an operation as `_AutoAugmentBase._apply_image_or_video_transform` does without a fill."""
    bilinear = InterpolationMode.BILINEAR
    angle = math.degrees(math.atan(value))
    match Operation(code):
        case Operation.SHEAR_X:
            return affine(image, 0.0, [0, 0], 1.0, [angle, 0.0], bilinear, center=[0, 0])
        case Operation.SHEAR_Y:
            return affine(image, 0.0, [0, 0], 1.0, [0.0, angle], bilinear, center=[0, 0])
        case Operation.TRANSLATE_X:
            return affine(image, 0.0, [int(value), 0], 1.0, [0.0, 0.0], bilinear)
        case Operation.TRANSLATE_Y:
            return affine(image, 0.0, [0, int(value)], 1.0, [0.0, 0.0], bilinear)
        case Operation.ROTATE:
            return rotate(image, value, bilinear)
    raise AssertionError(code)


def expected_of(
    pictures: np.ndarray, codes: np.ndarray, values: np.ndarray, fill: tuple[int, ...]
) -> np.ndarray:
    """Return float32 as `pictures`: torchvision's, with `fill` by the share of each pixel that is outside."""
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
    moved = torch.stack(list(map(apply_by_torchvision, images, codes.tolist(), values[:, 0].tolist())))
    if any(fill):
        ones = torch.ones_like(images)
        inside = torch.stack(list(map(apply_by_torchvision, ones, codes.tolist(), values[:, 0].tolist())))
        moved = moved + (1 - inside) * torch.tensor(fill).view(1, -1, 1, 1)
    return moved.permute(0, 2, 3, 1).numpy()


def warp_each(pictures: np.ndarray, matrices: np.ndarray, fill: tuple[int, ...]) -> np.ndarray:
    warped = pictures.copy()
    for picture, matrix in zip(warped, matrices, strict=True):
        warp(picture, matrix, fill)
    return warped


def warp_all(pictures: np.ndarray, matrices: np.ndarray, fill: tuple[int, ...]) -> np.ndarray:
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
    warped = warp_batch(images, torch.from_numpy(matrices).float(), fill)
    assert warped.dtype == torch.float32
    assert torch.equal(warped, warped.to(torch.uint8).float()), "whole numbers, 0-255"
    return warped.permute(0, 2, 3, 1).numpy()


WAYS = {"picture by picture": warp_each, "batch": warp_all}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_warped_pictures_are_torchvisions_within_1(shape: tuple[int, int], channels: int, way: str) -> None:
    pictures = make_pictures(shape, channels, DRAWS)
    codes, values = draw_operations(shape, DRAWS)
    matrices = inverse_affine(codes, values, shape)
    for fill in ((0, 0, 0)[:channels], (124, 7, 255)[:channels]):
        warped = WAYS[way](pictures, matrices, fill)
        difference = np.abs(warped - expected_of(pictures, codes, values, fill))
        assert difference.max() <= 0.51, "half of it is from rounding"


@pytest.mark.parametrize("way", WAYS)
def test_a_photograph_of_the_usual_size_is_warped_within_1(way: str) -> None:
    shape = (224, 224)
    pictures = make_pictures(shape, 3, 10)
    codes, values = draw_operations((40, 40), 10)
    values[:, 0] += 0.3
    warped = WAYS[way](pictures, inverse_affine(codes, values, shape), (0, 0, 0))
    assert np.abs(warped - expected_of(pictures, codes, values, (0, 0, 0))).max() <= 0.6


def test_torchvision_blends_the_border_twice_if_it_is_given_a_fill() -> None:
    """With fill=0, which draws the same black, its border is darker than with fill=None, and than ours."""
    white, angle, bilinear = torch.full((1, 20, 20), 255.0), 30.0, InterpolationMode.BILINEAR
    inside = rotate(white / 255, angle, bilinear)
    for fill in (0.0, 200.0):
        twice = rotate(white, angle, bilinear, fill=[fill])
        assert torch.allclose(twice, inside**2 * white + (1 - inside) * fill, atol=1e-3)
        matrices = inverse_affine(np.array([Operation.ROTATE], np.int8), np.full((1, 4), angle), (20, 20))
        once = warp_batch(white[None], torch.from_numpy(matrices).float(), (int(fill),))[0]
        assert (once - inside * white - (1 - inside) * fill).abs().max() <= 0.51
        assert (once - twice).max() >= 50


@pytest.mark.parametrize("way", WAYS)
def test_translations_copy_pixels_unchanged_and_cut_to_whole_ones(way: str) -> None:
    shape, fill = (9, 12), (1, 2, 3)
    picture = make_pictures(shape, 3, 1)
    for pixels in (-13.0, -12.0, -11.9, -3.7, -1.0, -0.9, 0.0, 0.9, 4.5, 8.99, 9.0, 11.0, 12.0, 50.0):
        for operation, axis in ((Operation.TRANSLATE_X, 1), (Operation.TRANSLATE_Y, 0)):
            matrices = inverse_affine(np.array([operation], np.int8), np.full((1, 4), pixels), shape)
            expected = np.broadcast_to(np.array(fill, np.uint8), picture.shape).copy()
            for target in range(shape[axis]):
                source = target - int(pixels)
                if 0 <= source < shape[axis]:
                    expected.swapaxes(1, axis + 1)[:, target] = picture.swapaxes(1, axis + 1)[:, source]
            assert np.array_equal(WAYS[way](picture, matrices, fill), expected), (operation, pixels)


@pytest.mark.parametrize("way", WAYS)
def test_operations_that_move_no_pixels_have_the_identity(way: str) -> None:
    shape = (13, 18)
    others = [operation for operation in Operation if operation not in GEOMETRIC]
    values = np.random.default_rng(0).uniform(1, 9, (len(others), 4))
    matrices = inverse_affine(np.array(others, np.int8), values, shape)
    assert np.array_equal(matrices, np.broadcast_to(np.eye(2, 3), matrices.shape))
    pictures = make_pictures(shape, 3, len(others))
    assert np.array_equal(WAYS[way](pictures, matrices, (9, 9, 9)), pictures)


def test_no_pictures_have_no_matrices() -> None:
    assert inverse_affine(np.zeros(0, np.int8), np.zeros((0, 4)), (5, 5)).shape == (0, 2, 3)


def test_threads_that_warp_at_once_do_not_disturb_one_another() -> None:
    shape, fill = (60, 40), (0, 0, 0)
    pictures = make_pictures(shape, 3, 40)
    codes, values = draw_operations(shape, len(pictures))
    matrices = inverse_affine(codes, values, shape)
    expected, threads = warp_each(pictures, matrices, fill), cv2.getNumThreads()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(warp, pictures, matrices, [fill] * len(pictures)))
    assert np.array_equal(pictures, expected)
    assert cv2.getNumThreads() == threads


def test_a_forked_worker_starts_after_pictures_were_warped() -> None:
    """A thread of OpenCV that waits for work is not in the fork, so that nothing there may wait for it."""
    pictures = make_pictures((64, 64), 3, 1)
    warp(
        pictures[0], inverse_affine(np.array([Operation.ROTATE]), np.full((1, 4), 9.0), (64, 64))[0], (0,) * 3
    )
    time.sleep(0.2)  # until OpenCV's threads sleep
    worker = multiprocessing.get_context("fork").Process(target=processes._begin_worker, args=(0,))
    worker.start()
    worker.join(20)
    worker.kill()
    assert worker.exitcode == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_host_waits_for_no_batch_that_is_warped(schedule: str) -> None:
    shape, fill = (13, 18), (5, 6, 7)
    pictures = make_pictures(shape, 3, 20)
    matrices = inverse_affine(*draw_operations(shape, 20), shape)
    expected = warp_all(pictures, matrices, fill)
    with simulated(schedule) as world:
        images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float().contiguous().to("cuda")
        on_device = torch.from_numpy(matrices).float().to("cuda")
        world.syncs.clear()  # the copies have waited
        warped = warp_batch(images, on_device, fill)
        assert world.syncs == []
        assert np.array_equal(warped.cpu().permute(0, 2, 3, 1).numpy(), expected)
