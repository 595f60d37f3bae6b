"""`bench loaders` and `bench report`: what is printed, written and said of what could not be measured."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.commands import loaders as command
from bench.report.row import Result
from tests.bench.conftest import Bench
from tests.bench.rich_result import LIMIT, around, rich_result, row
from tests.command import run

QUICK = ("--batch-size", 8, "--batches", 2, "--warmup", 1, "--repeats", 1, "--size", 32, "--workers", 1)
SHARDS = ("loaders", "data/shards", "--backend", "shards", "--trainer", "none", "--device", "cpu")


def table_of(printed: str) -> list[str]:
    """From the table's titles on."""
    lines = printed.splitlines()
    return lines[next(at for at, line in enumerate(lines) if line.startswith("loader ")) :]


@pytest.mark.slow
def test_all_backends_are_compared_as_typed_beside_other_libraries(data: Path) -> None:
    words = ("--trainer", "emulated:500", "--details", "--device", "cpu", "--against", "npy", *QUICK)
    result = run("bench", "loaders", *words, "--json", "r.json", cwd=data)
    assert result.returncode == 0, result.stderr
    stored = json.loads((data / "r.json").read_text())
    found = {found["backend"] for found in stored["rows"]}
    assert found >= {"imagefolder", "pytorch", "shards", "synthetic", "webdataset", "npy", "gather"}
    assert "of limit" in table_of(result.stdout)[0]
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
    shown = bench("report", "out/r.json", "--html", "r.html", "--svg", "out/p.svg")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[:4] == result.stdout.splitlines()[:4]
    assert "wrote out/p.svg" in shown.stdout
    assert (data / "out/p.svg").read_text().startswith("<svg ")
    assert "<html" in (data / "r.html").read_text()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Result:
    """What 'bench loaders' has measured, without measuring."""
    result = rich_result()
    monkeypatch.setattr(command, "compare", lambda *_, **__: result)
    return result


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_the_json_alone_is_printed_for_a_dash(
    data: Path, bench: Bench, measured: Result, quiet: tuple[str, ...]
) -> None:
    printed = bench(*SHARDS, *quiet, "--json", "-", "--html", "r.html")
    assert Result.from_json(json.loads(printed.stdout)) == measured
    assert (data / "r.html").exists()
    assert not (data / "-").exists()


def test_quiet_prints_nothing_and_writes_all(data: Path, bench: Bench, measured: Result) -> None:
    printed = bench(*SHARDS, "--quiet", "--json", "new/r.json", "--html", "r.html")
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, "", "")
    assert Result.from_json(json.loads((data / "new/r.json").read_text())) == measured
    assert (data / "r.html").exists()
    loud = bench(*SHARDS, "--json", "r.json", "--html", "r.html").stdout
    assert "wrote r.json" in loud
    assert loud.count("r.html") == 1, "one file, one line"


def test_the_sentence_comes_first_then_a_few_columns_and_where_the_rest_is(
    data: Path, bench: Bench, measured: Result
) -> None:
    shown = bench(*SHARDS).stdout
    assert shown.splitlines()[0].startswith("Backend `shards` delivers 24,000 images/s and keeps the acc")
    assert "--details" in shown.splitlines()[-1]
    few, every = (table_of(bench(*SHARDS, *flag).stdout)[0] for flag in ((), ("--details",)))
    for title in ("images/s", "accelerator busy", "first batch"):
        assert title in few
    assert "ratio" not in few
    assert "ratio" in every
    assert "trainer waits" in every
    markdown = bench(*SHARDS, "--markdown").stdout
    assert "| loader | images/s | accelerator busy | from a cold disk | first batch |" in markdown


def test_the_price_of_an_hour_is_in_the_sentence_and_on_the_page(
    data: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fed(backend: str, tree: str, share: float) -> object:
        together = around(share * LIMIT, 0.005)
        return row(backend, tree, 20_000, together=together, ratio=around(share, 0.005))

    rows = fed("imagefolder", "raw tree", 0.31), fed("shards", "shards", 0.99)
    quiet = {**rich_result().settings, "repeats": 5, "other_cpu": 0.0}
    result = replace(rich_result(), rows=rows, settings=quiet)
    monkeypatch.setattr(command, "compare", lambda *_, **__: result)
    printed = bench(*SHARDS, "--gpu-price", 2.5, "--html", "r.html", "--json", "r.json").stdout
    assert "At $2.50 an hour" in " ".join(printed.split())
    assert "At $2.50 an hour" in (data / "r.html").read_text()
    assert "At $4.00 an hour" in " ".join(bench("report", "r.json", "--gpu-price", 4).stdout.split())


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_comparison_that_is_stopped_says_what_is_lost(
    data: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, said: str
) -> None:
    def stopped(
        candidates: object, settings: object, on_progress: Callable[[int, int], None], peers: object
    ) -> None:
        for done in range(13):
            on_progress(done, 40)
        signal.raise_signal(number)

    monkeypatch.setattr(command, "compare", stopped)
    printed = bench(*SHARDS, "--json", "r.json")
    lost = f"bench: error: {said} after 12 of 40 runs; nothing was written: a result needs all runs"
    assert printed.stderr.splitlines()[-1] == lost
    assert printed.returncode == 128 + number
    assert not (data / "r.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (
            ("--trainer", "resnet18", "--amp", "bf16", "--compile", "--cache", "device", "--size", 32),
            ("trainer resnet18 (", "amp bf16", "compiled True", "cache device"),
        ),
        (("--trainer", "vit_s_16"), ("trainer vit_s_16 (", "batch 2 of 224x224")),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_models_are_fed_as_practitioners_train_them(
    bench: Bench, options: tuple[object, ...], shown: tuple[str, ...]
) -> None:
    sizes = ("--batch-size", 2, "--workers", 1, "--warmup", 0, "--batches", 1, "--repeats", 1)
    words = ("data/raw", "--backend", "pytorch", "--device", "cpu", *sizes, *options, "--details")
    printed = bench("loaders", *words)
    assert printed.returncode == 0, printed.stderr
    for mention in shown:
        assert mention in " ".join(printed.stdout.split())
