"""Comparisons of real loaders, with trainers that are slow enough to make a difference."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from bench.measure.candidates import Candidate, choose_candidates, open_candidates, same_pictures
from bench.measure.comparison import Comparison, check_served, compare
from bench.measure.recipes import make_transform
from bench.measure.trial import measure, open_loader
from bench.report.result import Trial
from loaders.dataset import open_split
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache.conversion.convert import convert
from precache.errors import DatasetError, SettingError
from precache.example_data.sample_tree import make_sample
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from tests.bench.settings import quick
from tests.conftest import IMAGES


def test_a_result_has_rows_skipped_loaders_and_conditions(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Trials have processes of their own here, as users have them."""
    folders = [raw_tree, converted["shards"]]
    candidates = choose_candidates(folders, ["imagefolder", "shards", "synthetic"], Path("unused"))
    absent = Candidate("webdataset", tmp_path / "absent")
    result = compare(
        Comparison(candidates=[*candidates, absent], settings=quick(trainer="emulated:200", launches=20))
    )
    assert [(row.key["backend"], row.key["data"]) for row in result.rows] == [
        ("imagefolder", "raw tree"),
        ("shards", "shards"),
        ("synthetic", "raw tree"),
        ("synthetic", "shards"),
    ]
    assert list(result.skipped) == [absent.label]
    text = ", ".join(result.conditions)
    for mention in (
        "CPUs",
        "torch",
        "batch 8 of 32x32",
        "1 worker",
        "page cache warm",
        "one run each",
        "20 launches",
    ):
        assert mention in text
    digest = open_split(folders[1], "train").digest
    data = result.settings["data"][str(folders[1])]
    assert (data["kind"], data["samples"], data["digest"]) == ("shards", IMAGES, digest)
    for row in result.rows:
        trainer_rate = row.values["trainer_images_per_s"].median
        limit = 200 * 4 / 3  # what was overslept before the four steps makes one of them shorter
        assert max(trainer_rate, row.values["fed_images_per_s"].median) < limit
        assert row.values["launch_ratio"].median > 0
        assert row.values["launch_share"].median < 1
        assert row.batches is not None
        assert len(row.batches.wait_s) == len(row.batches.step_s) == 4
        assert row.stages.keys() >= {"compute", "transfer"}


@pytest.mark.usefixtures("trials_here")
def test_settings_of_a_trainer_are_not_those_of_the_loader_alone(converted: dict[str, Path]) -> None:
    candidates = choose_candidates([converted["shards"]], ["shards"], Path("unused"))
    settings = quick(trainer="resnet10", amp="bf16")
    (row,) = compare(Comparison(candidates=candidates, settings=settings)).rows
    assert row.values["loader_images_per_s"].median > row.values["fed_images_per_s"].median > 0


