"""Mean and standard deviation of what is stored: exact, whoever wrote which shard when."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from precache import convert, open_dataset, verify_deep
from precache.conversion.journal import JOURNAL_NAME, Journal
from precache.dataset.manifest import MANIFEST_NAME, _checksum
from precache.dataset.statistics import NO_PIXELS, ChannelStatistics, PixelSums
from precache.errors import DatasetError
from precache.formats import FORMATS
from tests.command import run
from tests.conftest import small_recipe

SPLITS = {"splits": "train=0.7,val=0.3"}


def stored_pixels(path: Path, split: str) -> np.ndarray:
    dataset = open_dataset(path)
    read_shard = FORMATS[dataset.manifest.recipe.format].read_shard
    shards = dataset.manifest.split_shards(split)
    pictures = [s.pixels("") for shard in shards for s in read_shard(dataset.shard_path(shard))]
    return np.concatenate([picture.reshape(-1, picture.shape[-1]) for picture in pictures])


def edit_manifest(path: Path, split: str, name: str, value: object) -> None:
    """As a saboteur does it: the checksum fits."""
    content = json.loads((path / MANIFEST_NAME).read_text())
    content["statistics"][split][name] = value
    (path / MANIFEST_NAME).write_text(json.dumps({**content, "checksum": _checksum(content)}))


@pytest.mark.parametrize("shape", [(1, 1, 3), (64, 48, 1), (65, 48, 3), (200, 7, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_sums_are_exact(shape: tuple[int, ...], dtype: type[np.integer]) -> None:
    most = np.iinfo(dtype).max
    for picture in (
        np.full(shape, most, dtype),
        np.random.default_rng(0).integers(0, most + 1, shape, dtype=dtype),
    ):
        sums = PixelSums.of(picture)
        wide = picture.astype(object).reshape(-1, shape[2])
        assert sums == PixelSums(len(wide), tuple(wide.sum(0)), tuple((wide**2).sum(0)))
        assert sums + NO_PIXELS == NO_PIXELS + sums == sums


def test_statistics_are_those_of_the_stored_pixels(raw_tree: Path, tmp_path: Path) -> None:
    manifest = convert(raw_tree, tmp_path / "out", small_recipe("shards", **SPLITS), workers=0).manifest
    for split in ("train", "val"):
        pixels = stored_pixels(tmp_path / "out", split).astype(np.float64) / 255
        found = manifest.statistics[split]
        assert found.pixels == len(pixels)
        assert found.mean == pytest.approx(pixels.mean(axis=0), abs=1e-12)
        assert found.std == pytest.approx(pixels.std(axis=0), abs=1e-12)
    assert open_dataset(tmp_path / "out").manifest.statistics == manifest.statistics


def test_jpegs_have_those_of_the_pixels_before_them(converted: dict[str, Path]) -> None:
    of = {name: open_dataset(path).manifest.statistics for name, path in converted.items()}
    assert of["webdataset"] == of["dali"] == of["shards"]


def test_a_resumed_conversion_has_the_statistics_of_one_run(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = small_recipe("shards"), tmp_path / "out"
    whole = convert(raw_tree, tmp_path / "whole", recipe, workers=0).manifest
    record = Journal.record

    def stop_after_two(journal: Journal, shard: object) -> None:
        record(journal, shard)  # type: ignore[arg-type]
        if len(journal.finished) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            convert(raw_tree, out, recipe, workers=0)
    assert (out / JOURNAL_NAME).exists()
    resumed = convert(raw_tree, out, recipe, workers=0)
    assert resumed.converted < whole.samples
    assert resumed.manifest.statistics == whole.statistics
    assert (out / MANIFEST_NAME).read_bytes() == (tmp_path / "whole" / MANIFEST_NAME).read_bytes()


def test_verify_deep_finds_wrong_statistics(
    converted: dict[str, Path], raw_tree: Path, tmp_path: Path
) -> None:
    for name in ("shards", "webdataset"):
        assert verify_deep(converted[name], raw_tree, workers=0).problems == ()
        path = Path(shutil.copytree(converted[name], tmp_path / name))
        edit_manifest(path, "train", "mean", [0.5, 0.25, 0.25])
        (problem,) = verify_deep(path, raw_tree, workers=0).problems
        assert "split train has mean" in problem
        assert "its manifest says mean 0.5000 0.2500 0.2500" in problem
        result = run("precache", "verify", path, raw_tree, "--deep", "--workers", 0, cwd=tmp_path)
        assert result.returncode == 1
        assert problem in result.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("mean", [2.0, 0.1, 0.1]), ("std", [float("nan")] * 3), ("std", []), ("mean", None), ("pixels", -1)],
)
def test_statistics_that_cannot_be_are_refused(
    converted: dict[str, Path], tmp_path: Path, name: str, value: object
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "out"))
    edit_manifest(path, "train", name, value)
    with pytest.raises(DatasetError, match=f"{MANIFEST_NAME}: not a manifest of this project"):
        open_dataset(path)


def test_the_sum_of_nothing_has_no_statistics() -> None:
    assert ChannelStatistics.of([]) is None
    assert ChannelStatistics.of([PixelSums.of(np.zeros((2, 2, 3), np.uint8)), NO_PIXELS]) is None
    flat = ChannelStatistics.of([PixelSums.of(np.full((9, 9, 1), 255, np.uint8))])
    assert flat == ChannelStatistics((1.0,), (0.0,), 81)


def test_inspect_shows_them(converted: dict[str, Path], tmp_path: Path) -> None:
    found = open_dataset(converted["shards"]).manifest.statistics["train"]
    result = run("precache", "inspect", converted["shards"], cwd=tmp_path)
    assert f"mean {found.mean[0]:.4f}" in " ".join(result.stdout.split())
    content = json.loads(run("precache", "inspect", converted["shards"], "--json", cwd=tmp_path).stdout)
    assert len(content["source"]["digest"]) == 64
    assert content["source"]["options"] == {}
    assert content["statistics"]["train"] == {
        "mean": list(found.mean), "std": list(found.std), "pixels": found.pixels
    }  # fmt: skip
