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
    assert [line["arm"] for line in lines(out)] == names
    assert lines(out)[0]["curve"][-1][1] == lines(out)[2]["curve"][-1][1]  # the same, so as good
    assert all((line["steps"], line["images"]) == (3 * 3, 3 * 3 * 16) for line in lines(out))
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
