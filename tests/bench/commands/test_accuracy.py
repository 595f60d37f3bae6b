"""`bench accuracy` with real trainings: its files, its page, its errors."""

import json
import os
import subprocess
from pathlib import Path

from tests.bench.squares import Squares
from tests.command import check_bad_input, run_here

SMALL = ("--size", 16, "--epochs", 3, "--batch-size", 16, "--seeds", 1, "--workers", 1, "--device", "cpu")


def accuracy(squares: Squares, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return run_here("bench", "accuracy", squares.tree, *arguments, cwd=squares.folder)


def top1(result: Path) -> dict[str, float]:
    """Return the accuracy of the trained model, by source."""
    trials = json.loads(result.read_text())["trials"]
    return {trial["of"]["source"]: trial["numbers"]["top1_accuracy"] for trial in trials}


def test_accuracy_leaves_a_result_and_a_page_and_trains_only_once(squares: Squares, tmp_path: Path) -> None:
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    arguments = ("ours=shards", "imagefolder2=imagefolder", *SMALL, "--json", result)
    ran = accuracy(squares, *arguments, "--html", page)
    assert ran.returncode == 0, ran.stderr
    trained = top1(result)
    assert list(trained) == ["imagefolder", "ours", "imagefolder2"]
    assert trained["imagefolder"] == trained["imagefolder2"]  # the same pictures in the same order
    assert "Does the model get worse?" in page.read_text()
    assert sorted(os.listdir(tmp_path)) == ["page.html", "result.json"]
    trials = json.loads(result.read_text())["trials"]
    again = accuracy(squares, *arguments)
    assert again.returncode == 0
    assert ran.stdout.splitlines()[0] in again.stdout
    assert json.loads(result.read_text())["trials"] == trials
    shown = run_here("bench", "report", result, cwd=tmp_path)
    assert shown.stdout.splitlines()[0] == ran.stdout.splitlines()[0]
    check_bad_input(accuracy(squares, *arguments, "--lr", 0.1), "lr: 0.2, here 0.1")


def test_write_splits_lists_as_many_pictures_of_each_class(squares: Squares, tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    ran = accuracy(squares, "--write-splits", path, "--per-class", 20)
    assert ran.returncode == 0
    assert ran.stdout == f"wrote {path}: 60 pictures train, 18 validate\n"
    rows = path.read_text().splitlines()[1:]
    assert sum(row.startswith("red/") and row.endswith(",train") for row in rows) == 20
