"""Verification of converted datasets against their manifest and their source."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from precache import convert, verify, verify_deep
from precache.dataset.index import REJECTED_NAME, index_name
from precache.dataset.manifest import MANIFEST_NAME
from tests.command import run_here
from tests.conftest import IMAGES, small_recipe


def test_verify_finds_a_changed_bit_in_any_file(raw_tree: Path, tmp_path: Path) -> None:
    tree, out = Path(shutil.copytree(raw_tree, tmp_path / "tree")), tmp_path / "out"
    (tree / "notes.txt").write_bytes(b"no picture")
    next(tree.rglob("*.jpg")).with_name("broken.jpg").write_bytes(b"")
    convert(tree, out, small_recipe("webdataset"), workers=0, max_rejects=0.1)
    files = sorted({path.name for path in out.iterdir()} - {REJECTED_NAME})  # a list for people only
    assert {index_name(), MANIFEST_NAME} < set(files)
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
