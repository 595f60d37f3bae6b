"""Verification of converted datasets against their manifest and their source."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache import SourceOptions, convert, verify, verify_deep
from precache.dataset.index import INDEX_NAME, REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError
from tests.command import run_here
from tests.conftest import IMAGES, small_recipe
from tests.precache.sources.objects import picture
from tests.precache.sources.tables import write_jsonl


def test_verify_finds_a_changed_bit_in_any_file(raw_tree: Path, tmp_path: Path) -> None:
    tree, out = Path(shutil.copytree(raw_tree, tmp_path / "tree")), tmp_path / "out"
    (tree / "notes.txt").write_bytes(b"no picture")
    next(tree.rglob("*.jpg")).with_name("broken.jpg").write_bytes(b"")
    convert(tree, out, small_recipe("webdataset"), workers=0, max_rejects=0.1)
    files = sorted({path.name for path in out.iterdir()} - {REJECTED_NAME})  # a list for people only
    assert {INDEX_NAME, MANIFEST_NAME} < set(files)
    rng = np.random.default_rng(2)
    for name in files:
        content = (out / name).read_bytes()
        for place, bit in zip(rng.integers(0, len(content), 8), rng.integers(0, 8, 8), strict=True):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            (out / name).write_bytes(changed)
            problems = verify(out)
            assert [problem.startswith(f"{out / name}: ") for problem in problems] == [True]
        (out / name).write_bytes(content)


@pytest.mark.parametrize("name", ["dali", "keep-shards", "rectangle-shards"])
def test_verify_deep_finds_no_problem_in_an_intact_dataset(
    name: str, raw_tree: Path, converted: dict[str, Path], shaped: dict[str, Path]
) -> None:
    report = verify_deep({**converted, **shaped}[name], raw_tree, workers=2 if name == "dali" else 0)
    assert (report.samples, report.problems) == (IMAGES, ())
    if name == "keep-shards":
        assert report.equal == IMAGES, "as torchvision's Resize makes them"
        return
    assert report.worst_psnr >= (50 if name.endswith("shards") else 33)


def test_verify_deep_names_a_picture_whose_source_changed(tree: Path, tmp_path: Path) -> None:
    """The file keeps its size, so that the tree looks the same."""
    convert(tree, tmp_path / "out", small_recipe("dali"), workers=0)
    other, *_, changed = sorted(tree.glob("*/*.jpg"), key=lambda path: path.stat().st_size)
    changed.write_bytes(other.read_bytes().ljust(changed.stat().st_size, b"\0"))
    result = run_here("precache", "verify", "--deep", "out", "tree", "--workers", 0, cwd=tmp_path)
    problem, summary = result.stderr.splitlines()
    assert (result.returncode, "the source file changed" in problem) == (1, True)
    assert f"({changed.relative_to(tree)})" in problem
    assert summary.startswith("out: 1 of 70 pictures differs")


@pytest.mark.parametrize("target", ["class", "classes", "vector"])
def test_verify_deep_compares_each_label_field_and_split(target: str, tmp_path: Path) -> None:
    """Rows of the table change their order."""
    names = [f"{row}.png" for row in range(9)]
    for row, name in enumerate(names):
        picture(row).save(tmp_path / name)
    labels: dict[str, list[Any]] = {
        "class": [*"abaacbbac"],
        "classes": [["a"], ["b", "c"], [], *[["c", "a"]] * 6],
        "vector": [[row / 2, 1] for row in range(9)],
    }
    columns = {
        "path": names,
        "label": labels[target],
        "fold": ["train", "val", "val"] * 3,
        "width": [*range(9)],
        "note": [f"picture {row}" for row in range(9)],
    }

    def write(rows: list[int], **changed: list[Any]) -> Path:
        table = {name: [values[row] for row in rows] for name, values in {**columns, **changed}.items()}
        write_jsonl(tmp_path / "table.jsonl", table)
        return tmp_path / "table.jsonl"

    options = SourceOptions(
        label="label",
        split="fold",
        fields=("width", "note"),
        target="number" if target == "vector" else target,
    )
    out, order = tmp_path / "out", [4, 0, 2, 7, 5, 3, 8, 1, 6]
    convert(write([*range(9)]), out, small_recipe("shards", shard_bytes=9000), workers=0, options=options)
    assert verify_deep(out, write(order), workers=0).problems == ()
    for name, values in columns.items():
        if name != "path":
            with pytest.raises(DatasetError, check=lambda error: error.path == out):
                verify_deep(out, write(order, **{name: [values[1], *values[1:]]}), workers=0)
    with pytest.raises(DatasetError, check=lambda error: error.path == out):
        verify_deep(out, write(order[1:]), workers=0)


def test_verify_deep_takes_a_dataset_that_names_pictures_twice(tree: Path, tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision", reason="the extra 'loaders' is not installed")
    dataset = torchvision.datasets.ImageFolder(tree)
    dataset.samples += dataset.samples[::5]
    convert(dataset, tmp_path / "out", small_recipe("shards"), workers=0)
    assert verify_deep(tmp_path / "out", dataset, workers=0).problems == ()


def test_verify_deep_warns_of_pictures_that_are_new_in_the_source(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A class that sorts before all others is new, too."""
    extra = Path(shutil.copytree(min(tree.iterdir()), tmp_path / "extra"))
    (max(tree.iterdir()) / "broken.jpg").write_bytes(b"")
    convert(tree, tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=0.1)
    extra.rename(tree / "000.new")
    result = run_here("precache", "verify", "--deep", "out", "tree", "--workers", 0, cwd=tmp_path)
    assert result.returncode == 0
    (warning,) = caplog.messages
    new = len([*(tree / "000.new").iterdir()])
    assert f"{new} pictures of tree" in warning
    assert "--without out" in warning
