"""`bench accuracy` for real: killed and gone on with, its files, its page, its refusals."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.bench.squares import Squares
from tests.command import check_bad_input, run_here

SMALL = ("--size", 16, "--epochs", 3, "--batch-size", 16, "--seeds", 1, "--workers", 1, "--device", "cpu")


def accuracy(squares: Squares, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return run_here("bench", "accuracy", squares.tree, *arguments, cwd=squares.folder)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trainings.jsonl").read_text().splitlines()]


def test_a_run_that_ends_leaves_results_and_a_page_and_is_not_done_again(
    squares: Squares, tmp_path: Path
) -> None:
    out, page, result = tmp_path / "out", tmp_path / "page.html", tmp_path / "result.json"
    arguments = ("ours=shards", "imagefolder2=imagefolder", *SMALL, "--out", out)
    ran = accuracy(squares, *arguments, "--html", page, "--json", result)
    assert ran.returncode == 0, ran.stderr
    names = ["imagefolder", "ours", "imagefolder2"]
    assert set(names) <= {row.split(" ")[0] for row in ran.stdout.splitlines()}
    assert [line["arm"] for line in lines(out)] == names
    assert lines(out)[0]["curve"][-1][1] == lines(out)[2]["curve"][-1][1]  # the same, so as good
    for line in lines(out):
        assert (line["steps"], line["images"]) == (3 * 3, 3 * 3 * 16)
        assert [epoch for epoch, _, _ in line["curve"]] == [1, 2, 3]
        assert line["curve"][-1][2] == line["train_s"] > 0
    written = json.loads(result.read_text())
    told = [(each["name"], each["low"]) for each in written["compared"]]
    assert told == [("ours", None), ("imagefolder2", None)]  # JSON has no infinity
    assert "Does the model get worse?" in page.read_text()
    before = (out / "trainings.jsonl").read_bytes()
    again = accuracy(squares, *arguments)
    assert (again.returncode, again.stdout.splitlines()[0]) == (0, ran.stdout.splitlines()[0])
    assert (out / "trainings.jsonl").read_bytes() == before
    check_bad_input(accuracy(squares, *arguments, "--lr", 0.1), "lr: 0.2, here 0.1")
    (out / "trainings.jsonl").write_bytes(before[:-40])  # killed while the last line was written
    assert accuracy(squares, *arguments).returncode == 0
    assert [line["arm"] for line in lines(out)] == names
    assert lines(out)[2]["curve"][-1][1] == lines(out)[0]["curve"][-1][1]


def test_the_list_of_splits_has_as_many_of_each_class(squares: Squares, tmp_path: Path) -> None:
    ran = accuracy(squares, "--write-splits", tmp_path / "s.csv", "--per-class", 20)
    said = f"wrote {tmp_path / 's.csv'}: 60 pictures train, 18 validate\n"
    assert (ran.returncode, ran.stdout) == (0, said)
    rows = (tmp_path / "s.csv").read_text().splitlines()[1:]
    assert sum(row.startswith("red/") and row.endswith(",train") for row in rows) == 20
    too_many = accuracy(squares, "--write-splits", tmp_path / "t.csv", "--per-class", 26)
    check_bad_input(too_many, "class 'blue'", "has 26 pictures", "none would be left to validate; give less")


def test_a_source_that_cannot_be_opened_is_refused_before_the_others_are_trained(
    squares: Squares, tmp_path: Path
) -> None:
    squares.convert("keep", fit="keep")
    ran = accuracy(squares, "ours=shards", "late=keep,augment=device", *SMALL, "--out", tmp_path)
    check_bad_input(ran, "source late: augment:", "keep holds pictures of varying size")
    assert not list(tmp_path.iterdir())