def test_a_loader_that_fails_is_skipped_with_its_reason(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    os.mkfifo(tree / "001.anchor" / "pipe")  # nobody writes to it: reading it hangs
    (tree / "001.anchor" / "link.jpg").symlink_to("nowhere")
    damaged = sorted(tree.glob("*/*.jpg"))[5]
    damaged.write_bytes(b"<html>")
    failing = Candidate("pytorch", tree)
    missing = Candidate("webdataset", tmp_path / "webdataset")
    others = [Candidate("imagefolder", tree), Candidate("shards", converted["shards"])]
    comparison = Comparison(candidates=[failing, missing, *others], settings=quick(batches=20))
    result = compare(comparison)
    assert [row.key["backend"] for row in result.rows] == ["imagefolder", "shards"]
    assert result.skipped.keys() == {failing.label, missing.label}
    assert str(damaged) in result.skipped[failing.label]
    assert "does not exist" in result.skipped[missing.label]
    # ImageFolder is measured without the pictures that it cannot open, and one of them is named
    (condition,) = (line for line in result.conditions if "cannot open" in line)
    assert str(damaged) in condition or "link.jpg" in condition


@pytest.mark.usefixtures("trials_here")
def test_a_raw_tree_serves_only_the_pictures_of_a_converted_part(raw_tree: Path, tmp_path: Path) -> None:
    paths = [sample.path for sample in scan_tree(raw_tree).samples]
    rows = [f"{path},{'train' if row % 7 < 4 else 'val'}\n" for row, path in enumerate(paths)]
    (tmp_path / "list.csv").write_text("".join(rows))
    recipe, part = Recipe(format="shards", size=48, fit="crop"), tmp_path / "shards"
    convert(raw_tree, part, recipe, workers=0, split_list=tmp_path / "list.csv")
    opened, _ = open_candidates([Candidate("pytorch", raw_tree), Candidate("shards", part)])
    with same_pictures(opened) as ((tree, shards), _):
        linked_files = {Path(file).resolve() for file in tree.data.files}
        folder = tree.loader_path
        assert {Path(file).resolve() for file in open_split(folder, "train").files} == linked_files
    shard_paths = {shards.data.path_of(sample_id) for sample_id in shards.data.ids.tolist()}
    assert linked_files == {(raw_tree / path).resolve() for path in shard_paths}
    assert isinstance(folder, Path)
    assert not folder.exists()
    result = compare(Comparison(candidates=opened, settings=quick(batches=3)))
    assert {data["samples"] for data in result.settings["data"].values()} == {40}
    assert f"of {raw_tree} only the 40 of {IMAGES} pictures" in str(result.conditions)


def test_compare_refuses_different_trees_with_their_numbers(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    make_sample(tmp_path / "smaller", images=40, classes=5, seed=1, like="caltech", workers=0)
    candidates = [Candidate("pytorch", tmp_path / "smaller"), Candidate("shards", converted["shards"])]
    with pytest.raises(DatasetError, match=r": 40 pictures; .*: 70 pictures") as raised:
        compare(Comparison(candidates=candidates, settings=quick()))
    assert "one tree" in raised.value.remedy


IMAGEFOLDER, PYTORCH, SHARDS = (Candidate(name, Path("x")) for name in ("imagefolder", "pytorch", "shards"))


def served(ids: int, shape: str = "3x32x32 torch.uint8") -> Trial:
    """Return a trial that has served 48 images with so many distinct ids."""
    facts = {"shapes": shape, "sides": shape.partition(" ")[0]}
    return Trial(numbers={"served_ids": ids, "served_images": 48.0}, facts=facts)


def test_imagefolder_may_serve_another_dtype_and_fewer_pictures() -> None:
    trials = {IMAGEFOLDER: served(47, "3x32x32 torch.float32"), PYTORCH: served(48), SHARDS: served(48)}
    check_served(trials)


@pytest.mark.parametrize(
    ("candidate", "trial", "numbers"),
    [
        (PYTORCH, served(40), "48 images, 40 distinct ids"),
        (PYTORCH, served(48, "3x32x32 torch.float32"), "3x32x32 torch.float32"),
        (IMAGEFOLDER, served(48, "3x64x64 torch.float32"), "3x64x64"),
    ],
)
def test_unequal_work_is_refused_with_its_numbers(candidate: Candidate, trial: Trial, numbers: str) -> None:
    with pytest.raises(DatasetError, match=numbers):
        check_served({SHARDS: served(48), candidate: trial})


def test_imagefolder_is_measured_with_torchvisions_own_recipe(raw_tree: Path) -> None:
    rng = np.random.default_rng((1, 14))
    image = Image.fromarray(rng.integers(0, 256, (256, 256, 3), np.uint8))
    pixels = make_transform("eval", 224, floats=True)(image)  # of 256 pixels, so that nothing is resized
    crop, flip = make_transform("train", 224, floats=True).transforms[:2]
    assert (crop.scale, crop.ratio, crop.size, flip.p) == ((0.08, 1.0), (3 / 4, 4 / 3), (224, 224), 0.5)
    centre = pil_to_tensor(image)[:, 16:240, 16:240] / 255
    mean, std = (torch.tensor(part)[:, None, None] for part in (IMAGENET_MEAN, IMAGENET_STD))
    assert torch.allclose(pixels, (centre - mean) / std, atol=1e-5)


def test_imagefolder_refuses_a_cache(raw_tree: Path) -> None:
    with pytest.raises(SettingError, match="'device'"):
        open_loader(quick(cache="device").for_loader("imagefolder", raw_tree, 5), torch.uint8)


def test_imagefolder_serves_float32_and_no_picture_twice(raw_tree: Path) -> None:
    settings = quick(workers=2, warmup=0, batches=IMAGES // 8 - 1)  # one epoch
    trial = measure(settings.for_loader("imagefolder", raw_tree, 5))
    assert trial.numbers["served_ids"] == IMAGES // 8 * 8
    assert trial.facts["shapes"] == "3x32x32 torch.float32"
