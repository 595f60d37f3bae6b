"""`bench convert` on a small tree: its structure and relations, never how fast anything is."""

import json
import sys
from pathlib import Path

import pytest

from bench.measure.conversion import OURS
from bench.measure.fresh import run_watched
from precache.errors import WorkerError
from tests.command import run_here
from tests.conftest import IMAGES


def test_stages_and_whole_conversions_are_measured_and_said(raw_tree: Path, tmp_path: Path) -> None:
    quick = ("--repeats", 2, "--pictures", 10, "--size", 32, "--workers", 1, "--json", "r.json")
    words = ("--against", "npy", "--fit", "crop", *quick, "--scratch", ".")
    ended = run_here("bench", "convert", raw_tree, *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["stages"].keys() == {"read", "decode", "resize", "write"}
    for rate in (*found["stages"].values(), *(whole["images_per_s"] for whole in found["wholes"])):
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]
    (ours, npy) = found["wholes"]
    assert [ours["name"], npy["name"]] == [OURS, "npy"]
    rates = ours["images_per_s"], npy["images_per_s"]
    assert rates[0]["low"] / rates[1]["high"] <= npy["ratio"]["median"] <= rates[0]["high"] / rates[1]["low"]
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("Converting reaches "), "the answer comes first"
    assert all(len(line.rstrip()) <= 100 for line in lines)
    assert f"npy {npy['images_per_s']['median']:,.0f} (" in " ".join(ended.stdout.split())
    for mention in (f"{IMAGES} pictures", "median of 2 runs"):
        assert mention in " ".join(lines)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_watched_process_is_timed_and_its_failure_named() -> None:
    wall_s, printed = run_watched([sys.executable, "-c", "import time; time.sleep(0.2); print('done')"])
    assert wall_s >= 0.2
    assert printed == "done\n"
    with pytest.raises(WorkerError, match=r"exit code 3; the reason"):
        run_watched([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
