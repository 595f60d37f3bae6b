import os
import shutil
import subprocess
from pathlib import Path

import pytest

from precache import SettingError, SourceOptions, convert, open_dataset, verify_deep
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run, run_here
from tests.conftest import small_recipe
from tests.precache.sources.tables import rows_of_tree, write_csv


def test_rows_without_a_picture_are_rejects_named_by_row(raw_tree: Path, tmp_path: Path) -> None:
    columns = rows_of_tree(raw_tree)
    broken = {3: "nowhere.jpg", 40: os.path.dirname(columns["path"][40])}
    for row, path in broken.items():
        columns["path"][row] = path
    table = tmp_path / "labels.csv"
    write_csv(table, columns)
    command = ("convert", table, "out", "--root", raw_tree, "--label", "species", "--workers", 0)
    command = (*command, "--format", "shards", "--size", 16)
    stopped = run("precache", *command, cwd=tmp_path)
    check_bad_input(_without_warnings(stopped), "stopped, 2 pictures are rejected", f"{table}, line")
    result = run("precache", *command, "--max-rejects", "5%", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2 rows of 70 without a picture; the first is" in result.stderr
    rejected = {sample.id: sample.reason for sample in open_dataset(tmp_path / "out").manifest.rejected}
    assert rejected == {
        3: f"is not a file; named in {table}, line 5 (id 3)",
        40: f"is a folder; named in {table}, line 42 (id 40)",
    }
    assert verify_deep(tmp_path / "out", table, workers=0).problems == ()


def test_a_split_whose_pictures_are_all_rejected_is_left_out(raw_tree: Path, tmp_path: Path) -> None:
    columns = rows_of_tree(raw_tree)
    columns["fold"] = ["valid" if row == 9 else "train" for row in range(70)]
    columns["path"][9] = "nowhere.jpg"
    write_csv(tmp_path / "t.csv", columns)
    options = SourceOptions(root=str(raw_tree), label="species", split="fold")
    convert(
        tmp_path / "t.csv",
        tmp_path / "out",
        small_recipe("shards"),
        workers=0,
        max_rejects=1,
        options=options,
    )
    assert open_dataset(tmp_path / "out").manifest.split_samples == {"train": 69}


def _without_warnings(
    ended: "subprocess.CompletedProcess[str]",
) -> "subprocess.CompletedProcess[str]":
    lines = [line for line in ended.stderr.splitlines() if "error: " in line]
    return subprocess.CompletedProcess(ended.args, ended.returncode, ended.stdout, "\n".join(lines))


def test_a_dataset_may_lie_beside_its_table_and_not_in_the_folder_of_pictures_that_is_named(
    raw_tree: Path, tmp_path: Path
) -> None:
    for sample in list(scan_tree(raw_tree).samples)[:3]:
        shutil.copy(raw_tree / sample.path, tmp_path)
    names = sorted(os.listdir(tmp_path))
    write_csv(tmp_path / "t.csv", {"path": names})
    convert(tmp_path / "t.csv", tmp_path / "out", small_recipe("shards"), workers=0)
    named = SourceOptions(root=str(tmp_path))
    with pytest.raises(SettingError, match="overlap"):
        convert(tmp_path / "t.csv", tmp_path / "other", small_recipe("shards"), workers=0, options=named)
    (tmp_path / "moved").mkdir()
    for name in names:
        (tmp_path / name).rename(tmp_path / "moved" / name)
    there = str(tmp_path / "moved")
    assert verify_deep(tmp_path / "out", tmp_path / "t.csv", root=there, workers=0).samples == 3
    deep = run_here(
        "precache", "verify", "--deep", "out", "t.csv", "--root", "moved", "--workers", 0, cwd=tmp_path
    )
    assert deep.returncode == 0, deep.stderr
