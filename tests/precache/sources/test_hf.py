"""Datasets of Hugging Face's library; without it, all but the first are skipped."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import SourceOptions, convert, open_dataset
from precache.errors import MissingDependencyError, PrecacheError, SettingError, SourceError
from precache.sources import open_source
from precache.sources.tree import scan_tree
from tests.conftest import IMAGES, small_recipe
from tests.faults.mutations import spoil

DAMAGES = 300


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'precache\[hf\]'"):
        open_source(f"hf:{tmp_path}")


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library = pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    library.disable_progress_bars()
    return library


def made(datasets: Any, tree: Path, *, embedded: bool = True) -> Any:
    """The pictures of the tree as such a dataset, in the order of the scan."""
    scan = scan_tree(tree)
    paths = [tree / sample.path for sample in scan.samples]
    pictures = [{"bytes": path.read_bytes(), "path": None} for path in paths] if embedded else map(str, paths)
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=list(scan.classes)),
        "caption": datasets.Value("string"),
        "boxes": datasets.Sequence(datasets.Sequence(datasets.Value("float32"))),
    }
    columns = {
        "image": list(pictures),
        "label": [sample.label for sample in scan.samples],
        "caption": [f"n° {sample.id}" for sample in scan.samples],
        "boxes": [[[1.0, 2.0, 3.0, 4.0]] * (sample.id % 3) for sample in scan.samples],
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def test_splits_and_an_order_of_its_own_are_kept(datasets: Any, raw_tree: Path, tmp_path: Path) -> None:
    whole = made(datasets, raw_tree).shuffle(seed=1)
    parts = datasets.DatasetDict({"train": whole.select(range(40)), "test": whole.select(range(40, IMAGES))})
    parts.save_to_disk(tmp_path / "saved")
    labels = [*whole["label"]]
    for number, source in enumerate((parts, f"hf:{tmp_path}/saved")):
        out = tmp_path / f"out{number}"
        convert(source, out, small_recipe("webdataset"), workers=0)
        index = open_dataset(out).read_index("test")
        assert sorted(index.ids.tolist()) == list(range(40, IMAGES))
        assert [labels[row] for row in index.ids.tolist()] == index.labels.tolist()


def test_formats_and_transforms_of_the_library_change_nothing(datasets: Any, raw_tree: Path) -> None:
    dataset = made(datasets, raw_tree)
    plain = open_source(dataset).scan()
    assert open_source(dataset.with_format("numpy")).scan().digest == plain.digest
    turned = open_source(dataset.with_transform(lambda rows: rows)).scan()
    assert turned.digest == plain.digest
    assert "its transform is left out" in turned.warnings[0]


def test_bad_columns_are_named(datasets: Any, raw_tree: Path) -> None:
    dataset = made(datasets, raw_tree)
    for options, says in (
        ({"label": "species"}, "no column 'species', as --label asks; has 'image', 'label'"),
        ({"image": "photo"}, "no column 'photo'"),
        ({"fields": ("weight",)}, "no column 'weight'"),
    ):
        with pytest.raises(SettingError, match=says):
            open_source(dataset, SourceOptions(**options)).scan()
    with pytest.raises(SettingError, match="no column may be the pictures; name theirs with --image"):
        open_source(dataset.select_columns(["label"])).scan()
    unlabelled = dataset.remove_columns("label").add_column("label", [-1] * IMAGES)
    unlabelled = unlabelled.cast_column("label", dataset.features["label"])
    with pytest.raises(SourceError, match="row 0: 'label': -1 is not a class"):
        open_source(unlabelled).scan()
    assert open_source(unlabelled, SourceOptions(target="none")).scan().target == "none"


def test_a_row_without_a_picture_is_a_reject(datasets: Any, tmp_path: Path) -> None:
    columns = {"image": [Image.fromarray(np.full((8, 8), n, np.uint8)) for n in range(3)], "label": [0, 1, 0]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns["image"][1] = None
    dataset = datasets.Dataset.from_dict(columns, features=features)
    result = convert(dataset, tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=0.5)
    assert [bad.id for bad in result.manifest.rejected] == [1]
    assert result.manifest.rejected[0].reason.startswith("has no picture; expected ")


def test_damaged_folders_end_in_one_line_or_in_what_was_saved(
    datasets: Any, raw_tree: Path, tmp_path: Path
) -> None:
    """Mutated by seed: a byte, a cut, a hole; pictures that changed with them are decoded or rejected."""
    saved = tmp_path / "saved"
    made(datasets, raw_tree).select(range(6)).save_to_disk(saved)
    originals = {path: path.read_bytes() for path in saved.iterdir()}
    for seed in range(DAMAGES):
        draw = random.Random(seed)
        for path, content in originals.items():
            path.write_bytes(content)
        victim = draw.choice(sorted(originals))
        victim.write_bytes(spoil(originals[victim], draw))
        says = ""
        try:
            scan = open_source(f"hf:{saved}", SourceOptions(fields=("caption", "boxes"))).scan()
            for sample in scan.samples:
                scan.source.read(sample, 10**6)
        except PrecacheError as error:
            says = str(error)
        assert "\n" not in says, seed
