import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.cli import main
from bench.commands import loaders as loaders_command
from bench.measure import conversion
from bench.measure.conversion import ConversionResult
from bench.report.result import Result
from precache.console import commandline
from tests.bench.report.test_gain import fed
from tests.bench.report.test_gain import result as gain_result
from tests.bench.rich_result import around, rich_result
from tests.command import check_bad_input, run

Bench = Callable[..., subprocess.CompletedProcess[str]]
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
    result = run(
        "bench", "loaders", "--backend", "dali", "--trainer", "emulated:500", *QUICK, "--repeats", 1, cwd=data
    )
    assert result.returncode == 0, result.stderr
    header, row = table_of(result.stdout)[:2]
    assert header.split()[:3] == ["loader", "images/s", "accelerator"]
    assert row.split()[0] == "dali"
    assert "one run each" in " ".join(result.stdout.split())


def table_of(printed: str, first: str = "loader") -> list[str]:
    """From the table's titles on."""
    lines = printed.splitlines()
    return lines[next(n for n, line in enumerate(lines) if line.lstrip("* ").startswith(f"{first} ")) :]


@pytest.mark.slow
def test_all_backends_are_compared_in_a_table_of_100_columns(data: Path) -> None:
    result = run("bench", "loaders", "--trainer", "emulated:500", "--details", *QUICK, cwd=data)
    assert result.returncode == 0, result.stderr
    table = table_of(result.stdout, "backend")[: 1 + 7]
    assert [line.lstrip("* ").split()[0] for line in table] == [
        "backend",
        "imagefolder",
        "pytorch",
        "dali",
        "shards",
        "synthetic",
        "webdataset",
        "gather",
    ]
    assert all(len(line.rstrip()) <= 100 and "…" not in line for line in table)
    # where this machine is busy no winner is named; `test_table` holds both
    assert any(line.startswith("*") for line in table) != ("Other processes took" in result.stdout)
    assert not any(line.startswith("*") for line in table if "synthetic" in line or "gather" in line)
    assert "skipped nvjpeg on data/raw: " in result.stdout
    assert "\npytorch on raw tree: " in result.stdout


@pytest.mark.slow
def test_loaders_alone_stand_beside_the_limit_and_other_libraries(data: Path) -> None:
    arguments = ("--backend", "shards", "--trainer", "none", "--against", "npy", "--device", "cpu", *QUICK)
    result = run("bench", "loaders", *arguments, "--details", cwd=data)
    assert result.returncode == 0, result.stderr
    header, *rows = table_of(result.stdout, "backend")[:4]
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


