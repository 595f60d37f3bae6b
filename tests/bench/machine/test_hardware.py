"""`bench hardware`: structure, units and relations; never how fast anything is."""

import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.cli import main
from bench.commands import hardware as command
from bench.machine import disk, measurements
from bench.machine.disk import Disk
from bench.machine.measurements import Hardware, HardwareSpec, Measurement
from bench.report.stats import Estimate
from bench.report.words import duration
from precache.console import commandline
from precache.errors import SettingError
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run
from tests.conftest import IMAGES

SHARED_MEMORY = Path("/dev/shm")
NAMES = [
    "memory copy, one thread", "memory copy, all threads", "disk, sequential read", "disk, random 4 KiB",
    "disk, random 128 KiB", "JPEG decode, one core", "JPEG decode, all cores", "host to device, pinned",
    "host to device, pageable", "matrix multiply",
]  # fmt: skip


def quick(scratch: Path, **settings: object) -> HardwareSpec:
    defaults = {"repeats": 2, "seconds": 0.01, "buffer_bytes": 2**20, "file_bytes": 2**20 + 512, "matrix": 32}
    return HardwareSpec(scratch=scratch, **{**defaults, **settings})


@pytest.fixture
def on_a_disk() -> Iterator[Path]:
    """A folder whose files can leave memory."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    if not SHARED_MEMORY.is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    folder = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
    yield folder
    shutil.rmtree(folder)


def test_everything_is_measured_or_says_why_not(raw_tree: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    jpegs = measurements.sample_jpegs(scan_tree(raw_tree))
    assert 0 < len(jpegs) < IMAGES  # the tree has PNGs, too
    result = measurements.measure(quick(tmp_path), jpegs, on_progress=lambda *step: steps.append(step))
    assert [measurement.name for measurement in result.measurements] == NAMES
    for measurement in result.measurements:
        if measurement.value is None:
            assert measurement.how == "no GPU" or "on no disk" in measurement.how
        else:
            assert 0 < measurement.value.low <= measurement.value.median <= measurement.value.high
    assert (result.value("host to device, pinned") is None) == (not torch.cuda.is_available())
    assert result.mean_file_bytes == np.mean([len(jpeg) for jpeg in jpegs])
    measured = sum(measurement.value is not None for measurement in result.measurements)
    assert steps[-1] == (2 * measured, 2 * measured)
    assert list(tmp_path.iterdir()) == []
    json.dumps(result.to_json())


def test_random_matrices_are_multiplied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal numbers the product takes a GPU less power, so it runs faster than in a training."""
    multiplied: list[torch.Tensor] = []
    matmul = torch.matmul

    def spy(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        multiplied.extend((left, right))
        return matmul(left, right, out=out)

    monkeypatch.setattr(torch, "matmul", spy)
    measurements.measure(quick(tmp_path, repeats=1), [])
    left, right = multiplied[:2]
    assert len(left.unique()) > 100
    assert not torch.equal(left, right)


def test_a_tree_without_jpegs_leaves_decoding_out(tmp_path: Path) -> None:
    result = measurements.measure(quick(tmp_path, repeats=1), [])
    decoded = [m for m in result.measurements if m.name.startswith("JPEG")]
    assert [(m.value, m.how) for m in decoded] == [(None, "no JPEG in the tree")] * 2
    command.show(result)


def test_a_folder_in_memory_is_no_disk(in_memory: Path) -> None:
    stays = pytest.raises(SettingError, match="100% of a file stays in memory: it is on no disk")
    with stays, disk.readable_file(in_memory, 2**20):
        pass
    assert list(in_memory.iterdir()) == []
    result = measurements.measure(quick(in_memory, repeats=1), [])
    assert result.value("disk, sequential read") is None
    assert result.warnings == []
    assert result.disk == Disk("tmpfs", None)


@pytest.mark.parametrize("how", ["direct I/O", "pages dropped"])
def test_both_ways_of_reading_read_the_file(how: str, on_a_disk: Path) -> None:
    try:
        with disk.readable_file(on_a_disk, 3 * 2**20) as found:
            assert found.path.stat().st_size == 3 * 2**20
            if how != found.how == "pages dropped":
                pytest.skip("no direct I/O here")
            file = dataclasses.replace(found, how=how)
            assert file.sequential_rate(60) > 0
            assert file.random_rate(4096, 60) > 0
    except SettingError as error:
        pytest.skip(str(error))
    assert list(on_a_disk.iterdir()) == []


@pytest.mark.parametrize(
    ("device", "partition", "rotational", "expected"),
    [
        ("nvme0n1", "nvme0n1p2", "0\n", (Disk("nvme0n1", False), True, 3000)),
        ("sda", "sda1", "1\n", (Disk("sda", True), False, 150)),
        ("vda", None, "1\n", (Disk("vda", True), False, 150)),
    ],
)
def test_the_disk_is_found_behind_its_partition(
    device: str, partition: str | None, rotational: str, expected: tuple[Disk, bool, int], tmp_path: Path
) -> None:
    node = tmp_path / "devices" / device
    (node / "queue").mkdir(parents=True)
    (node / "queue/rotational").write_text(rotational)
    if partition is not None:
        node = node / partition
        node.mkdir()
        (node / "partition").write_text("1\n")
    number = tmp_path.stat().st_dev
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}").symlink_to(node)
    found = disk.disk_of(tmp_path, sysfs=tmp_path)
    assert (found, found.is_nvme, found.expected_mb_per_s) == expected


