"""`bench convert` on a small tree: its structure and relations, never how fast anything is."""

import re
import sys
from pathlib import Path

import pytest

from bench.measure.conversion import OURS, measure
from bench.measure.fresh import run_watched
from bench.report.stats import Estimate
from precache.errors import WorkerError
from tests.command import run_here
from tests.conftest import IMAGES, small_recipe


def test_stages_and_whole_conversions_are_measured(raw_tree: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    result = measure(
        raw_tree,
        small_recipe("webdataset"),
        on_progress=lambda *step: steps.append(step),
        workers=1,
        pictures=20,
        repeats=2,
        against=("npy",),
        scratch=tmp_path,
        peer_python=sys.executable,
    )
    stages = {"read", "decode", "resize", "encode", "write"}
    assert result.stages.keys() == result.shares.keys() == stages
    assert all(0 < stage.low <= stage.median <= stage.high for stage in result.stages.values())
    assert [whole.name for whole in result.wholes] == [OURS, "npy"]
    assert result.wholes[0].ratio == Estimate(1, 1, 1)
    ours, npy = (whole.images_per_s for whole in result.wholes)
    assert ours.low / npy.high <= result.wholes[1].ratio.median <= ours.high / npy.low
    assert result.limit(*stages) < result.limit("decode")
    assert steps == [(done, 6) for done in range(7)]
    assert list(tmp_path.iterdir()) == []


def test_the_command_works_as_typed(raw_tree: Path, tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/raw").symlink_to(raw_tree)
    quick = ("--repeats", 1, "--pictures", 10, "--size", 32, "--json", "r.json", "--scratch", ".")
    result = run_here("bench", "convert", "--against", "webdataset", "--fit", "crop", *quick, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Converting reaches "), "the answer comes first"
    assert all(len(line.rstrip()) <= 100 for line in lines)
    assert re.search(r"^webdataset +\d+ \(\d+-\d+\) +[\d.]+ \(", result.stdout, re.MULTILINE)
    for mention in (f"{IMAGES} pictures", "median of 1 run", "simplejpeg", "--format shards"):
        assert mention in " ".join(lines)
    assert (tmp_path / "r.json").stat().st_size > 500


def test_a_watched_process_is_timed_and_its_failure_named() -> None:
    wall_s, printed = run_watched([sys.executable, "-c", "import time; time.sleep(0.2); print('done')"])
    assert wall_s >= 0.2
    assert printed == "done\n"
    with pytest.raises(WorkerError, match=r"exit code 3; the reason"):
        run_watched([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
