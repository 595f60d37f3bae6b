"""What is a picture, and what Pillow is never asked to open."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from precache import Recipe, convert, images, jpeg
from precache.errors import ImageError
from precache.pictures import kinds
from precache.sources.tree import scan_tree
from tests.command import ROOT, run

NAMES = {
    "JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm", "TGA": "tga",
    "ICO": "ico", "DDS": "dds", "SGI": "sgi", "PCX": "pcx", "DIB": "dib", "QOI": "qoi",
    "WEBP": "webp", "AVIF": "avif", "HEIF": "heic", "JPEG2000": "jp2",
}  # fmt: skip
FEATURES = {"WEBP": "webp", "JPEG2000": "jpg_2000"}
WITH_SIGNATURE = {"JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "HEIF", "JPEG2000"}
BOXES = {
    "AVIF": b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miafMA1B",
    "HEIF": b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf",
}


def saved(kind: str) -> bytes:
    """A picture of 32 x 32, blue."""
    if kind in FEATURES and not features.check(FEATURES[kind]):
        pytest.skip(f"this Pillow has no {kind}")
    if kind not in Image.SAVE:
        Image.init()
    buffer = io.BytesIO()
    try:
        Image.new("RGB", (32, 32), (0, 0, 255)).save(buffer, kind, quality=90)
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
    assert {".heic", ".heif", ".avif"} <= known, "with their plugins or without them"
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
    with pytest.raises(ImageError, match=r"this Pillow has no decoder for PNG.*'precache doctor' prints"):
        images.decode(data, "x.png")


@pytest.mark.parametrize(("kind", "package"), [("HEIF", "pillow-heif"), ("AVIF", "pillow-avif-plugin")])
def test_a_picture_whose_plugin_is_missing_is_rejected_with_its_name(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a sample all the same: ids are the same where the plugin is installed."""
    monkeypatch.delitem(Image.OPEN, kind, raising=False)
    if kind == "AVIF":
        monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    folder = tmp_path / "tree/a"
    folder.mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / "b.png")
    for name in (f"a.{NAMES[kind]}", "nameless"):
        (folder / name).write_bytes(BOXES[kind] + bytes(64))
    recipe = Recipe(format="shards", size=8)
    manifest = convert(tmp_path / "tree", tmp_path / "out", recipe, workers=0, max_rejects=1).manifest
    assert [(bad.id, bad.path) for bad in manifest.rejected] == [(0, f"a/a.{NAMES[kind]}"), (2, "a/nameless")]
    for bad in manifest.rejected:
        assert f"no decoder for {kind}" in bad.reason
        assert bad.reason.endswith(f"python -m pip install --no-deps {package})")


@pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
def test_workers_read_what_a_plugin_decodes(kind: str, tmp_path: Path) -> None:
    """Forked ones, and those that begin anew; what decoded it is written down."""
    content = saved(kind)
    (tmp_path / "tree/a").mkdir(parents=True)
    for number in range(3):
        (tmp_path / f"tree/a/{number}.{NAMES[kind]}").write_bytes(content)
    for start in ("fork", "spawn"):
        code = (
            f"import multiprocessing, threading, time; from precache import Recipe, convert\n"
            f"if __name__ == '__main__':\n"
            f"  if {start!r} == 'spawn': threading.Thread(target=time.sleep, args=(9,), daemon=1).start()\n"
            f"  recipe = Recipe(format='shards', size=8, shard_bytes=192)\n"
            f"  made = convert('tree', {start!r}, recipe, workers=2).manifest\n"
            f"  assert made.samples == 3, made.rejected\n"
            f"  print(made.made_by)\n"
        )
        (tmp_path / "script.py").write_text(code)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if kind in kinds.DECODER_PACKAGES and kinds.DECODER_PACKAGES[kind] in kinds.loaded_packages:
            assert kinds.DECODER_PACKAGES[kind] in done.stdout


@pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
def test_every_cut_of_a_plugins_picture_is_rejected_in_one_line(kind: str) -> None:
    content = saved(kind)
    for stop in range(1, len(content), max(1, len(content) // 40)):
        with pytest.raises(ImageError, match=r"^x: cannot be decoded") as error:
            images.decode(content[:stop], "x")
        assert "\n" not in str(error.value)


SVG = b'<?xml version="1.0"?>\n<!-- made by hand -->\n<svg xmlns="http://www.w3.org/2000/svg"/>\n'


def test_drawings_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "tree/a"
    folder.mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / "whole.png")
    for name, content in (
        ("a.jpg", SVG), ("b.png", b"\xef\xbb\xbf" + SVG), ("c.jpg", b"%PDF-1.4\n"),
        ("page.pdf", b"%PDF-1.4\n"),
        ("logo.SVG", SVG), ("logo.svgz", b"\x1f\x8b"), ("d.jpg", b"<html>an error page</html>"),
    ):  # fmt: skip
        (folder / name).write_bytes(content)
    scan = scan_tree(tmp_path / "tree")
    words = "a drawing, not a picture; render it first"
    assert {found.path: found.reason for found in scan.ignored} == {
        "a/logo.SVG": f"SVG: {words}", "a/logo.svgz": f"SVG: {words}", "a/page.pdf": f"PDF: {words}"
    }  # fmt: skip
    assert any("look like pictures are left out" in line and "page.pdf" in line for line in scan.warnings)
    options = ("--format", "shards", "--size", 8, "--max-rejects", 1, "--workers", 0)
    result = run("precache", "convert", "tree", "out", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for name, kind in (("a.jpg", "SVG"), ("b.png", "SVG"), ("c.jpg", "PDF")):
        assert f"rejected a/{name}: cannot be decoded ({kind}: {words})" in result.stderr
    assert "rejected a/d.jpg: cannot be decoded (not a known image format)" in result.stderr


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
        EPS, b"/* XPM */\nstatic", b"#define x_width 8\n#define x_height 8\n",
    ):  # fmt: skip
        with pytest.raises(ImageError, match="not a known image format"):
            images.decode(data, "x.jpg")
