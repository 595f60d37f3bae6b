"""A data set that holds a part of a tree, compared with that part of the tree."""

from pathlib import Path

import pytest

from bench.measure.arm import Arm, choose_arms, open_arms
from bench.measure.comparison import compare
from bench.measure.same_pictures import same_pictures
from bench.report import table as report
from loaders.dataset import open_split
from precache.convert import convert
from precache.errors import DatasetError
from precache.example_data.sample_tree import make_sample
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from tests.bench.measure.test_comparison import spec
from tests.conftest import IMAGES

PART = 40


@pytest.fixture(scope="module")
def part(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of a split of 40 of the tree's pictures."""
    folder = tmp_path_factory.mktemp("part")
    paths = [sample.path for sample in scan_tree(raw_tree).samples]
    listed = folder / "list.csv"
    lines = [f"{path},{'train' if row % 7 < 4 else 'val'}" for row, path in enumerate(paths)]
    listed.write_text("\n".join(lines) + "\n")
    convert(
        raw_tree,
        folder / "shards",
        Recipe(format="shards", size=32, fit="crop"),
        workers=0,
        split_list=listed,
    )
    assert len(open_split(folder / "shards", "train").ids) == PART < IMAGES
    return folder / "shards"


def test_the_tree_serves_the_pictures_of_the_split_and_no_others(raw_tree: Path, part: Path) -> None:
    arms, _ = open_arms([Arm("pytorch", raw_tree), Arm("shards", part)])
    with same_pictures(arms) as served:
        tree, shards = served.arms
        linked = {Path(file).resolve() for file in tree.data.files}
        folder = tree.reads
        found = open_split(folder, "train")
        assert {Path(file).resolve() for file in found.files} == linked
    held = {shards.data.path_of(sample_id) for sample_id in shards.data.ids.tolist()}
    assert linked == {(raw_tree / path).resolve() for path in held}
    assert not folder.exists()


def test_a_data_set_with_splits_is_compared_with_its_part_of_the_tree(raw_tree: Path, part: Path) -> None:
    arms = choose_arms([raw_tree, part], ["imagefolder", "pytorch", "shards"], Path("unused"))
    result = compare(arms, spec("none", batches=3, repeats=1))
    assert [row.label for row in result.rows] == [
        "imagefolder on raw tree",
        "pytorch on raw tree",
        "shards on shards",
    ]
    assert {data["samples"] for data in result.settings["data"].values()} == {PART}
    assert f"of {raw_tree} the {PART} of {IMAGES} pictures that the data set holds" in report.conditions(
        result
    )


def test_the_whole_tree_is_served_as_it_is(raw_tree: Path, converted: dict[str, Path]) -> None:
    arms, _ = open_arms([Arm("pytorch", raw_tree), Arm("shards", converted["shards"])])
    with same_pictures(arms) as served:
        assert [arm.reads for arm in served.arms] == [raw_tree, converted["shards"]]
        assert served.notes == []


def test_a_smaller_data_set_of_another_tree_is_refused_before_anything_runs(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sample(tmp_path / "other", images=PART, classes=3, seed=9, like="caltech", workers=0)
    other = tmp_path / "other"
    for number, picture in enumerate(sorted(other.glob("*/*"))):
        picture.rename(picture.with_name(f"another-{number}{picture.suffix}"))
    convert(other, tmp_path / "shards", Recipe(format="shards", size=32, fit="crop"), workers=0)
    monkeypatch.setattr("bench.measure.comparison.run_fresh", lambda *_: pytest.fail("a process was started"))
    arms = choose_arms([raw_tree, tmp_path / "shards"], ["pytorch", "shards"], Path("unused"))
    with pytest.raises(DatasetError, match=f"unequal work .*{IMAGES} pictures.*{PART} pictures"):
        compare(arms, spec("none"))
