"""How large a picture may be, and that large ones are decoded one at a time."""

import multiprocessing
import time
from pathlib import Path

import pytest
from PIL import Image

import precache
from precache.errors import ImageError, SettingError
from precache.pictures import images
from precache.pictures.images import Rendering
from precache.pictures.turns import LARGE_PIXELS, Turn
from tests.conftest import small_recipe
from tests.precache.pictures.drawing import encoded


def test_the_limit_is_the_callers_not_pillows() -> None:
    """Beyond what Pillow refuses by itself; its own limit is as before."""
    before = Image.MAX_IMAGE_PIXELS
    data = encoded(Image.new("1", (18_000, 10_000), 1))
    with pytest.raises(ImageError, match="--max-pixels allows 100,000,000"):
        images.render(data, "x.png", Rendering(size=8))
    pixels, size = images.render(data, "x.png", Rendering(size=8, max_pixels=180_000_000))
    assert size == (18_000, 10_000)
    assert (pixels == 255).all()
    assert before == Image.MAX_IMAGE_PIXELS


def test_the_limit_is_a_setting_of_conversion_and_check(tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (10 + number, 10)).save(tmp_path / f"tree/a/{number}.png")
    report = precache.check(tmp_path / "tree", max_pixels=120, workers=0)
    recipe = small_recipe("shards", size=8, max_pixels=120)
    manifest = precache.convert(tmp_path / "tree", tmp_path / "a", recipe, workers=0, max_rejects=1).manifest
    for (rejected,) in (manifest.rejected, report.rejected):
        assert rejected.path == "a/3.png"
        assert "13x10 is 130 pixels, --max-pixels allows 120" in rejected.reason
    with pytest.raises(SettingError, match=r"max_pixels.* got 0"):
        precache.check(tmp_path / "tree", max_pixels=0, workers=0)


def _in_turn(log: Path, hold_s: float) -> None:
    with Turn() as turn:
        turn.wait(LARGE_PIXELS + 1)
        with open(log, "a") as file:
            file.write("begins\n")
        time.sleep(hold_s)
        with open(log, "a") as file:
            file.write("ends\n")


def test_large_pictures_take_turns_over_processes(tmp_path: Path) -> None:
    """A turn ends with the process that has it; small pictures take none."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_in_turn, args=(tmp_path / "log", 0.05)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "log").read_text().split() == ["begins", "ends"] * 4
    for kind in ("JPEG", "PNG"):
        holder = context.Process(target=_in_turn, args=(tmp_path / kind, 60))
        holder.start()
        while not (tmp_path / kind).exists():
            time.sleep(0.01)
        images.render(encoded(Image.new("L", (5000, 500)), kind), "x", Rendering(size=8))
        large = encoded(Image.new("L", (5000, LARGE_PIXELS // 5000 + 1)), kind)
        waiting = context.Process(target=images.render, args=(large, "x", Rendering(size=8)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive(), "it is not its turn"
        holder.kill()
        waiting.join(10)
        assert waiting.exitcode == 0
        holder.join()
