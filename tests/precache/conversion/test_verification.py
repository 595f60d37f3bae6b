"""Verification of converted datasets against their manifest and their source."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache import SourceOptions, convert, verify, verify_deep
from precache.dataset.index import INDEX_NAME, REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError
from precache.pictures.kinds import decoder_versions
from tests.command import ROOT, run_here
from tests.conftest import small_recipe
from tests.precache.sources.objects import picture
from tests.precache.sources.tables import write_jsonl


def forbid(path: Path) -> None:
    path.chmod(0)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


AS_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]


@pytest.mark.parametrize("name", [INDEX_NAME, MANIFEST_NAME, "train-00000.safetensors"])
@pytest.mark.parametrize("hide", [forbid, link_to_itself])
def test_a_file_that_cannot_be_read_is_not_called_damaged(
    name: str, hide: Callable[[Path], None], converted: dict[str, Path], tmp_path: Path
) -> None:
    """Root may read all files, unless it gives this up."""
    out = Path(shutil.copytree(converted["shards"], tmp_path / "out"))
    hide(out / name)
    prefix = AS_USER if os.geteuid() == 0 else []
    if prefix and hide is forbid and not shutil.which("setpriv"):
        pytest.skip("setpriv is missing")
    code = "import sys, precache; print(precache.verify(sys.argv[1]))"
    child = [*(prefix if hide is forbid else []), sys.executable, "-c", code, str(out)]
    done = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert f"{name}: cannot be read (" in done.stderr
    assert "remove" not in done.stderr.splitlines()[-1]


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
    assert verify_deep({**converted, **shaped}[name], raw_tree, workers=2 if name == "dali" else 0) == []


def test_verify_deep_names_a_picture_whose_source_changed(tree: Path, tmp_path: Path) -> None:
    """The file keeps its size, so that the tree looks the same."""
    convert(tree, tmp_path / "out", small_recipe("dali"), workers=0)
    other, *_, changed = sorted(tree.glob("*/*.jpg"), key=lambda path: path.stat().st_size)
    changed.write_bytes(other.read_bytes().ljust(changed.stat().st_size, b"\0"))
    result = run_here("precache", "verify", "--deep", "out", "tree", "--workers", 0, cwd=tmp_path)
    problem, summary = result.stderr.splitlines()
    assert result.returncode == 1
    assert problem.startswith(f"tree/{changed.relative_to(tree)}: changed since it was converted")
    assert summary.startswith("out: 1 of 70 pictures differs")


@pytest.mark.parametrize("target", ["class", "classes", "vector"])
def test_verify_deep_compares_each_label_field_and_split(target: str, tmp_path: Path) -> None:
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

    def write(**changed: list[Any]) -> Path:
        write_jsonl(tmp_path / "table.jsonl", {**columns, **changed})
        return tmp_path / "table.jsonl"

    options = SourceOptions(
        label="label",
        split="fold",
        fields=("width", "note"),
        target="number" if target == "vector" else target,
    )
    out = tmp_path / "out"
    convert(write(), out, small_recipe("shards", shard_bytes=9000), workers=0, options=options)
    assert verify_deep(out, write(), workers=0) == []
    for name, values in columns.items():
        if name != "path":
            with pytest.raises(DatasetError, check=lambda error: error.path == out):
                verify_deep(out, write(**{name: [values[1], *values[1:]]}), workers=0)
    with pytest.raises(DatasetError, check=lambda error: error.path == out):
        verify_deep(out, write(**{name: values[1:] for name, values in columns.items()}), workers=0)


def test_verify_deep_takes_a_dataset_that_names_pictures_twice(tree: Path, tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision", reason="the extra 'loaders' is not installed")
    dataset = torchvision.datasets.ImageFolder(tree)
    dataset.samples += dataset.samples[::5]
    convert(dataset, tmp_path / "out", small_recipe("shards"), workers=0)
    assert verify_deep(tmp_path / "out", dataset, workers=0) == []


def test_verify_deep_refuses_to_compare_with_another_pillow(
    raw_tree: Path, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {**decoder_versions(), "pillow": "99"}
    monkeypatch.setattr("precache.conversion.verification.decoder_versions", lambda: versions)
    with pytest.raises(DatasetError, match=r"pillow .*, here 99"):
        verify_deep(converted["shards"], raw_tree, workers=0)
