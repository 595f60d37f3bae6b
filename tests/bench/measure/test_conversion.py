"""`bench convert` on a small tree: its structure and relations, never how fast anything is."""

import json
from pathlib import Path

from bench.measure.conversion import OURS
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
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("Converting reaches "), "the answer comes first"
    assert all(len(line.rstrip()) <= 100 for line in lines)
    assert f"{IMAGES} pictures" in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
