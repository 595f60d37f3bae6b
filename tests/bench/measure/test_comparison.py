"""The comparison on real loaders, with trainers slow enough to tell."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from bench.machine import page_cache
from bench.measure.candidates import Candidate, choose_candidates
from bench.measure.comparison import check_served, compare
from bench.measure.imagefolder import recipe
from bench.measure.trial import Served, measure
from bench.report.result import conditions
from bench.report.row import Result
from loaders.dataset import open_split
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache.errors import DatasetError, SettingError
from precache.example_data.sample_tree import make_sample
from precache.sources.tree import scan_tree
from tests.bench.settings import quick
from tests.conftest import IMAGES, STORED_SIZE

UNUSED = Path("unused")


@pytest.fixture(scope="module")
def tree(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures of `raw_tree`, one of them without the ending of its name."""
    tree = Path(shutil.copytree(raw_tree, tmp_path_factory.mktemp("endings") / "tree"))
    picture = sorted(tree.glob("*/*.jpg"))[3]
    picture.rename(picture.with_suffix(""))
    return tree


@pytest.fixture(scope="module")
def result(tree: Path, converted: dict[str, Path]) -> Result:
    """Trials in processes of their own, as users have them."""
    folders = [tree, converted["shards"]]
    backends = ["imagefolder", "pytorch", "shards", "synthetic", "nvjpeg"]
    return compare(choose_candidates(folders, backends, UNUSED), quick(trainer="emulated:200"))


def test_every_backend_reads_every_folder_that_it_can_or_is_skipped(result: Result) -> None:
    measured = [(row.backend, row.data) for row in result.rows]
    expected = [("imagefolder", "raw tree"), ("pytorch", "raw tree"), ("shards", "shards")]
    expected += [("synthetic", "raw tree"), ("synthetic", "shards")]
    assert [pair for pair in measured if pair[0] != "nvjpeg"] == expected
    skipped = {name.split(" on ")[0] for name in result.skipped}
    assert skipped == {"nvjpeg"} - {backend for backend, _ in measured}


def test_the_result_says_what_one_needs_to_repeat_it_and_which_pictures_were_served(
    result: Result, tree: Path, converted: dict[str, Path]
) -> None:
    text = ", ".join(conditions(result))
    for mention in ("CPUs", "torch", "batch 8 of 32x32", "1 worker", "page cache warm", "one run each"):
        assert mention in text
    assert f"imagefolder on {tree} knows {IMAGES - 1} of the {IMAGES} pictures, by the endings" in text
    assert result.machine["date"] in text
    assert 0 <= result.settings["other_cpu"] <= 1
    data = result.settings["data"]
    assert data.keys() == {row.label for row in result.rows}
    bytes_of = {row.label: row.image_bytes for row in result.rows}
    assert bytes_of["pytorch on raw tree"] == scan_tree(tree).samples.file_bytes.sum() / IMAGES
    assert bytes_of["synthetic on shards"] is None
    for label, path in (("pytorch on raw tree", tree), ("shards on shards", converted["shards"])):
        split = open_split(path, "train")
        assert data[label] == {"samples": IMAGES, "digest": split.digest, "path": str(path)}
    assert (bytes_of["shards on shards"] or 0) >= STORED_SIZE**2 * 3


