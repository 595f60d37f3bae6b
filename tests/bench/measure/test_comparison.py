"""The comparison on real loaders, with trainers slow enough to tell."""

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
from bench.measure.imagefolder import recipe
from bench.measure.trial import measure
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


def test_a_result_says_what_was_measured_and_skipped_and_how_to_repeat_it(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Trials in processes of their own, as users have them."""
    folders = [raw_tree, converted["shards"]]
    candidates = choose_candidates(folders, ["imagefolder", "shards", "synthetic"], Path("unused"))
    absent = Candidate("webdataset", tmp_path / "absent")
    result = compare(Comparison(candidates=[*candidates, absent], settings=quick(trainer="emulated:200")))
    measured = [(row.key["backend"], row.key["data"]) for row in result.rows]
    expected = [("imagefolder", "raw tree"), ("shards", "shards")]
    expected += [("synthetic", "raw tree"), ("synthetic", "shards")]
    assert measured == expected
    assert list(result.skipped) == [absent.label]
    text = ", ".join(result.conditions)
    for mention in ("CPUs", "torch", "batch 8 of 32x32", "1 worker", "page cache warm", "one run each"):
        assert mention in text
    digest = open_split(folders[1], "train").digest
    data = result.settings["data"][str(folders[1])]
    assert (data["name"], data["samples"], data["digest"]) == ("shards", IMAGES, digest)
    for row in result.rows:
        trained = row.values["trainer_images_per_s"].median
        assert trained <= 200, "an emulated accelerator is never faster than it is told to be"
        assert row.values["fed_images_per_s"].median <= 200.5
        assert row.batches is not None
        assert len(row.batches.wait_s) == len(row.batches.step_s) == 4
        assert min(row.batches.step_s) >= 8 / 200
        assert row.stages.keys() >= {"compute", "transfer"}


@pytest.mark.usefixtures("trials_here")
def test_a_loader_that_fails_is_skipped_with_its_reason(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    os.mkfifo(tree / "001.anchor" / "pipe")  # which nobody writes to: whoever reads it hangs
    (tree / "001.anchor" / "link.jpg").symlink_to("nowhere")
    bad = sorted(tree.glob("*/*.jpg"))[5]
    bad.write_bytes(b"<html>")
    gone, candidates = Candidate("webdataset", tmp_path / "webdataset"), [Candidate("pytorch", tree)]
    candidates += [gone, Candidate("imagefolder", tree), Candidate("shards", converted["shards"])]
    result = compare(Comparison(candidates=candidates, settings=quick(batches=20)))
    assert [row.key["backend"] for row in result.rows] == ["imagefolder", "shards"]
    assert result.skipped.keys() == {one.label for one in candidates[:2]}
    for candidate, reason in zip(candidates, (str(bad), "does not exist"), strict=False):
        assert reason in result.skipped[candidate.label]
    (refused,) = (line for line in result.conditions if "cannot open" in line)
    assert str(bad) in refused or "link.jpg" in refused, (
        "ImageFolder is measured on what it can read, and what it cannot is said"
    )


@pytest.mark.usefixtures("trials_here")
def test_the_tree_serves_the_pictures_of_the_split_and_no_others(raw_tree: Path, tmp_path: Path) -> None:
    paths = [sample.path for sample in scan_tree(raw_tree).samples]
    rows = [f"{path},{'train' if row % 7 < 4 else 'val'}\n" for row, path in enumerate(paths)]
    (tmp_path / "list.csv").write_text("".join(rows))
    recipe, part = Recipe(format="shards", size=48, fit="crop"), tmp_path / "shards"
    convert(raw_tree, part, recipe, workers=0, split_list=tmp_path / "list.csv")
    opened, _ = open_candidates([Candidate("pytorch", raw_tree), Candidate("shards", part)])
    with same_pictures(opened) as ((tree, shards), _):
        linked = {Path(file).resolve() for file in tree.data.files}
        folder = tree.reads
        assert {Path(file).resolve() for file in open_split(folder, "train").files} == linked
    held = {shards.data.path_of(sample_id) for sample_id in shards.data.ids.tolist()}
    assert linked == {(raw_tree / path).resolve() for path in held}
    assert isinstance(folder, Path)
    assert not folder.exists()
    result = compare(Comparison(candidates=opened, settings=quick(batches=3)))
    assert {data["samples"] for data in result.settings["data"].values()} == {40}
    assert f"of {raw_tree} only the 40 of {IMAGES} pictures" in str(result.conditions)


def test_different_trees_are_refused_and_so_is_unequal_work_with_its_numbers(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    make_sample(tmp_path / "smaller", images=40, classes=5, seed=1, like="caltech", workers=0)
    candidates = [Candidate("pytorch", tmp_path / "smaller"), Candidate("shards", converted["shards"])]
    with pytest.raises(DatasetError, match=r"unequal work .*: 40 pictures; .*: 70 pictures; name folders"):
        compare(Comparison(candidates=candidates, settings=quick()))
    # a loader with a recipe of its own may serve another dtype, but not other shapes
    today, pytorch, shards = (Candidate(name, Path("x")) for name in ("imagefolder", "pytorch", "shards"))

    def served(ids: int, shape: str = "3x32x32 torch.uint8") -> Trial:
        return Trial(numbers={"served_ids": ids, "served_images": 48.0}, facts={"shapes": shape})

    work = served(48)
    check_served({today: served(47, "3x32x32 torch.float32"), pytorch: work, shards: work})
    for one, other, numbers in (
        (pytorch, served(40), "48 images, 40 distinct ids"),
        (pytorch, served(48, "3x32x32 torch.float32"), "3x32x32 torch.float32"),
        (today, served(48, "3x64x64 torch.float32"), "3x64x64"),
    ):
        with pytest.raises(DatasetError, match="unequal work") as raised:
            check_served({shards: work, one: other})
        assert numbers in str(raised.value)


def test_what_people_have_today_is_torchvisions_recipe_and_nothing_more(raw_tree: Path) -> None:
    rng = np.random.default_rng((1, 14))
    image = Image.fromarray(rng.integers(0, 256, (256, 256, 3), np.uint8))
    pixels = recipe("eval", 224)(image)  # 256 pixels: nothing to resize
    crop, flip = recipe("train", 224).transforms[:2]
    assert (crop.scale, crop.ratio, crop.size, flip.p) == ((0.08, 1.0), (3 / 4, 4 / 3), (224, 224), 0.5)
    centre = pil_to_tensor(image)[:, 16:240, 16:240] / 255
    mean, std = (torch.tensor(part)[:, None, None] for part in (IMAGENET_MEAN, IMAGENET_STD))
    assert torch.allclose(pixels, (centre - mean) / std, atol=1e-5)
    with pytest.raises(SettingError, match="'ram'"):
        quick(cache="ram").of("imagefolder", raw_tree, 5).open_loader(torch.uint8)
    epoch = quick(workers=2, warmup=0, batches=IMAGES // 8 - 1).of("imagefolder", raw_tree, 5)
    trial = measure(epoch)
    assert trial.numbers["served_ids"] == IMAGES // 8 * 8, "none twice"
    assert trial.facts["shapes"] == "3x32x32 torch.float32"
