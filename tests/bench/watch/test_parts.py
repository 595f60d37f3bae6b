"""Timing of the parts of a sample: each decoder and each transform by its name, in a process of its own."""

import io
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, default_collate
from torchvision import transforms as v1
from torchvision.transforms import v2

from bench.watch import parts

PIXELS = np.random.default_rng(1).integers(0, 255, (96, 128, 3), np.uint8)
BUFFER = io.BytesIO()
Image.fromarray(PIXELS).save(BUFFER, "jpeg")
JPEG = BUFFER.getvalue()
JPEG_TENSOR = torch.frombuffer(bytearray(JPEG), dtype=torch.uint8)


def decode() -> Image.Image:
    return Image.open(io.BytesIO(JPEG))


def spin(picture: Any, seconds: float = 2e-3) -> Any:
    until_s = time.process_time() + seconds
    while time.process_time() < until_s:
        pass
    return picture


class Spin:
    """A transform of the user's own."""

    def __call__(self, picture: Any) -> Any:
        return spin(picture)


class Outer(nn.Module):
    """A transform that calls another one."""

    def forward(self, picture: Any) -> Any:
        return v1.Resize(32)(picture)


class Data(Dataset[Any]):
    def __init__(self, read: Callable[[], Any], transform: Callable[[Any], Any]) -> None:
        self.read, self.transform = read, transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.read()), index


def probe(
    transform: Any, read: Callable[[], Any] = decode, *, workers: int = 1
) -> dict[tuple[str, str], float]:
    data = Data(read, transform)
    values = parts.probe(parts.ProbeInput(data, default_collate, 4, len, False, workers, None))
    assert "failed" not in values, values
    return {(part["stage"], part["name"]): part["seconds"] for part in values["parts"]}


def transforms_of(seconds: dict[tuple[str, str], float]) -> set[str]:
    return {name for stage, name in seconds if stage == "transform"}


def to_tensor(picture: Image.Image) -> Any:
    return v1.functional.to_tensor(picture)


@pytest.mark.parametrize(
    ("transform", "names"),
    [
        (v1.Compose([v1.RandomResizedCrop(32), v1.ToTensor()]), {"RandomResizedCrop", "ToTensor"}),
        (v2.Compose([v2.Resize((32, 32)), Spin(), v2.ToImage()]), {"Resize", "Spin", "ToImage"}),
        (
            v1.Compose((v1.Resize((32, 32)), v2.Compose([Spin(), v1.ToTensor()]))),
            {"Resize", "Spin", "ToTensor"},
        ),
        (v1.Compose([v1.RandomApply([Spin()], p=1.0), to_tensor]), {"Spin", "to_tensor"}),
        (v1.Compose([partial(spin, seconds=1e-3), v1.ToTensor()]), {"spin", "ToTensor"}),
        (v1.Compose([Outer(), v1.Grayscale(3), v1.ToTensor()]), {"Outer", "Grayscale", "ToTensor"}),
        (lambda picture: v1.PILToTensor()(v1.CenterCrop(32)(picture)), {"CenterCrop", "PILToTensor"}),
        (lambda picture: np.asarray(picture.convert("L").resize((32, 32))), {"Image.resize"}),
    ],
)
def test_each_transform_is_timed_by_its_name(transform: Any, names: set[str]) -> None:
    seconds = probe(transform)
    assert transforms_of(seconds) == names
    assert {stage for stage, _ in seconds} == {"decode", "transform", "python", "read", "collate", "copy"}
    assert all(value >= 0 for value in seconds.values())


def test_albumentations_are_timed_by_their_names() -> None:
    albumentations = pytest.importorskip("albumentations")
    choice = albumentations.OneOf([albumentations.HorizontalFlip(p=1)], p=1)
    steps = albumentations.Compose([albumentations.Resize(32, 32), choice, albumentations.CenterCrop(16, 16)])
    seconds = probe(lambda picture: steps(image=np.asarray(picture))["image"])
    assert transforms_of(seconds) == {"Resize", "HorizontalFlip", "CenterCrop"}


@pytest.mark.parametrize(
    ("library", "read"),
    [
        ("Pillow", lambda: np.asarray(decode())),
        ("torchvision", lambda: torchvision.io.decode_jpeg(JPEG_TENSOR)),
        ("simplejpeg", lambda: pytest.importorskip("simplejpeg").decode_jpeg(JPEG)),
        ("OpenCV", lambda: pytest.importorskip("cv2").imdecode(np.frombuffer(JPEG, np.uint8), 1)),
        ("torchcodec", lambda: pytest.importorskip("torchcodec.decoders").decode_image(JPEG)),
    ],
)
def test_decoding_is_timed_by_its_library(library: str, read: Callable[[], Any]) -> None:
    assert read() is not None
    seconds = probe(lambda pixels: pixels, read)
    assert [name for stage, name in seconds if stage == "decode"] == [library]
    assert seconds["decode", library] > 0


def test_seconds_of_a_transform_hold_what_it_calls_but_for_decoding() -> None:
    seconds = probe(v1.Compose([Spin(), Outer(), v1.ToTensor()]))
    assert seconds["transform", "Spin"] == pytest.approx(2e-3, rel=0.3)
    assert seconds["decode", "Pillow"] > 0  # Pillow decodes when a transform first needs the pixels
    assert ("transform", "Resize") not in seconds


def test_copying_is_a_part_with_workers_only() -> None:
    assert ("copy", "") not in probe(v1.ToTensor(), workers=0)


def test_nothing_of_the_program_is_changed() -> None:
    steps = [v1.Resize(32), Spin(), to_tensor]
    transform = v1.Compose(list(steps))
    before = [v1.Resize.__call__, v1.Compose.__call__, Spin.__call__, Image.open, Image.Image.convert]
    probe(transform)
    after = [v1.Resize.__call__, v1.Compose.__call__, Spin.__call__, Image.open, Image.Image.convert]
    assert transform.transforms == steps
    assert after == before


def test_sample_that_fails_is_the_reason() -> None:
    values = parts.probe(
        parts.ProbeInput(Data(decode, lambda _: 1 // 0), default_collate, 4, len, False, 0, None)
    )
    assert values["failed"].startswith("ZeroDivisionError")
