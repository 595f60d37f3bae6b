"""Which loader reads which folder, and that all of them get the same pictures."""

import shutil
from pathlib import Path

import pytest

from bench.measure.candidates import (
    CHOICES,
    READS,
    Candidate,
    choose_candidates,
    open_candidates,
    same_pictures,
)
from bench.measure.comparison import compare
from bench.report.result import conditions
from loaders.dataset import open_split
from precache.conversion.convert import convert
from precache.errors import DatasetError
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from tests.bench.settings import quick
from tests.conftest import IMAGES

UNUSED = Path("unused")


def test_folders_go_to_every_backend_that_reads_them_once(raw_tree: Path, converted: dict[str, Path]) -> None:
    found = [(one.backend, one.path) for one in choose_candidates([], ["all"], Path("data"))]
    assert found == [(name, Path("data") / READS[name][0]) for name in CHOICES]
    assert found[:2] == [("imagefolder", Path("data/raw")), ("pytorch", Path("data/raw"))], "today's first"
    shards = converted["shards"]
    backends = ["shards", "imagefolder", "shards", "synthetic"]
    assert choose_candidates([raw_tree, shards, shards], backends, UNUSED) == [
        Candidate("shards", shards),
        Candidate("imagefolder", raw_tree),
        Candidate("synthetic", raw_tree),
        Candidate("synthetic", shards),
    ]
    with pytest.raises(DatasetError, match="holds shards: none of it is read by backend webdataset; use"):
        choose_candidates([shards], ["webdataset"], UNUSED)


def test_folders_of_one_kind_are_called_by_their_names_and_others_are_left_out(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(converted["shards"], tmp_path / "keep")
    two = [Candidate("shards", converted["shards"]), Candidate("shards", tmp_path / "keep")]
    gone = Candidate("dali", tmp_path / "dali")
    opened, failed = open_candidates([*two, gone, Candidate("webdataset", converted["webdataset"])])
    assert [one.described for one in opened] == ["shards shards", "shards keep", "webdataset"]
    assert [one.described for one in open_candidates(two[:1])[0]] == ["shards"]
    assert failed.keys() == {gone.label}
    assert "does not exist" in failed[gone.label]


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
        assert tree.linked == folder
    held = {shards.data.path_of(sample_id) for sample_id in shards.data.ids.tolist()}
    assert linked == {(raw_tree / path).resolve() for path in held}
    assert isinstance(folder, Path)
    assert not folder.exists()
    result = compare(opened, quick(batches=3))
    assert {data["samples"] for data in result.settings["data"].values()} == {40}
    said = f"of {raw_tree} only the 40 of {IMAGES} pictures are served that the data set holds"
    assert said in conditions(result)
