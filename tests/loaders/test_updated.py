"""Updated datasets: every backend serves the added samples and not the removed ones."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import loaders
from precache import convert, open_dataset
from precache.errors import SettingError
from precache.formats import FORMATS
from tests.building import build_loader
from tests.conftest import IMAGES, small_recipe
from tests.loader_contract import check_ranks_share_each_epoch, check_resume, ids_of, pairs_of
from tests.loaders.cases import CONVERTED_CASES

Updated = tuple[Path, dict[int, int], set[int]]


@pytest.fixture(scope="module")
def updated(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Updated]:
    """Updated datasets by format: folder, labels by id of the samples left, and removed ids.

    The update removes the first shard's pictures and some others, and adds a copy of a class.
    """
    root = tmp_path_factory.mktemp("updated")
    datasets = {}
    for name in FORMATS:
        tree, out = root / f"tree-{name}", root / name
        shutil.copytree(raw_tree, tree)
        before = convert(tree, out, small_recipe(name), workers=0).manifest
        index = open_dataset(out).read_index()
        rows = [*range(before.shards[0].samples), *range(before.shards[0].samples + 3, IMAGES, 9)]
        for row in rows:
            (tree / str(index.path(row))).unlink()
        last = sorted(path for path in tree.iterdir() if path.is_dir())[-1]
        shutil.copytree(last, tree / "000.new")
        convert(tree, out, small_recipe(name), workers=0, update=True)
        now = open_dataset(out).read_index()
        labels = dict(zip(now.ids.tolist(), now.labels.tolist(), strict=True))
        removed = set(index.ids[rows].tolist())
        assert not removed & labels.keys()
        assert max(labels) >= IMAGES
        datasets[name] = out, labels, removed
    return datasets


@pytest.mark.parametrize(("backend", "name"), CONVERTED_CASES)
def test_removed_samples_are_not_served_and_added_ones_are(
    updated: dict[str, Updated], backend: str, name: str
) -> None:
    out, all_labels, removed = updated[name]
    expected, labels = sorted(all_labels.items()), sorted(all_labels.values())

    def build(**settings: Any) -> Any:
        return build_loader(out, **{"backend": backend, "batch_size": 8, "workers": 1, **settings})

    for settings in ({}, {"shuffle": "window"}, {"shuffle": False}):
        with build(**settings) as loader:
            assert (loader.samples, len(loader.dataset)) == (len(labels), len(labels))
            assert loader.classes[-1] == "000.new"
            for _ in range(2):
                assert sorted(pairs_of(loader)) == expected
            assert sorted(loader.dataset.targets) == labels
            assert "000.new/" in loader.path_of(max(all_labels))
            with pytest.raises(SettingError, match=f"sample {min(removed)}"):
                loader.path_of(min(removed))
    check_ranks_share_each_epoch(build, sorted(all_labels))
    check_resume(build)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_image_dataset_leaves_out_removed_samples(updated: dict[str, Updated], name: str) -> None:
    out, labels, _ = updated[name]
    dataset = pickle.loads(pickle.dumps(loaders.ImageDataset(out, decode="tensor")))
    assert {int(i): dataset[row][1] for row, i in enumerate(dataset.ids)} == labels
    assert len(dataset) == len(labels)


def test_a_state_from_before_an_update_is_refused(raw_tree: Path, tmp_path: Path) -> None:
    tree, out = Path(shutil.copytree(raw_tree, tmp_path / "tree")), tmp_path / "out"
    convert(tree, out, small_recipe("shards"), workers=0)
    with build_loader(out, workers=1) as loader:
        state = loader.state_dict()
        next(tree.rglob("*.jpg")).unlink()
        convert(tree, out, small_recipe("shards"), workers=0, update=True)
        assert sorted(ids_of(loader)) == list(range(IMAGES)), "the loader still reads the old dataset"
    with build_loader(out, workers=1) as loader, pytest.raises(SettingError, match=r"\bdataset\b"):
        loader.load_state_dict(state)
