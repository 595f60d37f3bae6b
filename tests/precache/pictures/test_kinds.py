"""What is a picture, and what Pillow is never asked to open."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, convert
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run, run_here
from tests.precache.pictures.drawing import encode_image, load
from tests.precache.pictures.test_bad_pictures import EPS

NAMES = {
    "JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm", "TGA": "tga",
    "ICO": "ico", "DDS": "dds", "SGI": "sgi", "PCX": "pcx", "DIB": "dib", "QOI": "qoi",
    "WEBP": "webp", "AVIF": "avif", "HEIF": "heic", "JPEG2000": "jp2",
}  # fmt: skip
WITH_SIGNATURE = {"JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "HEIF", "JPEG2000"}


def saved(kind: str) -> bytes:
    """A picture of 32 x 32, blue."""
    if kind not in Image.SAVE:
        Image.init()
    try:
        return encode_image(Image.new("RGB", (32, 32), (0, 0, 255)), kind, quality=90)
    except (KeyError, OSError):
        pytest.skip(f"this Pillow writes no {kind}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A class folder with one whole picture."""
    folder = tmp_path / "tree/a"
    folder.mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / "whole.png")
    return folder


@pytest.mark.parametrize("kind", NAMES)
def test_whatever_an_installed_decoder_reads_is_a_picture(kind: str, folder: Path) -> None:
    content = saved(kind)
    names = {f"x.{NAMES[kind]}", f"X.{NAMES[kind].upper()}"}
    for name in (*names, "nameless"):
        (folder / name).write_bytes(content)
    for name in names:
        assert np.abs(load(str(folder / name), 8).astype(int) - (0, 0, 255)).max() < 12
    for number, text in enumerate(("P3 is good", "Python", "DDS files", "\n\x00")):
        (folder / f"notes-{number}").write_text(text)  # some of Pillow's signatures are two letters long
    found = {os.path.basename(sample.path) for sample in scan_tree(folder.parent).samples}
    assert found == {"whole.png", *names, *(["nameless"] if kind in WITH_SIGNATURE else [])}


def test_a_picture_whose_plugin_is_missing_is_a_reject_and_keeps_its_id(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are the same where the plugin is installed, which the reason says how to do."""
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    for name in ("a.heic", "nameless"):
        (folder / name).write_bytes(b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + bytes(64))
    recipe = Recipe(format="shards", size=8)
    manifest = convert(folder.parent, tmp_path / "out", recipe, workers=0, max_rejects=1).manifest
    assert [(bad.id, bad.path) for bad in manifest.rejected] == [(0, "a/a.heic"), (1, "a/nameless")]
    assert "pip install --no-deps pillow-heif" in manifest.rejected[0].reason


def test_a_missing_decoder_is_said_before_damage(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    (folder / "a.jpg").write_bytes(b"\xff\xd8\xff damaged")
    for name in ("b.heic", "c.HEIC"):
        (folder / name).write_bytes(b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + bytes(64))
    words = ["convert", "tree", "out", "--format", "shards", "--size", "8", "--workers", "0"]
    stopped = run_here("precache", *words, cwd=tmp_path)
    assert "2 pictures are named as HEIF" in caplog.text
    check_bad_input(
        stopped, "no decoder for HEIF", "pip install --no-deps pillow-heif", "3 pictures", "2 of them"
    )
    done = run_here("precache", *words, "--max-rejects", 1, "--overwrite", cwd=tmp_path)
    first, second, *_ = done.stderr.splitlines()
    assert "2 pictures left out only because this Pillow has no decoder for HEIF" in first
    assert "rejected a/a.jpg" in second


def test_postscript_picture_runs_no_program(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that Pillow would run leaves a mark."""
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