def test_a_fed_trainer_has_a_wait_and_a_step_of_every_batch(result: Result) -> None:
    for row in result.rows:
        assert row.trainer is not None
        assert row.trainer.median <= 200, "an emulated accelerator is never faster than it is told to be"
        assert (row.together or row.loader).median <= 200.5
        assert len(row.wait_s) == len(row.step_s) == 4
        assert min(row.step_s) >= 8 / 200
        assert 0.04 <= (row.batch_s_median or 0) <= (row.batch_s_p95 or 0)
        assert all(0 <= first < 4 for first in row.epoch_starts)
        for share in (row.data_wait, row.utilisation, row.busy):
            assert share is not None
            assert 0 <= share.median <= 1
        assert row.first_step_s is not None
        assert row.first_step_s.low >= 8 / 200
        assert row.predicted == min(row.loader.median, row.trainer.median)
        assert row.monitor is not None
        assert row.stages.keys() >= {"compute", "transfer"}
        assert (row.advice == "") == (row.changes == ()) == (row.backend == "synthetic")


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
    candidates += [Candidate("imagefolder", tree), gone, Candidate("shards", converted["shards"])]
    result = compare(candidates, quick(batches=20))
    (row,) = result.rows
    assert (row.backend, row.trainer, row.ratio, row.together) == ("shards", None, None, row.loader)
    assert result.skipped.keys() == {f"pytorch on {tree}", f"imagefolder on {tree}", gone.label}
    assert str(bad) in result.skipped[f"pytorch on {tree}"]
    assert result.skipped[f"imagefolder on {tree}"].startswith(f"{tree}/001.anchor/link.jpg: ")
    assert "does not exist" in result.skipped[gone.label]
    with pytest.raises(DatasetError, match=f"nothing to measure: .*{bad}"):
        compare(candidates[:1], quick(batches=20))


@pytest.mark.usefixtures("trials_here")
def test_what_is_cold_or_warm_is_measured_or_said_not_to_be(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = converted["shards"]
    monkeypatch.setattr(page_cache, "warm", lambda path: False)
    both = [Candidate(name, path) for name in ("shards", "synthetic")]
    result = compare(both, quick(cold=True))
    skipped = result.skipped.get(f"cold cache of shards on {path}", "")
    shards, synthetic = result.rows
    assert (shards.cold is None) == ("stay in memory" in skipped)
    assert result.settings["page_cache"].startswith("not warmed")
    # from files that are larger than memory, reading cannot be told from collating
    assert ("storage or collate" in shards.stages) != (shards.reads_cold)
    assert "storage or collate" not in synthetic.stages


def test_different_trees_and_epochs_without_a_batch_are_refused(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    make_sample(tmp_path / "smaller", images=40, classes=5, seed=1, like="caltech", workers=0)
    candidates = [Candidate("pytorch", tmp_path / "smaller"), Candidate("shards", converted["shards"])]
    with pytest.raises(DatasetError, match=r"unequal work .*: 40 pictures; .*: 70 pictures; name folders"):
        compare(candidates, quick())
    with pytest.raises(SettingError, match=r"batch_size 71 is more than the 70 pictures .*; choose"):
        compare(candidates[1:], quick(batch_size=71))


def test_unequal_work_is_refused_with_the_numbers() -> None:
    """A loader with a recipe of its own may serve another dtype, but not other shapes."""
    today, pytorch, shards = (Candidate(name, Path("x")) for name in ("imagefolder", "pytorch", "shards"))
    work, floats = Served(48, 48, ("3x32x32 torch.uint8",)), ("3x32x32 torch.float32",)
    check_served({today: Served(47, 48, floats), pytorch: work, shards: work})
    for one, other, numbers in (
        (pytorch, Served(40, 48, work.shapes), "48 images, 40 distinct ids"),
        (pytorch, Served(40, 40, work.shapes), "40 images, 40 distinct ids"),
        (pytorch, Served(48, 48, floats), "3x32x32 torch.float32"),
        (today, Served(48, 48, ("3x64x64 torch.float32",)), "3x64x64"),
        (today, Served(40, 40, floats), "40 images"),
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
    for setting, value in (("cache", "ram"), ("shuffle", "window"), ("augment", "crop"), ("last", "pad")):
        with pytest.raises(SettingError, match=f"'{value}'"):
            quick(**{setting: value}).of("imagefolder", raw_tree, 5).open_loader(torch.uint8)
    for workers in (0, 2):
        epoch = quick(workers=workers, warmup=0, batches=IMAGES // 8 - 1).of("imagefolder", raw_tree, 5)
        served = measure(epoch).served
        assert served is not None
        assert (served.ids, served.shapes) == (IMAGES // 8 * 8, ("3x32x32 torch.float32",)), "none twice"