def block_device(sysfs: Path, path: str, slaves: tuple[Path, ...] = ()) -> Path:
    """A device as sysfs has it; one below another is a partition of that."""
    node = sysfs / "devices" / path
    (node / "slaves").mkdir(parents=True)
    if "/" in path:
        (node / "slaves").rmdir()
        (node / "partition").write_text("1\n")
    else:
        (node / "queue").mkdir()
        (node / "queue/rotational").write_text("0\n")
    for slave in slaves:
        (node / "slaves" / slave.name).symlink_to(slave)
    return node


@pytest.mark.parametrize(
    ("drives", "expected"),
    [(("nvme0n1",), 3000), (("nvme0n1", "nvme1n1"), 3000), (("nvme0n1", "sda"), 150), (("sda",), 150)],
)
def test_drives_are_found_behind_the_devices_mapped_to_them(
    drives: tuple[str, ...], expected: int, tmp_path: Path
) -> None:
    """A volume of LVM on LUKS on a partition of each drive."""
    whole = [block_device(tmp_path, drive) for drive in drives]
    partitions = [block_device(tmp_path, f"{node.name}/{node.name}p2") for node in whole]
    encrypted = [block_device(tmp_path, f"dm-{n}", (node,)) for n, node in enumerate(partitions, 1)]
    volume = block_device(tmp_path, "dm-0", tuple(encrypted))
    number = tmp_path.stat().st_dev
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}").symlink_to(volume)
    found = disk.disk_of(tmp_path, sysfs=tmp_path)
    assert found == Disk("dm-0", False, drives)
    assert found.expected_mb_per_s == expected


def of_disk(device: str, rate: float | None) -> Hardware:
    value = None if rate is None else Estimate(rate, rate, rate)
    reads = Measurement("disk, sequential read", "direct I/O", "MB/s", None, value)
    return Hardware({}, Disk(device, False), (reads,), 1e5, None, 1)


@pytest.mark.parametrize(
    ("device", "rate", "warned"),
    [
        ("sda", 149, True), ("sda", 151, False), ("nvme0n1", 2999, True), ("nvme0n1", 3001, False),
        ("sda", None, False),
    ],
)  # fmt: skip
def test_a_slow_disk_is_warned_of(device: str, rate: float | None, warned: bool) -> None:
    warnings = of_disk(device, rate).warnings
    assert len(warnings) == warned
    assert all(f"{rate:,} MB/s" in warning and device in warning for warning in warnings)


