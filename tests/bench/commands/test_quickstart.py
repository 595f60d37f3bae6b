"""`bench quickstart`: one command, from no pictures at all to the sentence and its page."""

from pathlib import Path

import pytest

from bench.report.row import read_result
from tests.command import check_bad_input, run, run_here

QUICK = ("--images", 48, "--batches", 1, "--repeats", 1)


def check_quickstart(folder: Path) -> None:
    done = run("bench", "quickstart", *QUICK, cwd=folder)
    assert done.returncode == 0, done.stderr
    root = folder / "data/quickstart"
    assert "busy" in done.stdout.splitlines()[0], "the sentence is the first line"
    assert done.stdout.splitlines()[-1] == "the page: data/quickstart/report.html"
    result = read_result(root / "result.json")
    assert result.settings["augment"] == "train"
    rows = {row.data: row for row in result.rows}
    for name in ("shards", "webdataset"):
        files = (file for file in (root / name).rglob("*") if file.is_file())
        assert rows[name].size_bytes == sum(file.stat().st_size for file in files)
        assert (rows[name].convert_s or 0) > 0
    page = (root / "report.html").read_text()
    for mention in ("pytorch", "shards", "webdataset", "h100"):
        assert mention in done.stdout
        assert mention in page


def test_it_goes_the_whole_way_and_keeps_its_pictures(tmp_path: Path) -> None:
    check_quickstart(tmp_path)
    done = run_here("bench", "quickstart", "--images", 60, cwd=tmp_path)
    check_bad_input(done, "data/quickstart/raw", "48 pictures", "--images", "60", "remove")


@pytest.mark.slow
def test_a_second_call_knows_how_long_converting_took(tmp_path: Path) -> None:
    check_quickstart(tmp_path)
    took = (tmp_path / "data/quickstart/conversions.json").read_text()
    check_quickstart(tmp_path)
    assert (tmp_path / "data/quickstart/conversions.json").read_text() == took
