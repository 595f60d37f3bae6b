"""`bench`, `bench loaders`, `report`, `quickstart` and `profile`: what is printed, written and said."""

import json
import re
import signal
from pathlib import Path

import pytest

from bench.cli import COMMANDS, FIRST
from bench.commands import loaders as command
from bench.commands.profile import STEP, WAIT
from bench.report.row import Result, read_result
from tests.bench.conftest import Bench
from tests.bench.rich_result import rich_result
from tests.command import check_bad_input

QUICK = ("--batch-size", 8, "--batches", 2, "--warmup", 1, "--repeats", 1, "--size", 32, "--workers", 1)
SHARDS = ("loaders", "data/shards", "--backend", "shards", "--trainer", "none", "--device", "cpu")


def test_the_help_shows_first_what_a_newcomer_needs(bench: Bench) -> None:
    first, others = bench("--help").stdout.partition("Start here:\n")[2].split("More:\n")
    listed = [[line.split()[0] for line in part.splitlines() if line[:3].strip()] for part in (first, others)]
    assert listed == [list(FIRST), sorted(set(COMMANDS) - set(FIRST))]
    short, whole = (bench("loaders", flag).stdout for flag in ("--help", "--help-all"))
    assert ("--repeats" in short, "--repeats" in whole) == (False, True)


def test_torchrun_may_not_start_it_several_times(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_bad_input(bench("loaders"), "would measure one another", "'bench ddp --ranks 4' without torchrun")


@pytest.mark.usefixtures("trials_here")
def test_a_report_says_what_was_said_when_it_was_measured(data: Path, bench: Bench) -> None:
    (data / "data/webdataset").unlink()
    words = ("--backend", "webdataset,shards", "--trainer", "none", "--device", "cpu", *QUICK)
    result = bench("loaders", *words, "--json", "out/r.json")
    assert result.returncode == 0, result.stderr
    assert "skipped webdataset on data/webdataset: data/webdataset: does not exist" in result.stdout
    stored = json.loads((data / "out/r.json").read_text())
    assert [each["backend"] for each in stored["rows"]] == ["shards", "gather"]
    shown = bench("report", "out/r.json", "--html", "r.html")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[:4] == result.stdout.splitlines()[:4]
    assert "<html" in (data / "r.html").read_text()


def test_what_is_printed_is_the_json_nothing_or_the_table_and_a_stop_says_what_is_lost(
    data: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, said in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")):
        monkeypatch.setattr(command, "compare", lambda *_, number=number: signal.raise_signal(number))
        ended = bench(*SHARDS, "--json", "r.json")
        assert ended.returncode == 128 + number
        last = ended.stderr.splitlines()[-1]
        assert last.startswith(f"bench: error: {said} before all runs were done; nothing")
    assert not (data / "r.json").exists()
    measured = rich_result()
    monkeypatch.setattr(command, "compare", lambda *_, **__: measured)
    for flags, printed, told in (
        (("--json", "-"), True, False),
        (("--json", "new/r.json", "--quiet"), False, False),
        (("--json", "new/r.json"), False, True),
    ):
        ended = bench(*SHARDS, *flags, "--html", "r.html", "--gpu-price", 2.5)
        assert (ended.returncode, ended.stderr) == (0, "")
        (data / "r.html").unlink()
        written = ended.stdout if printed else (data / "new/r.json").read_text()
        assert Result.from_json(json.loads(written)) == measured
        assert ("wrote new/r.json" in ended.stdout) == told
        assert (ended.stdout == "") == (not printed and not told)


@pytest.mark.usefixtures("trials_here")
def test_quickstart_goes_the_whole_way_and_keeps_its_pictures(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    root = tmp_path / "new/data/quickstart"
    done = bench("quickstart", "--images", 16, "--batches", 1, "--repeats", 1)
    assert done.returncode == 0, done.stderr
    assert "busy" in done.stdout.splitlines()[0], "the sentence is the first line"
    assert done.stdout.splitlines()[-1] == "the page: data/quickstart/report.html"
    result = read_result(root / "result.json")
    assert result.settings["augment"] == "train"
    rows = {row.data: row for row in result.rows}
    times = json.loads((root / "conversions.json").read_text())
    for name in ("shards", "webdataset"):
        files = (file for file in (root / name).rglob("*") if file.is_file())
        assert rows[name].size_bytes == sum(file.stat().st_size for file in files)
        assert rows[name].convert_s == times[name] > 0
    for mention in ("pytorch", "shards", "webdataset", "h100"):
        assert mention in done.stdout
        assert mention in (root / "report.html").read_text()
    refused = bench("quickstart", "--images", 60)
    check_bad_input(refused, "data/quickstart/raw", "16 pictures", "--images", "60", "remove")


def test_a_profile_shows_stages_and_operators(data: Path, bench: Bench) -> None:
    quick = ("--batch-size", 4, "--size", 32, "--workers", 1, "--warmup", 1, "--steps", 3)
    done = bench("profile", "data/shards", "--device", "cpu", "--out", "deep/out", *quick)
    assert done.returncode == 0, done.stderr
    events = json.loads((data / "deep/out/trace.json").read_text())["traceEvents"]
    spans = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert spans.count(WAIT) == spans.count(STEP) == 3
    summary = json.loads((data / "deep/out/profile.json").read_text())
    assert sum(summary["shares"].values()) == pytest.approx(1)
    printed = done.stdout.splitlines()
    assert re.match(r"Training waits \d+% of the time for batches: ", printed[0]), "the answer comes first"
    assert any("conv" in line for line in printed), "torch's own table"