def test_what_takes_longest_is_the_answer() -> None:
    slow = of_disk("sda", 100)
    decode = Measurement("JPEG decode, all cores", "simplejpeg", "images/s", 1, Estimate(500, 500, 500))
    assert command.answer(slow) == (
        "Of feeding 1,000 pictures this takes longest: reading them from the disk, 1,000 ms."
    )
    both = dataclasses.replace(slow, measurements=(*slow.measurements, decode))
    assert command.answer(both) == (
        "Of feeding 1,000 pictures this takes longest: decoding them on all cores, 2.00 s (the other: "
        "reading them from the disk, 1,000 ms)."
    )
    assert "could be measured" in command.answer(of_disk("sda", None))


@pytest.mark.parametrize(("share", "said"), [(None, False), (0.1, False), (0.31, True)])
def test_other_busy_processes_are_told_of(
    share: float | None, said: bool, raw_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measurements.measure(quick(tmp_path, repeats=1), [])
    assert result.other_cpu is None or 0 <= result.other_cpu <= 1
    command.show(dataclasses.replace(result, other_cpu=share))
    assert ("Other processes took 31% of the CPUs" in capsys.readouterr().out) == said


def test_times_follow_from_the_rates() -> None:
    def seconds(unit: str, per_picture: float | None) -> float | None:
        measured = Measurement("", "", unit, per_picture, Estimate(2, 1, 3))
        return measured.seconds_for(pictures=1e6, file_bytes=1e12)

    assert seconds("MB/s", None) == 5e5
    assert seconds("GB/s", None) == 500
    assert seconds("GB/s", measurements.SERVED_BYTES) == pytest.approx(75.264)
    assert seconds("images/s", 1) == 5e5
    assert seconds("TFLOP/s", measurements.STEP_FLOP) == pytest.approx(12_270)
    assert Measurement("", "no GPU", "GB/s", 1, None).seconds_for(1, 1) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0.0052, "5.20 ms"), (1.9, "1,900 ms"), (2.5, "2.50 s"), (119, "119 s"),
        (121, "2.02 min"), (3 * 86400, "3.00 days"), (1e12, "31,688 years"),
    ],
)  # fmt: skip
def test_durations_are_told_in_the_unit_that_suits_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_the_command_prints_a_table_of_100_columns(raw_tree: Path, tmp_path: Path) -> None:
    quick = ("--repeats", 1, "--seconds", 0.01, "--scratch", ".")
    result = run("bench", "hardware", "--data", raw_tree, *quick, "--json", "out/h.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert all(len(line.rstrip()) <= 100 and "…" not in line for line in lines)
    assert [name for name in NAMES if any(line.startswith(name) for line in lines)] == NAMES
    assert f"Data set: {IMAGES} pictures" in result.stdout
    stored = json.loads((tmp_path / "out/h.json").read_text())
    assert [measurement["name"] for measurement in stored["measurements"]] == NAMES
    assert stored["data"]["pictures"] == IMAGES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_without_data_pictures_are_generated(tmp_path: Path) -> None:
    quick = ("--repeats", 1, "--seconds", 0.01, "--scratch", ".", "--json", "-")
    result = run("bench", "hardware", *quick, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    stored = json.loads(result.stdout)
    assert stored["data"] is None
    assert stored["mean_file_bytes"] > 1000


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["--scratch", "gone"], "gone: no such folder"),
        (["--repeats", "0"], "repeats must be"),
        (["--data", "gone"], "gone: does not exist"),
        (["--json", "."], ".: is a folder"),
        (["--seconds", "0"], "seconds must be positive, got 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], mention: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = commandline.run(main, "bench", ["hardware", *arguments])
    check_bad_input(subprocess.CompletedProcess(arguments, code, *capfd.readouterr()), mention)
