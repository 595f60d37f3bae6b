"""`bench report`: one result that is shown again, and two that are compared, as files on disk."""

import json
from pathlib import Path

import pytest

from bench.report import loaders
from bench.report.result import format_document
from tests.bench.conftest import Bench
from tests.bench.results import MACHINE, make_settings, make_shared_trials, make_trials
from tests.command import check_bad_input


def write(path: Path, shards: float, *, fed: float = 2_450, tree: bool = True, **machine: str) -> Path:
    """Write a result with a row for shards and, with `tree`, one for the tree.

    Args:
        shards: images/s of the shards alone.
        fed: images/s of the trainer that the shards feed.
        machine: parts of the machine that differ.
    """
    trials = make_shared_trials() + make_trials("shards", "data/shards", shards, fed)
    if tree:
        trials += make_trials("pytorch", "photos", 1_900, 1_850)
    result = loaders.make_result({**MACHINE, **machine}, make_settings(cold=False), trials, {})
    path.write_text(format_document(result.to_json()))
    return path


def test_report_shows_a_result_again_and_draws_its_page(data: Path, bench: Bench) -> None:
    path = write(data / "r.json", 22_000)
    shown = bench("report", path, "--html", "new/r.html", "--gpu-price", 3)
    assert shown.returncode == 0, shown.stderr
    assert (
        "shards keeps an emulated accelerator of 2,480 images/s busy 99% of the time"
        in shown.stdout.splitlines()[0]
    )
    assert "<html" in (data / "new/r.html").read_text()
    copied = bench("report", path, "--json", "-")
    again, first = json.loads(copied.stdout), json.loads(path.read_text())
    assert (again["answer"], again["trials"]) == (first["answer"], first["trials"])
    assert bench("report", path, "--markdown").stdout.count("| shards (ours) |") == 1


@pytest.mark.parametrize(
    ("shards", "fed", "options", "code"),
    [
        (22_000, 2_450, (), 0),
        (44_000, 2_450, (), 0),
        (16_000, 2_450, (), 1),
        (16_000, 2_450, ("--tolerance", 0.4), 0),
        (22_000, 1_500, (), 1),
    ],
)
def test_report_exits_with_1_where_a_figure_got_worse(
    shards: float, fed: float, options: tuple[object, ...], code: int, data: Path, bench: Bench
) -> None:
    before = write(data / "before.json", 22_000)
    after = write(data / "after.json", shards, fed=fed)
    done = bench("report", before, after, *options)
    assert done.returncode == code, done.stdout + done.stderr


def test_report_exits_with_1_where_a_row_is_missing_unless_forced(data: Path, bench: Bench) -> None:
    before = write(data / "before.json", 22_000)
    lacking = write(data / "lacking.json", 22_000, tree=False)
    compared = bench("report", before, lacking)
    assert compared.returncode == 1
    assert "only in" in compared.stdout
    assert bench("report", before, lacking, "--force").returncode == 0
    assert bench("report", lacking, before).returncode == 0, "a row more is no loss"
    assert bench("report", before, before).returncode == 0, "the same file twice"


def test_report_prints_a_verdict_of_each_figure_as_json(data: Path, bench: Bench) -> None:
    before, after = write(data / "before.json", 22_000), write(data / "after.json", 16_000)
    quiet = bench("report", before, after, "--json", "-", "--quiet")
    assert quiet.returncode == 1
    differences = json.loads(quiet.stdout)["differences"]
    verdicts = {(item["row"], item["value"]): item["verdict"] for item in differences}
    assert verdicts["shards (ours)", "loader_images_per_s"] == "regression"
    assert verdicts["shards (ours)", "fed_images_per_s"] == "within noise"


@pytest.mark.parametrize(
    ("name", "content"),
    [("missing.json", None), ("text.json", "{"), ("other.json", "{}")],
)
def test_report_refuses_a_file_that_is_no_result(
    name: str, content: str | None, data: Path, bench: Bench
) -> None:
    if content is not None:
        (data / name).write_text(content)
    check_bad_input(bench("report", data / name), name)


def test_report_refuses_a_folder(data: Path, bench: Bench) -> None:
    (data / "folder").mkdir()
    check_bad_input(bench("report", data / "folder"), "folder")


def test_report_refuses_results_of_other_machines_unless_forced(data: Path, bench: Bench) -> None:
    before, after = write(data / "a.json", 22_000), write(data / "b.json", 22_000, cpu="Xeon, 8 CPUs")
    check_bad_input(bench("report", before, after), "Xeon, 8 CPUs", "--force", "a.json", "b.json")
    assert bench("report", before, after, "--force").returncode == 0


def test_report_refuses_a_third_result(data: Path, bench: Bench) -> None:
    path = write(data / "a.json", 22_000)
    check_bad_input(bench("report", path, path, path), "one result too many")
