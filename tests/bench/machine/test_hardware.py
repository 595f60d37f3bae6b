"""`bench hardware`: structure, units and relations; never how fast anything is."""

import dataclasses
import json
from pathlib import Path

import torch

from bench.commands import hardware as command
from bench.machine.measurements import Hardware, Measurement
from bench.report.stats import Estimate
from tests.command import run_here

NAMES = [
    "memory copy, one thread", "memory copy, all threads", "disk, sequential read", "disk, random 4 KiB",
    "disk, random 128 KiB", "JPEG decode, one core", "JPEG decode, all cores", "host to device, pinned",
    "host to device, pageable", "matrix multiply",
]  # fmt: skip


def test_everything_is_measured_or_says_why_not_in_a_table_of_100_columns(
    raw_tree: Path, tmp_path: Path
) -> None:
    quick = ("--repeats", 2, "--seconds", 0.01, "--scratch", ".", "--json", "out/h.json")
    ended = run_here("bench", "hardware", "--data", raw_tree, *quick, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert all(len(line.rstrip()) <= 100 and "…" not in line for line in lines)
    assert [name for name in NAMES if any(line.startswith(name) for line in lines)] == NAMES
    stored = json.loads((tmp_path / "out/h.json").read_text())
    found = {measurement["name"]: measurement for measurement in stored["measurements"]}
    assert list(found) == NAMES
    for measurement in found.values():
        if (value := measurement["value"]) is None:
            assert measurement["how"] == "no GPU" or tmp_path.name in measurement["how"]
        else:
            assert 0 < value["low"] <= value["median"] <= value["high"]
    assert (found["host to device, pinned"]["value"] is None) == (not torch.cuda.is_available())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_slowest_part_is_the_answer() -> None:
    reads = Measurement("disk, sequential read", "direct I/O", "MB/s", None, Estimate(100, 100, 100))
    decode = Measurement("JPEG decode, all cores", "simplejpeg", "images/s", 1, Estimate(500, 500, 500))
    slow = Hardware({}, (reads,), 1e5, None, 1)
    assert command.answer(slow).startswith("Reading from the disk is the slowest")
    both = command.answer(dataclasses.replace(slow, measurements=(reads, decode)))
    assert both.startswith("Decoding on all cores is the slowest")
    assert both.index("2.00 s") < both.index("1,000 ms")
