"""`bench loaders` and `bench report`: what is printed, written and said of what could not be measured."""

import json
import signal
from pathlib import Path

import pytest

from bench.commands import loaders as command
from bench.report.row import Result
from tests.bench.conftest import Bench
from tests.bench.rich_result import rich_result
from tests.command import run

QUICK = ("--batch-size", 8, "--batches", 2, "--warmup", 1, "--repeats", 1, "--size", 32, "--workers", 1)
SHARDS = ("loaders", "data/shards", "--backend", "shards", "--trainer", "none", "--device", "cpu")


@pytest.mark.slow
def test_all_backends_are_compared_as_typed_beside_other_libraries(data: Path) -> None:
    words = ("--trainer", "emulated:500", "--details", "--device", "cpu", "--against", "npy", *QUICK)
    result = run("bench", "loaders", *words, "--json", "r.json", cwd=data)
    assert result.returncode == 0, result.stderr
    stored = json.loads((data / "r.json").read_text())
    found = {found["backend"] for found in stored["rows"]}
    assert found >= {"imagefolder", "pytorch", "shards", "synthetic", "webdataset", "npy", "gather"}
    assert "of limit" in result.stdout
    assert "skipped nvjpeg on data/raw: " in result.stdout
    assert "\npytorch (ours, raw tree): " in result.stdout
    assert (data / "data/peers/npy-48/images.npy").exists()
    for each in stored["rows"]:
        if not each["peer"]:
            assert len(each["wait_s"]) == len(each["step_s"]) == 2
            assert each["first_step_s"]["median"] >= 8 / 500


def test_a_report_says_what_was_said_when_it_was_measured(data: Path, bench: Bench) -> None:
    (data / "data/webdataset").unlink()
    words = ("--backend", "webdataset,shards", "--trainer", "none", "--device", "cpu", *QUICK)
    result = bench("loaders", *words, "--json", "out/r.json")
    assert result.returncode == 0, result.stderr
    assert "skipped webdataset on data/webdataset: data/webdataset: does not exist" in result.stdout
    assert "precache convert" in result.stdout
    stored = json.loads((data / "out/r.json").read_text())
    assert [each["backend"] for each in stored["rows"]] == ["shards", "gather"]
    shown = bench("report", "out/r.json", "--html", "r.html")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[:4] == result.stdout.splitlines()[:4]
    assert "<html" in (data / "r.html").read_text()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Result:
    """What 'bench loaders' has measured, without measuring."""
    result = rich_result()
    monkeypatch.setattr(command, "compare", lambda *_, **__: result)
    return result


@pytest.mark.parametrize(
    ("flags", "printed", "told"),
    [
        (("--json", "-"), True, False),
        (("--json", "-", "--quiet"), True, False),
        (("--json", "new/r.json", "--quiet"), False, False),
        (("--json", "new/r.json"), False, True),
    ],
)
def test_what_is_printed_is_the_json_nothing_or_the_table_and_files_are_written(
    data: Path, bench: Bench, measured: Result, flags: tuple[str, ...], printed: bool, told: bool
) -> None:
    ended = bench(*SHARDS, *flags, "--html", "r.html", "--gpu-price", 2.5)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (data / "r.html").exists()
    written = ended.stdout if printed else (data / "new/r.json").read_text()
    assert Result.from_json(json.loads(written)) == measured
    assert ("wrote new/r.json" in ended.stdout) == told
    assert (ended.stdout == "") == (not printed and not told)
    assert not (data / "-").exists()


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_comparison_that_is_stopped_says_what_is_lost(
    data: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, said: str
) -> None:
    monkeypatch.setattr(command, "compare", lambda *_: signal.raise_signal(number))
    printed = bench(*SHARDS, "--json", "r.json")
    assert printed.stderr.splitlines()[-1].startswith(
        f"bench: error: {said} before all runs were done; nothing"
    )
    assert printed.returncode == 128 + number
    assert not (data / "r.json").exists()
