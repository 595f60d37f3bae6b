"""Files are recognised as pictures by name and content, and Pillow opens no others."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, check, convert
from precache.errors import DatasetError
from precache.pictures import kinds, own_pillow
from precache.sources.rejected_list import read_list
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run, run_here
from tests.precache.pictures.drawing import encode_image, load, noise
from tests.precache.pictures.test_bad_pictures import EPS
from tests.precache.pictures.test_opencv import webp

NAMES = {
    "JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm", "TGA": "tga",
    "ICO": "ico", "DDS": "dds", "SGI": "sgi", "PCX": "pcx", "DIB": "dib", "QOI": "qoi",
    "WEBP": "webp", "AVIF": "avif", "HEIF": "heic", "JPEG2000": "jp2",
}  # fmt: skip
WITH_SIGNATURE = {"JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "HEIF", "JPEG2000"}


def encode_blue(kind: str) -> bytes:
    """Encode a blue picture of 32 x 32 pixels; skip the test if this Pillow cannot."""
    if kind not in Image.SAVE:
        Image.init()
    try:
        return encode_image(Image.new("RGB", (32, 32), (0, 0, 255)), kind, quality=90)
    except (KeyError, OSError):
        pytest.skip(f"this Pillow writes no {kind}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a class folder with one intact picture."""
    folder = tmp_path / "tree/a"
    folder.mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / "whole.png")
    return folder


def sample_names(folder: Path) -> set[str]:
    return {os.path.basename(sample.path) for sample in scan_tree(folder.parent).samples}


@pytest.mark.parametrize("kind", NAMES)
def test_scan_finds_pictures_of_each_kind_by_extension(kind: str, folder: Path) -> None:
    names = {f"x.{NAMES[kind]}", f"X.{NAMES[kind].upper()}"}
    for name in names:
        (folder / name).write_bytes(encode_blue(kind))
        assert np.abs(load(str(folder / name), 8).astype(int) - (0, 0, 255)).max() < 12
    assert sample_names(folder) == {"whole.png", *names}


@pytest.mark.parametrize("kind", NAMES)
def test_scan_finds_a_picture_without_extension_by_its_signature(kind: str, folder: Path) -> None:
    (folder / "nameless").write_bytes(encode_blue(kind))
    assert ("nameless" in sample_names(folder)) == (kind in WITH_SIGNATURE)


@pytest.mark.parametrize(
    "text", ["P3 is good", "Python", "DDS files", "\n\x00", "BMW 3 series, photographed 2009"]
)
def test_text_that_begins_like_a_picture_is_none(text: str, folder: Path) -> None:
    for name in ("notes", "notes.txt"):  # some of Pillow's signatures have only two letters
        (folder / name).write_text(text)
    assert sample_names(folder) == {"whole.png"}


NO_PICTURES = [
    "nef",
    "DNG",
    "cr2",
    "arw",
    "txt",
    "pps",
    "csv",
    "bin",
    "jpg_large",
    "0001",
    "rgb",
    "tmp",
    "bak",
]


@pytest.mark.parametrize("suffix", NO_PICTURES)
def test_a_file_of_another_extension_is_no_picture(suffix: str, folder: Path) -> None:
    for kind in ("TIFF", "BMP", "JPEG"):  # such as a thumbnail
        (folder / f"{kind}.{suffix}").write_bytes(encode_blue(kind))
    assert sample_names(folder) == {"whole.png"}


def test_the_extensions_of_image_folder_are_those_of_torchvision() -> None:
    folder = pytest.importorskip("torchvision.datasets.folder", reason="the extra 'loaders' is not installed")
    assert folder.IMG_EXTENSIONS == kinds.IMAGE_FOLDER_EXTENSIONS
    assert kinds.IMAGE_EXTENSIONS.issuperset(kinds.IMAGE_FOLDER_EXTENSIONS)


def test_picture_whose_plugin_is_missing_is_rejected_and_keeps_its_id(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(own_pillow.Image.OPEN, "HEIF", raising=False)
    for name in ("a.heic", "nameless"):
        (folder / name).write_bytes(b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + bytes(64))
    recipe = Recipe(format="shards", size=8)
    manifest = convert(folder.parent, tmp_path / "out", recipe, workers=0, max_rejects=1).manifest
    assert [(bad.id, bad.path) for bad in manifest.rejected] == [(0, "a/a.heic"), (1, "a/nameless")]
    assert "pip install --no-deps pillow-heif" in manifest.rejected[0].reason


def test_convert_reports_a_missing_decoder_before_damaged_pictures(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(own_pillow.Image.OPEN, "HEIF", raising=False)
    (folder / "a.jpg").write_bytes(b"\xff\xd8\xff damaged")
    for name in ("b.heic", "c.HEIC"):
        (folder / name).write_bytes(b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + bytes(64))
    words = ["convert", "tree", "out", "--format", "shards", "--size", "8", "--workers", "0"]
    refused = run_here("precache", *words, cwd=tmp_path)
    assert "2 pictures are named as HEIF" in caplog.text
    check_bad_input(
        refused, "no decoder for HEIF", "pip install --no-deps pillow-heif", "3 pictures", "2 of them"
    )
    converted = run_here("precache", *words, "--max-rejects", 1, "--overwrite", cwd=tmp_path)
    first, second, *_ = converted.stderr.splitlines()
    assert "2 pictures left out only because this Pillow has no decoder for HEIF" in first
    assert "rejected a/a.jpg" in second


@pytest.mark.parametrize("kind", ["HEIF", "AVIF", "WEBP"])
def test_a_picture_is_taken_once_its_decoder_is_installed(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither `check`, nor a finished or an unfinished conversion remembers it as damaged."""
    data = webp(noise(8, 8, 3)) if kind == "WEBP" else encode_blue(kind)
    (folder / f"a.{NAMES[kind]}").write_bytes(data)
    recipe = Recipe(format="shards", size=8)
    opener = own_pillow.Image.OPEN[kind]
    monkeypatch.setitem(own_pillow.Image.OPEN, kind, (None, lambda _: "not supported"))
    report = check(folder.parent, workers=0)
    assert len(report.rejected) == 1
    assert read_list(report.list_file) == ()
    convert(folder.parent, tmp_path / "finished", recipe, workers=0, max_rejects=1)
    with pytest.raises(DatasetError, match=f"no decoder for {kind}"):
        convert(folder.parent, tmp_path / "unfinished", recipe, workers=0, max_rejects=0)
    monkeypatch.setitem(own_pillow.Image.OPEN, kind, opener)
    with pytest.raises(DatasetError, match="decoder that is installed now"):
        convert(folder.parent, tmp_path / "finished", recipe, workers=0, max_rejects=1)
    for name, overwrite in (("finished", True), ("unfinished", False)):
        result = convert(folder.parent, tmp_path / name, recipe, workers=0, overwrite=overwrite)
        assert result.manifest.rejected == ()
    assert check(folder.parent, workers=0).rejected == ()


def test_postscript_picture_runs_no_program(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the program that Pillow would run by one that leaves a file."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/mark\nexit 1\n")
    program.chmod(0o755)
    (folder / "script.jpg").write_bytes(EPS)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    options = ("--format", "webdataset", "--size", 8, "--max-rejects", 1)
    result = run("precache", "convert", "tree", "out", *options, cwd=tmp_path)
    assert not (tmp_path / "mark").exists()
    assert "rejected a/script.jpg: cannot be decoded (not a known image format)" in result.stderr