@pytest.fixture
def bench(data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Bench:
    """Runs a command in `data` in this process: importing torch takes seconds."""
    monkeypatch.chdir(data)

    def run_here(*arguments: object) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = commandline.run(main, "bench", list(map(str, arguments)))
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run_here


def test_a_missing_folder_is_skipped_with_the_remedy(data: Path, bench: Bench) -> None:
    (data / "data/webdataset").unlink()
    arguments = ("--backend", "webdataset,synthetic", "--trainer", "none", "--device", "cpu", *QUICK)
    result = bench("loaders", *arguments)
    assert result.returncode == 0, result.stderr
    assert "skipped webdataset on data/webdataset: data/webdataset: does not exist" in result.stdout
    assert "precache convert" in result.stdout


def test_json_and_report_round_trip(data: Path, bench: Bench) -> None:
    arguments = ("loaders", "data/shards", "--backend", "shards", *QUICK, "--repeats", 1)
    result = bench(*arguments, "--trainer", "emulated:500", "--json", "out/r.json")
    assert result.returncode == 0, result.stderr
    stored = json.loads((data / "out/r.json").read_text())
    assert [row["backend"] for row in stored["rows"]] == ["shards", "gather"]
    shown = bench("report", "out/r.json", "--html", "out/r.html")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[:3] == result.stdout.splitlines()[:3]
    assert "Does the trainer wait for data?" in (data / "out/r.html").read_text()
    printed = bench(*arguments, "--trainer", "none", "--json", "-")
    assert len(json.loads(printed.stdout)["rows"]) == 2


MEASURED = ("loaders", "data/shards", "--backend", "shards", "--trainer", "none", "--device", "cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Result:
    """What 'bench loaders' has measured, without measuring."""
    result = rich_result()
    monkeypatch.setattr(loaders_command, "compare", lambda *_, **__: result)
    return result


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_the_json_alone_is_printed_for_a_dash(
    data: Path, bench: Bench, measured: Result, quiet: tuple[str, ...]
) -> None:
    printed = bench(*MEASURED, *quiet, "--json", "-", "--html", "r.html")
    assert Result.from_json(json.loads(printed.stdout)) == measured
    assert (data / "r.html").exists()
    assert not (data / "-").exists()


def test_quiet_prints_nothing(data: Path, bench: Bench, measured: Result) -> None:
    printed = bench(*MEASURED, "--quiet", "--json", "r.json", "--html", "r.html")
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, "", "")
    assert Result.from_json(json.loads((data / "r.json").read_text())) == measured
    assert (data / "r.html").exists()
    loud = bench(*MEASURED, "--json", "r.json").stdout
    assert "wrote r.json" in loud


def test_the_sentence_comes_first_then_five_columns_and_where_the_rest_is(
    data: Path, bench: Bench, measured: Result
) -> None:
    lines = bench(*MEASURED, "--html", "r.html").stdout.splitlines()
    assert lines[0].startswith("Backend `shards` delivers 24,000 images/s and keeps the accelerator busy")
    assert all(len(line.rstrip()) <= 130 for line in lines)
    assert table_of("\n".join(lines))[0].split("  ")[0] == "loader"
    assert [line for line in lines if "r.html" in line] == ["the page: r.html"], "one file, one line"
    assert not any("ratio" in line or "MLPerf" in line for line in lines)
    assert "--details" in bench(*MEASURED).stdout.splitlines()[-1]


def test_details_are_every_column_and_finding(data: Path, bench: Bench, measured: Result) -> None:
    printed = bench(*MEASURED, "--details").stdout
    assert {"backend", "ratio", "verdict"} <= set(table_of(printed, "backend")[0].split())
    assert "MLPerf Storage asks for 90%" in printed
    assert "ratio: together over trainer" in printed


def test_markdown_is_five_columns_and_with_details_all(data: Path, bench: Bench, measured: Result) -> None:
    short = bench(*MEASURED, "--markdown", "--html", "r.html").stdout
    assert "the page: r.html" in short
    assert "| loader | images/s | accelerator busy | from a cold disk | first batch |" in short
    assert bench(*MEASURED, "--markdown", "--details").stdout.startswith("| backend | data | loader |")


def test_the_price_of_an_hour_is_in_the_sentence_and_on_the_page(
    data: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = fed("imagefolder", "raw tree", 0.31), fed("shards", "shards", 0.99)
    monkeypatch.setattr(loaders_command, "compare", lambda *_, **__: gain_result(*rows))
    printed = bench(*MEASURED, "--gpu-price", 2.5, "--html", "r.html").stdout
    assert "At $2.50 an hour" in " ".join(printed.split())
    assert "At $2.50 an hour" in (data / "r.html").read_text()
    bench(*MEASURED, "--json", "r.json")
    assert "At $4.00 an hour" in " ".join(bench("report", "r.json", "--gpu-price", 4).stdout.split())
    assert bench("report", "r.json", "--gpu-price", 0).returncode == 2


def test_a_report_can_be_a_picture(data: Path, bench: Bench, measured: Result) -> None:
    bench(*MEASURED, "--json", "r.json")
    printed = bench("report", "r.json", "--svg", "out/p.svg")
    assert "wrote out/p.svg" in printed.stdout
    assert (data / "out/p.svg").read_text().startswith("<svg ")


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_comparison_that_is_stopped_says_what_is_lost(
    data: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, said: str
) -> None:
    def stopped(arms: object, spec: object, on_progress: Callable[[int, int], None], peers: object) -> None:
        for done in range(13):
            on_progress(done, 40)
        signal.raise_signal(number)

    monkeypatch.setattr(loaders_command, "compare", stopped)
    printed = bench(*MEASURED, "--json", "r.json")
    lost = f"bench: error: {said} after 12 of 40 runs; nothing was written: a result needs all runs"
    assert printed.stderr.splitlines()[-1] == lost
    assert printed.returncode == 128 + number
    assert not (data / "r.json").exists()


def test_converting_prints_the_json_alone_for_a_dash(
    data: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ConversionResult({"cpu": "EPYC"}, {"workers": 2}, {"decode": around(100)}, (), 2**20)
    monkeypatch.setattr(conversion, "measure", lambda *_: result)
    printed = bench("convert", "--json", "-")
    assert json.loads(printed.stdout) == {**result.to_json(), "wholes": []}
    assert not (data / "-").exists()


def test_quickstart_goes_the_whole_way(tmp_path: Path) -> None:
    check_quickstart(tmp_path)


@pytest.mark.slow
def test_quickstart_goes_the_whole_way_again(tmp_path: Path) -> None:
    check_quickstart(tmp_path)
    check_quickstart(tmp_path)


def check_quickstart(folder: Path) -> None:
    result = run("bench", "quickstart", "--images", 48, "--batches", 1, "--repeats", 1, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "busy" in result.stdout.splitlines()[0], "the sentence is the first line"
    assert result.stdout.splitlines()[-1] == "the page: data/quickstart/report.html"
    stored = json.loads((folder / "data/quickstart/result.json").read_text())
    assert stored["settings"]["augment"] == "train"
    for name in ("shards", "webdataset"):
        cost = stored["settings"]["conversions"][name]
        assert cost["seconds"] > 0
        files = (folder / "data/quickstart" / name).rglob("*")
        assert cost["size_bytes"] == sum(file.stat().st_size for file in files if file.is_file())
    page = (folder / "data/quickstart/report.html").read_text()
    for mention in ("pytorch", "shards", "webdataset", "emulated:h100"):
        assert mention in result.stdout
        assert mention in page


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (
            ["loaders", "--backend", "dalli"],
            ["unknown backend 'dalli'", "all, dali, imagefolder, nvjpeg, pytorch, shards"],
        ),
        (["loaders", "--trainer", "resnet51"], ["unknown trainer 'resnet51'", "emulated:h100"]),
        (["loaders", "--trainer", "emulated:fast"], ["unknown rate 'fast'", "images/s"]),
        (["loaders", "--trainer", "emulated:h100-vit-sx1"], ["x2 to x1,024, got x1"]),
        (
            ["loaders", "--trainer", "vit_s_16", "--size", "64"],
            ["trainer vit_s_16 takes pictures of 224", "64"],
        ),
        (["loaders", "--trainer", "none", "--compile"], ["compile is for trainers that compute, got 'none'"]),
        (["loaders", "--trainer", "none", "--amp", "bf16"], ["amp 'bf16' is for trainers that compute"]),
        (
            ["loaders", "--trainer", "resnet18", "--amp", "half"],
            ["unknown amp 'half'", "auto, bf16, fp16, off"],
        ),
        (["loaders", "--cache", "disk"], ["unknown cache 'disk'", "device, none, ram"]),
        (["loaders", "--cache", "ram", "--cold"], ["cache 'ram' is full before anything is timed", "--cold"]),
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
        (["loaders", "--trainer", "emulated:1e-12"], ["unknown rate '1e-12'", "images/s"]),
        (["loaders", "--json", "data"], ["data: is a folder", "a file in it"]),
        (["convert", "--json", "data"], ["data: is a folder", "a file in it"]),
        (["report", "nowhere.json"], ["nowhere.json: cannot be read"]),
        (
            ["report", "data/shards/dataset.json"],
            ["data/shards/dataset.json: not a result of 'bench loaders'"],
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], mentions: list[str], bench: Bench
) -> None:
    check_bad_input(bench(*arguments), *mentions)
