import json
import subprocess
from pathlib import Path

import pytest

from bench.cli import main
from precache import commandline
from tests.command import check_bad_input, run

QUICK = ("--batch-size", 8, "--batches", 2, "--warmup", 1, "--repeats", 2, "--size", 32, "--workers", 1)


@pytest.fixture
def data(raw_tree: Path, converted: dict[str, Path], tmp_path: Path) -> Path:
    """A working folder with data/raw, data/shards, ... as the commands leave them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/raw").symlink_to(raw_tree)
    for name, path in converted.items():
        (tmp_path / "data" / name).symlink_to(path)
    return tmp_path


def test_bench_loaders_works_as_typed(data: Path) -> None:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    result = run("bench", "loaders", "--backend", "dali", "--trainer", "emulated:500", *QUICK, cwd=data)
    assert result.returncode == 0, result.stderr
    header, row = result.stdout.splitlines()[:2]
    assert header.split()[:3] == ["backend", "data", "loader"]
    assert row.split()[:2] == ["dali", "dali"]
    assert "median of 2 interleaved runs" in result.stdout


@pytest.mark.slow
def test_all_backends_are_compared_in_a_table_of_100_columns(data: Path) -> None:
    result = run("bench", "loaders", "--trainer", "emulated:500", *QUICK, cwd=data)
    assert result.returncode == 0, result.stderr
    table = result.stdout.splitlines()[: 1 + 6]
    assert [line.lstrip("* ").split()[0] for line in table] == [
        "backend",
        "dali",
        "pytorch",
        "shards",
        "synthetic",
        "webdataset",
        "gather",
    ]
    assert all(len(line.rstrip()) <= 100 and "…" not in line for line in table)
    assert any(line.startswith("*") for line in table)
    assert not any(line.startswith("*") for line in table if "synthetic" in line or "gather" in line)
    assert "skipped nvjpeg on data/raw: " in result.stdout
    assert "\npytorch on raw tree: " in result.stdout


@pytest.mark.slow
def test_loaders_alone_stand_beside_the_limit_and_other_libraries(data: Path) -> None:
    arguments = ("--backend", "shards", "--trainer", "none", "--against", "npy", "--device", "cpu", *QUICK)
    result = run("bench", "loaders", *arguments, cwd=data)
    assert result.returncode == 0, result.stderr
    header, *rows = result.stdout.splitlines()[:4]
    assert "of limit" in header
    assert [row.split()[0] for row in rows] == ["shards", "npy", "gather"]
    assert "\nshards on shards: " in result.stdout
    assert (data / "data/peers/npy-48/images.npy").exists()


@pytest.mark.slow
def test_quiet_prints_nothing_and_writes_the_result(data: Path) -> None:
    arguments = ("--backend", "shards", "--trainer", "emulated:500", "--quiet", "--json", "r.json", *QUICK)
    result = run("bench", "loaders", *arguments, cwd=data)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    row = json.loads((data / "r.json").read_text())["rows"][0]
    assert len(row["wait_s"]) == len(row["step_s"]) == 2
    assert 0 <= row["data_wait"]["median"] <= 1
    assert row["first_step_s"]["median"] >= 8 / 500
    assert {"compute", "collate"} <= row["stages"].keys()
    assert {"time_s", "cpu_share", "peak", "mean", "flags"} <= row["monitor"].keys()


def test_a_missing_folder_is_skipped_with_the_remedy(data: Path) -> None:
    (data / "data/webdataset").unlink()
    result = run("bench", "loaders", "--trainer", "none", *QUICK, cwd=data)
    assert result.returncode == 0, result.stderr
    assert "skipped webdataset on data/webdataset: data/webdataset: does not exist" in result.stdout
    assert "precache convert" in result.stdout


def test_json_and_report_round_trip(data: Path) -> None:
    arguments = ("--backend", "shards,synthetic", "--trainer", "emulated:500", *QUICK)
    result = run("bench", "loaders", "data/shards", *arguments, "--json", "out/r.json", cwd=data)
    assert result.returncode == 0, result.stderr
    stored = json.loads((data / "out/r.json").read_text())
    assert [row["backend"] for row in stored["rows"]] == ["shards", "synthetic", "gather"]
    shown = run("bench", "report", "out/r.json", "--html", "out/r.html", cwd=data)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[:3] == result.stdout.splitlines()[:3]
    assert "Does the trainer wait for data?" in (data / "out/r.html").read_text()
    printed = run("bench", "loaders", "data/shards", *arguments, "--json", "-", cwd=data)
    assert len(json.loads(printed.stdout)["rows"]) == 3


def test_quickstart_goes_the_whole_way_and_again(tmp_path: Path) -> None:
    arguments = ("--images", 48, "--batches", 1, "--repeats", 1)
    first = run("bench", "quickstart", *arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    page = (tmp_path / "data/quickstart/report.html").read_text()
    for mention in ("pytorch", "shards", "webdataset", "emulated:mlperf-h100"):
        assert mention in first.stdout
        assert mention in page
    again = run("bench", "quickstart", *arguments, cwd=tmp_path)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (
            ["loaders", "--backend", "dalli"],
            ["unknown backend 'dalli'", "all, dali, nvjpeg, pytorch, shards"],
        ),
        (["loaders", "--trainer", "resnet51"], ["unknown trainer 'resnet51'", "emulated:mlperf-h100"]),
        (["loaders", "--trainer", "emulated:fast"], ["unknown rate 'fast'", "images/s"]),
        (["loaders", "--batch-size", "0"], ["batch_size must be", "got 0"]),
        (["loaders", "--device", "tpu"], ["unknown device 'tpu'", "auto, cpu, cuda"]),
        (["loaders", "--against", "fcv", "--device", "cpu"], ["unknown peer 'fcv'", "ffcv-raw"]),
        (
            ["loaders", "--against", "npy", "--peer-python", "nowhere", "--device", "cpu"],
            ["nowhere: cannot be run"],
        ),
        (
            ["loaders", "data/shards", "--against", "imagefolder", "--device", "cpu"],
            ["peer imagefolder reads raw"],
        ),
        (["loaders", "nowhere"], ["nowhere: does not exist"]),
        (
            ["loaders", "data/shards", "--backend", "webdataset"],
            ["data/shards holds shards", "--backend all"],
        ),
        (["loaders", "data/shards", "--backend", "shards", "--size", "64"], ["size 64 is more than", "(48)"]),
        (["loaders", "--trainer", "emulated:1e-12"], ["unknown rate '1e-12'", "images/s"]),
        (["loaders", "--json", "data"], ["data: is a folder", "a file in it"]),
        (["report", "nowhere.json"], ["nowhere.json: cannot be read"]),
        (
            ["report", "data/shards/dataset.json"],
            ["data/shards/dataset.json: not a result of 'bench loaders'"],
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    data: Path,
    arguments: list[str],
    mentions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(data)
    code = commandline.run(main, "bench", arguments)  # in this process: importing torch takes seconds
    check_bad_input(subprocess.CompletedProcess(arguments, code, *capfd.readouterr()), *mentions)
