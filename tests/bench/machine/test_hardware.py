"""`bench hardware`: structure, units and relations; never how fast anything is."""

import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.commands import hardware as command
from bench.machine import measurements
from bench.machine.hardware import describe_machine
from bench.machine.measurements import Hardware, HardwareSpec, Measurement
from bench.report.stats import Estimate
from tests.command import run_here
from tests.conftest import IMAGES

SHARED_MEMORY = Path("/dev/shm")
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
    jpegs = [path.stat().st_size for path in raw_tree.glob("*/*.jpg")]
    assert stored["mean_file_bytes"] == pytest.approx(np.mean(jpegs), rel=0.2)
    assert (stored["data"]["pictures"], stored["repeats"]) == (IMAGES, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no tmpfs at /dev/shm")
def test_without_jpegs_or_a_disk_the_rest_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        small = {"buffer_bytes": 2**20, "file_bytes": 2**20 + 512, "matrix": 32}
        spec = HardwareSpec(scratch=Path(folder), repeats=2, seconds=0.01, **small)
        result = measurements.measure(spec, [])
        assert list(Path(folder).iterdir()) == []
    decoded = [m for m in result.measurements if m.name.startswith("JPEG")]
    assert [(m.value, m.how) for m in decoded] == [(None, "no JPEG in the tree")] * 2
    found = {m.name: m.value for m in result.measurements}
    assert found["disk, sequential read"] is None
    assert found["memory copy, one thread"] is not None
    command.show(dataclasses.replace(result, other_cpu=0.31))
    printed = " ".join(capsys.readouterr().out.split())
    assert "100% of a file stays in memory: it is on no disk" in printed
    assert "Other processes took 31% of the CPUs" in printed


def of_disk(rate: float | None) -> Hardware:
    value = None if rate is None else Estimate(rate, rate, rate)
    reads = Measurement("disk, sequential read", "direct I/O", "MB/s", None, value)
    return Hardware({}, (reads,), 1e5, None, 1)


def test_times_follow_from_the_rates_and_the_slowest_part_is_the_answer() -> None:
    slow = of_disk(100)
    decode = Measurement("JPEG decode, all cores", "simplejpeg", "images/s", 1, Estimate(500, 500, 500))
    assert command.answer(slow).startswith("Reading from the disk is the slowest")
    both = command.answer(dataclasses.replace(slow, measurements=(*slow.measurements, decode)))
    assert both.startswith("Decoding on all cores is the slowest")
    assert both.index("2.00 s") < both.index("1,000 ms")
    assert "could be measured" in command.answer(of_disk(None))

    def seconds(unit: str, per_picture: float | None) -> float | None:
        measured = Measurement("", "", unit, per_picture, Estimate(2, 1, 3))
        return measured.seconds_for(pictures=1e6, file_bytes=1e12)

    assert seconds("MB/s", None) == 5e5
    assert seconds("GB/s", None) == 500
    assert seconds("GB/s", measurements.SERVED_BYTES) == pytest.approx(75.264)
    assert seconds("TFLOP/s", measurements.STEP_FLOP) == pytest.approx(12_270)
    assert Measurement("", "no GPU", "GB/s", 1).seconds_for(1, 1) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_all_versions_are_read_from_a_gpu() -> None:
    pytest.importorskip("pynvml")
    assert describe_machine(torch.device("cuda")).keys() >= {"driver", "cuda", "cudnn", "nccl"}
