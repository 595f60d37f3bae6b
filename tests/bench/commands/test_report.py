"""`bench report`: a result shown again, and two compared, as files on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.report import loaders
from bench.report.result import format_document
from tests.bench.conftest import Bench
from tests.bench.results import MACHINE, make_settings, make_shared_trials, make_trials
from tests.command import check_bad_input


def write(path: Path, shards: float, *, fed: float = 2_450, tree: bool = True, **machine: str) -> Path:
    """A result with a row for shards and, unless told otherwise, one for the tree."""
    trials = make_shared_trials() + make_trials("shards", "data/shards", shards, fed)
    if tree:
        trials += make_trials("pytorch", "photos", 1_900, 1_850)
    result = loaders.make_result({**MACHINE, **machine}, make_settings(cold=False), trials, {})
    path.write_text(format_document(result.to_json()))
    return path


def test_report_shows_what_was_said_and_draws_the_page(data: Path, bench: Bench) -> None:
    path = write(data / "r.json", 22_000)
    shown = bench("report", path, "--html", "new/r.html", "--gpu-price", 3)
    assert shown.returncode == 0, shown.stderr
    assert "Backend `shards` delivers 22,000 images/s" in shown.stdout.splitlines()[0]
    assert "<html" in (data / "new/r.html").read_text()
    copied = bench("report", path, "--json", "-")
    again, first = json.loads(copied.stdout), json.loads(path.read_text())
    assert (again["answer"], again["trials"]) == (first["answer"], first["trials"])
    assert bench("report", path, "--markdown").stdout.count("| shards (ours) |") == 1


def test_exit_code_says_whether_something_got_slower(data: Path, bench: Bench) -> None:
    before = write(data / "before.json", 22_000)
    for shards, fed, options, code in (
        (22_000, 2_450, (), 0),
        (44_000, 2_450, (), 0),
        (16_000, 2_450, (), 1),
        (16_000, 2_450, ("--tolerance", 0.4), 0),
        (22_000, 1_500, (), 1),
    ):
        after = write(data / "after.json", shards, fed=fed)
        done = bench("report", before, after, *options)
        assert done.returncode == code, done.stdout + done.stderr
    lacking = write(data / "lacking.json", 22_000, tree=False)
    refused = bench("report", before, lacking)
    assert refused.returncode == 1
    assert "only in" in refused.stdout
    assert bench("report", before, lacking, "--force").returncode == 0
    assert bench("report", lacking, before).returncode == 0, "a row more is no loss"
    assert bench("report", before, before).returncode == 0, "the same file twice"
    quiet = bench("report", before, write(data / "after.json", 16_000), "--json", "-", "--quiet")
    assert quiet.returncode == 1
    verdicts = {(one["row"], one["value"]): one["verdict"] for one in json.loads(quiet.stdout)["differences"]}
    assert verdicts["shards (ours)", "loader_images_per_s"] == "regression"
    assert verdicts["shards (ours)", "fed_images_per_s"] == "within noise"


@pytest.mark.parametrize(
    ("name", "content"),
    [("none.json", None), ("text.json", "{"), ("other.json", "{}"), ("folder", 1)],
)
def test_file_that_is_no_result_is_refused(name: str, content: Any, data: Path, bench: Bench) -> None:
    path = data / name
    if content == 1:
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    check_bad_input(bench("report", path), name)


def test_other_work_is_not_compared_unless_forced(data: Path, bench: Bench) -> None:
    before, after = write(data / "a.json", 22_000), write(data / "b.json", 22_000, cpu="Xeon, 8 CPUs")
    check_bad_input(bench("report", before, after), "Xeon, 8 CPUs", "--force", "a.json", "b.json")
    assert bench("report", before, after, "--force").returncode == 0
    check_bad_input(bench("report", before, after, before), "one result too many")
