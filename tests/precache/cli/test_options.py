"""Options without effect, misspelt words, and datasets that `verify` is given."""

import re
import shutil
from pathlib import Path

import pytest

from precache import Recipe, convert
from tests.command import check_bad_input, run_here

WITHOUT_EFFECT = (
    ("verify shards --root photos", "--root"),
    ("verify shards --workers 2", "--workers"),
    ("verify shards tree", "precache verify --deep shards tree"),
    ("verify shards --deep", "--deep DST SRC"),
    ("convert tree out --format shards --quality 90", "--quality"),
    ("convert tree out --format shards --strict --max-rejects 5%", "--max-rejects 5%"),
    ("convert tree out --format shards --address head:1", "address"),
    ("convert tree out --format shards --splits 0.8", "'train=0.8,val=0.2'"),
)


MISSPELT = (
    ("bench recomend photos", "'recommend'"),
    ("bench Loaders photos", "'loaders'"),
    ("bench hardware --scrtch /tmp", "'--scratch'"),
    ("bench loaders photos --backend pytorh", "'pytorch'"),
    ("bench loaders --trainer resnet5", "'resnet50'"),
    ("precache convrt photos out", "'convert'"),
    ("precache convert photos out --format Shard", "'shards'"),
    ("precache verify out --dep", "'--deep'"),
)


@pytest.mark.parametrize(("command", "similar"), MISSPELT)
def test_a_misspelt_word_is_answered_with_a_similar_one(command: str, similar: str, tmp_path: Path) -> None:
    result = run_here(*command.split(), cwd=tmp_path)
    check_bad_input(result, "id you mean", similar)


@pytest.fixture
def folder(raw_tree: Path, converted: dict[str, Path], tmp_path: Path) -> Path:
    (tmp_path / "tree").symlink_to(raw_tree)
    for name, path in converted.items():
        (tmp_path / name).symlink_to(path)
    return tmp_path


def test_options_without_effect_are_refused(folder: Path) -> None:
    for command, mention in WITHOUT_EFFECT:
        check_bad_input(run_here("precache", *command.split(), cwd=folder), mention)
    assert not (folder / "out").exists()


def test_verify_compares_every_dataset_that_it_is_given(folder: Path, converted: dict[str, Path]) -> None:
    result = run_here("precache", "verify", "shards", "dali", cwd=folder)
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == ["shards", "dali"]
    assert (result.returncode, result.stderr) == (0, "")
    damaged = Path(shutil.copytree(converted["webdataset"], folder / "damaged"))
    (shard,) = damaged.glob("train-00001*.tar")
    shard.write_bytes(shard.read_bytes()[:-512])
    result = run_here("precache", "verify", "damaged", "dali", cwd=folder)
    assert (result.returncode, result.stdout.partition(":")[0]) == (1, "dali")
    assert shard.name in result.stderr


def test_check_says_what_there_is_and_what_converting_takes(raw_tree: Path, tmp_path: Path) -> None:
    list_file = ("--list", tmp_path / "rejected.csv")
    checked = run_here("precache", "check", raw_tree, *list_file, "--workers", 0, cwd=tmp_path)
    assert f"{raw_tree}: 5 classes; train 70\n" in checked.stdout
    line = r"takes about ([\d.]+) (.iB), and at least (a few seconds)\n"
    ((space, unit, _),) = re.findall(line, checked.stdout)
    stored = convert(raw_tree, tmp_path / "shards", Recipe(format="shards"), workers=0).manifest.stored_bytes
    assert abs(float(space) * {"KiB": 2**10, "MiB": 2**20}[unit] / stored - 1) < 0.2
    assert checked.stdout.endswith("all 70 pictures can be decoded\n")
