"""Several datasets of one format, served as one; the contract over such lists is in test_backends."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders.concatenation import JoinedColumns
from precache import convert, open_dataset
from precache.errors import SampleError, SettingError
from precache.sources.tree import scan_tree
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE, small_recipe
from tests.damage import flip_a_bit
from tests.loader_contract import ids_of
from tests.precache.sources.examples import SAMPLES, example_source

SPLITS = "train=0.6,val=0.4"


def pictures_of(path: Any, **settings: Any) -> dict[int, torch.Tensor]:
    """Pictures of an epoch, by id."""
    with build_loader(path, workers=1, **settings) as loader:
        return {int(i): image for batch in loader for i, image in zip(batch.ids, batch.images, strict=True)}


def test_ids_begin_after_all_of_the_dataset_before(other: dict[str, Path], tmp_path: Path) -> None:
    """Ids of other splits and of rejected pictures count, so that all splits and formats agree on them."""
    first = Path(shutil.copytree(other["raw"], tmp_path / "first"))
    samples = scan_tree(first).samples
    rejected = samples[len(samples) - 1]
    (first / rejected.path).write_bytes(b"no picture")
    served: dict[str, list[tuple[int, str]]] = {}
    for kind in ("raw", "shards", "dali"):
        paths, settings = [first, other["raw"]], {"splits": SPLITS}
        if kind != "raw":
            paths, settings = [tmp_path / kind, tmp_path / f"other-{kind}"], {}
            for tree, path in zip((first, other["raw"]), paths, strict=True):
                convert(tree, path, small_recipe(kind, splits=SPLITS), workers=0, max_rejects=1)
        pairs = []
        for split in ("train", "val"):
            with build_loader(paths, split=split, workers=1, size=24, on_error="skip", **settings) as loader:
                pairs += [(i, loader.path_of(i)) for i in ids_of(loader)]
        served[kind] = sorted(pairs)
    expected = [(sample.id, sample.path) for sample in samples][:-1]
    expected += [(len(samples) + sample.id, sample.path) for sample in scan_tree(other["raw"]).samples]
    assert served == dict.fromkeys(served, expected)


@pytest.mark.parametrize("kind", ["shards", "webdataset", "dali"])
def test_a_tree_that_grew_by_one_picture_is_served_in_all_splits(
    kind: str, raw_tree: Path, tmp_path: Path
) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    first, more = tmp_path / "first", tmp_path / "more"
    convert(tree, first, small_recipe(kind, splits=SPLITS), workers=0)
    known = {sample.path for sample in scan_tree(tree).samples}
    shutil.copyfile(tree / min(known), (tree / min(known)).with_name("new.jpg"))
    convert(tree, more, small_recipe(kind, splits=SPLITS), workers=0, without=[first])
    served = []
    for split in ("train", "val"):
        for paths in ([first, more], [first, more, more]):
            with build_loader(paths, split=split, workers=1) as loader:
                ids = ids_of(loader)
                assert len(set(ids)) == len(loader.dataset) == len(loader.dataset.targets)
        with build_loader([first, more], split=split, workers=1) as loader:
            served += [loader.path_of(i) for i in ids_of(loader)]
    assert sorted(served) == sorted({*known, str(Path(min(known)).with_name("new.jpg"))})
    lacking = ({"train", "val"} - {*open_dataset(more).manifest.shards.split_names}).pop()
    with pytest.raises(SettingError, match=f"unknown split '{lacking}'"):
        build_loader(more, split=lacking)
    with pytest.raises(SettingError, match=f"unknown split '{lacking}'"):
        build_loader([more, more], split=lacking)


@pytest.mark.parametrize("kind", ["shards", "webdataset"])
@pytest.mark.parametrize(("first", "second"), [("", "keep-"), ("rectangle-", ""), ("keep-", "keep-")])
def test_different_stored_sizes_are_served_as_each_alone(
    first: str, second: str, kind: str, converted: dict[str, Path], shaped: dict[str, Path]
) -> None:
    folders = {**converted, **shaped}
    paths = [folders[f"{first}{kind}"], folders[f"{second}{kind}"]]
    served = pictures_of(paths, size=32, shuffle="window")
    alone = [pictures_of(path, size=32) for path in paths]
    expected = {**alone[0], **{IMAGES + i: image for i, image in alone[1].items()}}
    assert served.keys() == expected.keys()
    difference = [(served[i].int() - expected[i].int()).abs().max() for i in expected]
    assert max(difference) <= 1
    with build_loader(paths) as loader:
        assert loader.size == min((alone.size for alone in map(build_loader, paths)), key=np.min)


def test_dataset_statistics_are_those_of_all_pictures(
    converted: dict[str, Path], other: dict[str, Path]
) -> None:
    paths = [converted["shards"], other["shards"]]
    integers, floats = pictures_of(paths), pictures_of(paths, dtype="float32", normalize="dataset")
    pixels = torch.stack([integers[i] for i in sorted(integers)]).double() / 255
    mean, std = (function(pixels, dim=(0, 2, 3)).view(3, 1, 1) for function in (torch.mean, torch.std))
    expected = ((pixels - mean) / std).float()
    assert torch.allclose(torch.stack([floats[i] for i in sorted(floats)]), expected, atol=1e-3)


def test_skipping_a_sample_keeps_the_order_of_the_list(
    converted: dict[str, Path], other: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(other["shards"], tmp_path / "damaged"))
    file, bad = flip_a_bit(folder, shard_number=1)
    settings: dict[str, Any] = {"workers": 1, "batch_size": 16}
    with build_loader([converted["shards"], other["shards"]], **settings) as whole:
        expected = list(whole)
    with build_loader([converted["shards"], folder], on_error="skip", **settings) as loader:
        for batch, due in zip(loader, expected, strict=True):
            is_good = due.ids != IMAGES + bad
            for name in ("ids", "images", "labels", "padding"):
                assert torch.equal(getattr(batch, name), getattr(due, name)[is_good])
    with (
        build_loader([converted["shards"], folder], **settings) as loader,
        pytest.raises(SampleError, match=rf"^{file}: sample {IMAGES + bad} "),
    ):
        list(loader)


def test_a_damaged_shard_names_the_command_that_verifies_its_dataset(
    converted: dict[str, Path], other: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(other["webdataset"], tmp_path / "damaged"))
    file = folder / open_dataset(folder).manifest.shards[1].file_name
    file.write_bytes(file.read_bytes()[:-512])
    for paths in ([converted["webdataset"], folder], [folder, converted["webdataset"]]):
        with build_loader(paths) as loader, pytest.raises(Exception, match="verify") as caught:
            list(loader)
        assert str(caught.value).startswith(f"{file}: ")
        assert str(caught.value).endswith(f"precache verify {folder}")


def test_whole_numbers_beside_others_are_served_as_floats(tmp_path: Path) -> None:
    """The kind of a field follows from its values, of which those of a later conversion may all be whole."""
    values = [[float(row) for row in range(SAMPLES)], [row / 8 for row in range(SAMPLES)]]
    for name, numbers in zip("ab", ([*map(int, values[0])], values[1]), strict=True):
        convert(example_source(fields={"score": numbers}), tmp_path / name, small_recipe("shards"), workers=0)
    with build_loader([tmp_path / "a", tmp_path / "b"]) as loader:
        for batch in loader:
            assert batch.fields["score"].dtype == torch.float64
            assert batch.fields["score"].tolist() == [(values[0] + values[1])[i] for i in batch.ids.tolist()]


def test_a_field_called_dataset_is_the_users(tmp_path: Path) -> None:
    values = [[f"{name}{row}" for row in range(SAMPLES)] for name in "ab"]
    for name, texts in zip("ab", values, strict=True):
        source = example_source(fields={"dataset": texts, **({"extra": texts} if name == "a" else {})})
        convert(source, tmp_path / name, small_recipe("shards"), workers=0)
    with build_loader([tmp_path / "a", tmp_path / "b"]) as loader:
        for batch in loader:
            assert batch.fields.keys() == {"dataset"}, "fields are those that all datasets have"
            assert batch.fields["dataset"] == [(values[0] + values[1])[i] for i in batch.ids.tolist()]


def test_columns_of_a_list_are_joined_when_they_are_first_used(
    converted: dict[str, Path], other: dict[str, Path]
) -> None:
    parts = [open_dataset(folders["shards"]).read_index("train") for folders in (converted, other)]
    columns = JoinedColumns(parts)
    assert list(columns) == parts[0].names
    assert columns["paths"] is columns["paths"]
    assert len(columns._joined) == 1
    for name, column in columns.items():
        expected = [part[name].row_value(row) for part in parts for row in range(len(part))]
        assert [column.row_value(row) for row in range(len(column))] == expected


def test_datasets_that_do_not_go_together_are_refused_with_the_remedy(
    raw_tree: Path,
    converted: dict[str, Path],
    shaped: dict[str, Path],
    other: dict[str, Path],
    tmp_path: Path,
) -> None:
    shards = converted["shards"]
    for target in ("none", "number"):
        convert(example_source(target, fields={}), tmp_path / target, small_recipe("shards"), workers=0)
    for name, values in (("ints", [1] * SAMPLES), ("texts", ["1"] * SAMPLES)):
        source = example_source(fields={"field": values})
        convert(source, tmp_path / name, small_recipe("shards"), workers=0)
    convert(other["raw"], tmp_path / "split", small_recipe("shards", splits=SPLITS), workers=0)
    refused: list[tuple[list[Path], dict[str, Any], str]] = [
        ([], {}, "give the paths"),
        ([shards, raw_tree], {}, f"precache convert {raw_tree} {raw_tree}-shards --format shards"),
        ([raw_tree, shards], {}, f"precache convert {raw_tree} {raw_tree}-shards --format shards"),
        (
            [converted["dali"], other["shards"]],
            {},
            f"precache convert {other['shards']} {other['shards']}-dali --format dali",
        ),
        ([shards, shaped["grey-shards"]], {}, "the same channels"),
        ([shards, tmp_path / "none"], {}, "the same kind of labels"),
        ([tmp_path / "none", tmp_path / "number"], {}, "the same kind of labels"),
        ([tmp_path / "ints", tmp_path / "texts"], {}, "field field .*int .* text"),
        ([tmp_path / "split", shards], {"split": "val"}, f"^{shards}: unknown split 'val'"),
        ([shards, other["shards"]], {"precache": tmp_path / "new"}, "precache convert"),
    ]
    for paths, settings, message in refused:
        with pytest.raises(SettingError, match=message):
            build_loader(paths, **settings)
    assert pictures_of([shards], size=STORED_SIZE).keys() == set(range(IMAGES)), "a list may have one path"
