"""How large a picture may be, and that large ones are decoded one at a time."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import precache
from precache.errors import ImageError
from precache.pictures import images, pillow
from precache.pictures.images import Rendering
from precache.pictures.turns import LARGE_PIXELS, Turn
from tests.command import check_bad_input, run, run_here
from tests.conftest import small_recipe
from tests.precache.pictures.drawing import encoded, noise


def test_the_limit_is_the_callers_not_pillows() -> None:
    """Beyond what Pillow refuses by itself; its own limit is as before."""
    before = Image.MAX_IMAGE_PIXELS
    data = encoded(Image.new("1", (20_000, 10_000), 1))
    with pytest.raises(ImageError, match="--max-pixels allows 100,000,000"):
        images.render(data, "x.png", Rendering(size=8))
    pixels, size = images.render(data, "x.png", Rendering(size=8, max_pixels=200_000_000))
    assert size == (20_000, 10_000)
    assert (pixels == 255).all()
    assert before == Image.MAX_IMAGE_PIXELS


def test_the_limit_is_a_setting_of_conversion_and_check(tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (10 + number, 10)).save(tmp_path / f"tree/a/{number}.png")
    report = precache.check(tmp_path / "tree", max_pixels=120, workers=0)
    recipe = small_recipe("shards", size=8, max_pixels=120)
    manifest = precache.convert(tmp_path / "tree", tmp_path / "a", recipe, workers=0, max_rejects=1).manifest
    reasons = [(bad.path, bad.reason) for bad in manifest.rejected]
    assert reasons == [(bad.path, bad.reason) for bad in report.rejected]
    assert [path for path, _ in reasons] == ["a/3.png"]
    flags = manifest.recipe.to_flags().split()
    assert flags[-2:] == ["--max-pixels", "120"]
    result = run("precache", "convert", "tree", "b", *flags, "--max-rejects", 1, cwd=tmp_path)
    assert "rejected a/3.png: is too large (13x10 is 130 pixels, --max-pixels allows 120)" in result.stderr
    for command in (("convert", "tree", "c", "--format", "shards"), ("check", "tree")):
        refused = run_here("precache", *command, "--max-pixels", 0, cwd=tmp_path)
        check_bad_input(refused, "max_pixels", "got 0")


def _in_turn(log: Path, hold_s: float) -> None:
    with Turn() as turn:
        turn.wait(LARGE_PIXELS + 1)
        with open(log, "a") as file:
            file.write("begins\n")
        time.sleep(hold_s)
        with open(log, "a") as file:
            file.write("ends\n")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_large_pictures_take_turns_over_processes(method: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=_in_turn, args=(tmp_path / "log", 0.1)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "log").read_text().split() == ["begins", "ends"] * 4


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


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_small_pictures_wait_for_nobody_and_large_ones_are_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(Turn, "wait", lambda self, pixels: waited.append(pixels))
    data = encoded(noise(60, 50, 3 if kind == "JPEG" else 4), kind)
    whole, _ = images.render(data, "x", Rendering(size=20))
    monkeypatch.setattr(pillow, "_BAND_PIXELS", 7 * 50)  # blended 7 rows at a time, and the last 4
    assert np.array_equal(whole, images.render(data, "x", Rendering(size=20))[0])
    assert set(waited) == {60 * 50, 20 * 20}, "decoded, and stored"
    assert LARGE_PIXELS > 60 * 50
