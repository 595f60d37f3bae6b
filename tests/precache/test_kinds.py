"""What is a picture, and what Pillow is never asked to open."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from precache import images, jpeg, kinds
from precache.errors import ImageError
from precache.sources.tree import scan_tree
from tests.command import run

NAMES = {
    "JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm", "TGA": "tga",
    "ICO": "ico", "DDS": "dds", "SGI": "sgi", "PCX": "pcx", "DIB": "dib", "QOI": "qoi",
    "WEBP": "webp", "AVIF": "avif", "JPEG2000": "jp2",
}  # fmt: skip
FEATURES = {"WEBP": "webp", "AVIF": "avif", "JPEG2000": "jpg_2000"}
WITH_SIGNATURE = {"JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "JPEG2000"}


def saved(kind: str) -> bytes:
    """A picture of 32 x 32, blue."""
    if kind in FEATURES and not features.check(FEATURES[kind]):
        pytest.skip(f"this Pillow has no {kind}")
    if kind not in Image.SAVE:
        Image.init()
    buffer = io.BytesIO()
    try:
        Image.new("RGB", (32, 32), (0, 0, 255)).save(buffer, kind)
    except KeyError:
        pytest.skip(f"this Pillow writes no {kind}")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", NAMES)
def test_whatever_an_installed_decoder_reads_is_a_picture(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "tree/a"
    folder.mkdir(parents=True)
    content = saved(kind)
    for name in (f"x.{NAMES[kind]}", f"X.{NAMES[kind].upper()}"):
        (folder / name).write_bytes(content)
        pixels = images.load(str(folder / name), 8).astype(int)
        assert np.abs(pixels - (0, 0, 255)).max() < 12
    (folder / "nameless").write_bytes(content)
    expected = [f"a/X.{NAMES[kind].upper()}", f"a/x.{NAMES[kind]}"]
    if kind in WITH_SIGNATURE:
        expected.insert(1, "a/nameless")
    scan = scan_tree(tmp_path / "tree")
    assert sorted(sample.path for sample in scan.samples) == sorted(expected)


def test_the_names_are_pillows() -> None:
    """Each extension that Pillow has for a kind that is read here is one of a picture."""
    Image.init()
    left_out = {".pfm", ".icb", ".vda", ".vst"}
    known = kinds.IMAGE_EXTENSIONS | kinds._SHARED_EXTENSIONS.keys()
    theirs = {name for name, kind in Image.EXTENSION.items() if kind in (*kinds.KINDS, "MPO")}
    assert theirs - known == left_out & theirs


def test_the_signatures_are_pillows() -> None:
    for signature, kind in kinds._SIGNATURES:
        accept = Image.OPEN[kind][1]
        assert accept is not None
        assert accept(signature.ljust(16, b"\0")), kind


def test_notes_are_no_pictures(tmp_path: Path) -> None:
    """Some of Pillow's signatures are two letters long."""
    (tmp_path / "a").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "a/x.jpg")
    for number, text in enumerate(
        ("P3 is good", "Python", "DDS files", "\n\x00", "qoif", "#define x_width 4")
    ):
        (tmp_path / f"a/notes-{number}").write_text(text)
    for name in ("dump.rgb", "cells.ras", "mask.bw"):
        (tmp_path / "a" / name).write_bytes(bytes(64))
    assert [sample.path for sample in scan_tree(tmp_path).samples] == ["a/x.jpg"]


def test_a_kind_without_its_decoder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved("PNG")
    monkeypatch.delitem(Image.OPEN, "PNG")
    with pytest.raises(ImageError, match="this Pillow has no decoder for PNG"):
        images.decode(data, "x.png")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def test_postscript_runs_no_program(tmp_path: Path) -> None:
    """Nor does a JPEG whose metadata is looked at; the program that Pillow would run leaves a mark."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/mark\nexit 1\n")
    program.chmod(0o755)
    (tmp_path / "tree/a").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (9, 9)).save(tmp_path / f"tree/a/{number}.png")
    (tmp_path / "tree/a/script.jpg").write_bytes(EPS)
    (tmp_path / "tree/a/script.png").write_bytes(EPS + b"Exif\0\0")
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{tmp_path}/bin{os.pathsep}{before}"
    try:
        options = ("--format", "webdataset", "--size", 8, "--max-rejects", 1)
        result = run("precache", "convert", "tree", "out", *options, cwd=tmp_path)
        checked = run("precache", "check", "tree", cwd=tmp_path)
    finally:
        os.environ["PATH"] = before
    assert not (tmp_path / "mark").exists()
    assert "rejected a/script.jpg: cannot be decoded (not a known image format)" in result.stderr
    assert checked.returncode == 1
    with pytest.raises(Exception, match="cannot identify"):
        jpeg.orientation(EPS + b"Exif\0\0")


def test_all_that_pillow_opens_besides_is_refused() -> None:
    """Stubs, renderers and work files, by their signatures."""
    Image.init()
    for data in (
        b"SIMPLE  =                    T" + b" " * 2850, b"\x89HDF\r\n\x1a\n" + bytes(64),
        b"GRIB" + bytes(64), b"BUFR" + bytes(64), b"\xd7\xcd\xc6\x9a\0\0" + bytes(64),
        b"\0\0\x01\xb3" + bytes(64), b"8BPS\0\1" + bytes(64), b"icns" + bytes(64),
        b"%PDF-1.4\n", EPS, b"/* XPM */\nstatic", b"#define x_width 8\n#define x_height 8\n",
    ):  # fmt: skip
        with pytest.raises(ImageError, match="not a known image format"):
            images.decode(data, "x.jpg")
