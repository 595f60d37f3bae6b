"""How large a picture may be, and what it takes: asked of its header, before anything is decoded."""

import io
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin, features

import precache
from precache import images
from precache.errors import ImageError
from precache.pictures import pillow
from precache.pictures.turns import LARGE_PIXELS, Turn
from tests.command import ROOT, check_bad_input, run, run_here
from tests.conftest import small_recipe


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


KINDS = ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "TGA"] + [
    kind
    for kind, feature in (("WEBP", "webp"), ("AVIF", "avif"), ("JPEG2000", "jpg_2000"))
    if features.check(feature)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA"])
def test_a_picture_of_more_pixels_is_refused_by_size_and_option(kind: str, mode: str) -> None:
    try:
        data = encoded(Image.new(mode, (40, 50)), kind)
    except (OSError, ValueError, KeyError):
        pytest.skip(f"{kind} has no {mode}")
    name = "x.tga" if kind == "TGA" else "x"
    assert images.render(data, name, images.Rendering(size=8, max_pixels=2000))[1] == (40, 50)
    with pytest.raises(ImageError, match=r"is too large \(40x50 is 2,000 pixels, --max-pixels allows 1,999"):
        images.render(data, name, images.Rendering(size=8, max_pixels=1999))


def png_header(width: int, height: int, colour: int = 6) -> bytes:
    """A PNG that says that it is so large, and holds next to nothing."""
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, content in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(1000))),
        (b"IEND", b""),
    ):
        parts.append(struct.pack(">I", len(content)) + kind + content)
        parts.append(struct.pack(">I", zlib.crc32(kind + content)))
    return b"".join(parts)


def icon_of(png: bytes) -> bytes:
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(png), 22) + png


def webp_canvas(width: int, height: int) -> bytes:
    body = bytearray(encoded(Image.new("RGBA", (8, 8), (1, 2, 3, 4)), "WEBP", save_all=True))
    if body[12:16] != b"VP8X":
        body = bytearray(encoded(Image.new("RGBA", (8, 8)), "WEBP", save_all=True,
                                 append_images=[Image.new("RGBA", (8, 8), "red")]))  # fmt: skip
    assert body[12:16] == b"VP8X"
    body[24:27], body[27:30] = (width - 1).to_bytes(3, "little"), (height - 1).to_bytes(3, "little")
    return bytes(body)


def tiff_tile(side: int) -> bytes:
    """8 x 8 pixels, in a tile of `side` x `side`."""
    data = zlib.compress(bytes(1000))
    tags = [
        (256, 8), (257, 8), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side),
        (324, 8 + 2 + 12 * 10 + 4), (325, len(data)),
    ]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0) + data


def gif_frame(width: int, height: int) -> bytes:
    """A screen of 8 x 8 with a frame of so many pixels."""
    data = bytearray(encoded(Image.new("P", (8, 8)), "GIF"))
    at = data.index(b",\0\0\0\0\x08\0\x08\0")
    data[at + 5 : at + 9] = struct.pack("<HH", width, height)
    return bytes(data)


