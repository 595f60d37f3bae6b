"""Who decodes for backend `nvjpeg`; on the CPU by the same calls as on a GPU."""

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from loaders.read import nvjpeg
from precache.errors import MissingDependencyError
from precache.pictures import jpeg

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*TorchCodec")


@pytest.fixture(autouse=True)
def none_found_yet() -> None:
    nvjpeg.find_decoder.cache_clear()


def test_torchcodec_is_the_first_choice() -> None:
    pytest.importorskip("torchcodec.decoders", reason="pip install torchcodec, torch 2.11 or newer")
    assert nvjpeg.find_decoder(CPU).name == "torchcodec"


@pytest.mark.parametrize("lacks", ["the package", "image decoders"])
def test_torchvision_takes_its_place_where_it_is_missing_or_older(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = None if lacks == "the package" else type(sys)("torchcodec.decoders")
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", there)
    assert nvjpeg.find_decoder(CPU).name == "torchvision"


def test_torchvision_takes_its_place_where_it_does_not_decode_and_this_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a wheel that was built without nvJPEG."""

    def refuse(jpegs: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        raise RuntimeError("not compiled with nvJPEG support\nStack trace")

    broken = nvjpeg.GpuDecoder("torchcodec", refuse, turns=True, most=4)
    monkeypatch.setattr(nvjpeg, "_torchcodec", lambda: broken)
    with caplog.at_level(logging.WARNING):
        assert nvjpeg.find_decoder(CPU).name == "torchvision"
    (said,) = caplog.messages
    assert said.endswith("on cpu, torchvision is used: not compiled with nvJPEG support")


def test_where_neither_decodes_the_error_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(jpegs: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        raise RuntimeError("built without CUDA\nStack trace")

    for name in ("_torchcodec", "_torchvision"):
        broken = nvjpeg.GpuDecoder(name, refuse, turns=False, most=1)
        monkeypatch.setattr(nvjpeg, name, lambda broken=broken: broken)
    with pytest.raises(
        MissingDependencyError, match=r"on cpu \(torchvision: built without CUDA\); 'pip inst"
    ):
        nvjpeg.find_decoder(CPU)


def test_without_either_the_install_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchcodec.decoders", "torchvision.io"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match="pip install torchcodec"):
        nvjpeg.find_decoder(CPU)


@pytest.mark.parametrize("name", ["torchcodec", "torchvision"])
def test_both_give_the_pixels_of_libjpeg_turbo(name: str, raw_tree: Path) -> None:
    if name == "torchcodec":
        pytest.importorskip("torchcodec.decoders", reason="pip install torchcodec, torch 2.11 or newer")
    decoder = getattr(nvjpeg, f"_{name}")()
    contents = [file.read_bytes() for file in sorted(raw_tree.glob("*/*.jpg"))]
    plain = [c for c in contents if c.startswith(jpeg.START) and jpeg.orientation(c) == 1]
    decoded = {c: jpeg.decode_strictly(c, "RGB") for c in plain}
    due = {content: pixels for content, pixels in decoded.items() if pixels is not None}
    found = decoder.decode([torch.frombuffer(bytearray(c), dtype=torch.uint8) for c in due], CPU)
    assert len(due) > 20
    for picture, pixels in zip(found, due.values(), strict=True):
        difference = np.abs(picture.permute(1, 2, 0).numpy().astype(int) - pixels)
        assert difference.mean() <= 1


def test_torchcodec_turns_what_exif_turns(raw_tree: Path) -> None:
    pytest.importorskip("torchcodec.decoders", reason="pip install torchcodec, torch 2.11 or newer")
    turned = [
        content
        for file in raw_tree.glob("*/*.jpg")
        if (content := file.read_bytes()).startswith(jpeg.START) and jpeg.orientation(content) in (6, 8)
    ]
    assert turned
    decoder = nvjpeg.find_decoder(CPU)
    assert decoder.turns
    for content in turned:
        (picture,) = decoder.decode([torch.frombuffer(bytearray(content), dtype=torch.uint8)], CPU)
        stored = jpeg.decode_strictly(content, "RGB")
        assert stored is not None
        assert picture.shape[1:] == stored.shape[1::-1]