BOMBS = {
    "png": png_header(13_000, 13_000),
    "thin png": png_header(1, 170_000_000),
    "png of 2**62 pixels": png_header(2**31 - 1, 2**31 - 1),
    "icon": icon_of(png_header(13_000, 13_000)),
    "gif": gif_frame(60_000, 60_000),
    "tiff tile": tiff_tile(60_000),
    **({"webp": webp_canvas(16_383, 16_383)} if features.check("webp") else {}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_without_its_memory(name: str, tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(BOMBS[name])
    code = (
        "import resource, sys; from precache import images\n"
        "data = images.read_bytes(sys.argv[1])\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 30_000_000,) * 2)\n"
        "try: images.render(data, 'x', images.Rendering(size=8))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "bomb")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert answer.startswith("ImageError x: is too large ("), answer


def test_text_that_inflates_is_refused() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("bomb", "a" * (80 << 20), zip=True)
    data = encoded(Image.new("RGB", (8, 8)), "PNG", pnginfo=info)
    assert len(data) < 1 << 20
    with pytest.raises(ImageError, match="cannot be decoded"):
        images.decode(data, "x.png")


def test_the_limit_is_the_callers_not_pillows() -> None:
    """Beyond what Pillow refuses by itself; its own limit is as before, and so are its warnings."""
    before = Image.MAX_IMAGE_PIXELS
    data = encoded(Image.new("1", (20_000, 10_000), 1), "PNG")
    with pytest.raises(ImageError, match="--max-pixels allows 100,000,000"):
        images.render(data, "x.png", images.Rendering(size=8))
    pixels, size = images.render(data, "x.png", images.Rendering(size=8, max_pixels=200_000_000))
    assert size == (20_000, 10_000)
    assert (pixels == 255).all()
    assert before == Image.MAX_IMAGE_PIXELS
    assert pillow.undisturbed._inside == 0


def test_the_limit_is_a_setting_of_conversion_and_check(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "tree/a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10 + number, 10)).save(tmp_path / f"tree/a/{number}.png")
    report = precache.check(tmp_path / "tree", max_pixels=120, workers=0)
    recipe = small_recipe("shards", size=8, max_pixels=120)
    manifest = precache.convert(tmp_path / "tree", tmp_path / "a", recipe, workers=0, max_rejects=1).manifest
    reasons = [(bad.path, bad.reason) for bad in manifest.rejected]
    assert reasons == [(bad.path, bad.reason) for bad in report.rejected]
    assert [path for path, _ in reasons] == ["a/3.png"]
    assert "--max-pixels 120" in manifest.recipe.to_flags()
    options = ("--format", "shards", "--size", 8, "--max-pixels", 120, "--max-rejects", 1)
    result = run("precache", "convert", "tree", "b", *options, cwd=tmp_path)
    assert result.returncode == 0
    assert "rejected a/3.png: is too large (13x10 is 130 pixels, --max-pixels allows 120)" in result.stderr
    assert run("precache", "check", "tree", "--max-pixels", 130, cwd=tmp_path).returncode == 0
    for command in (("convert", "tree", "c", "--format", "shards"), ("check", "tree")):
        check_bad_input(
            run_here("precache", *command, "--max-pixels", 0, cwd=tmp_path), "max_pixels", "got 0"
        )


def _in_turn(log: Path, hold_s: float) -> None:
    with Turn() as turn:
        turn.wait(LARGE_PIXELS + 1)
        with open(log, "a") as file:
            file.write(f"{time.monotonic()} begins\n")
        time.sleep(hold_s)
        with open(log, "a") as file:
            file.write(f"{time.monotonic()} ends\n")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_large_pictures_take_turns_over_processes(method: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context(method)
    log = tmp_path / "log"
    processes = [context.Process(target=_in_turn, args=(log, 0.1)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    words = [line.split()[1] for line in log.read_text().splitlines()]
    assert words == ["begins", "ends"] * 4


def test_a_turn_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    holder = context.Process(target=_in_turn, args=(tmp_path / "holder", 60))
    holder.start()
    while not (tmp_path / "holder").exists():
        time.sleep(0.01)
    waiting = context.Process(target=_in_turn, args=(tmp_path / "waiting", 0))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "it is not its turn"
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    waiting.join(10)
    assert waiting.exitcode == 0
    holder.join()


def test_small_pictures_wait_for_nobody_and_large_ones_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(Turn, "wait", lambda self, pixels: waited.append(pixels))
    noise = np.random.default_rng(0).integers(0, 256, (60, 50, 4), np.uint8)
    for kind, image in (("JPEG", Image.fromarray(noise[..., :3])), ("PNG", Image.fromarray(noise))):
        data = encoded(image, kind)
        whole, _ = images.render(data, "x", images.Rendering(size=20))
        monkeypatch.setattr(pillow, "_BAND_PIXELS", 7 * 50)  # bands of 7 rows, the last one of 4
        banded, _ = images.render(data, "x", images.Rendering(size=20))
        monkeypatch.setattr(pillow, "_BAND_PIXELS", 1 << 22)
        assert np.array_equal(whole, banded), kind
    assert set(waited) == {3000, 20 * 20}, "decoded, and stored"
    assert LARGE_PIXELS > 3000
