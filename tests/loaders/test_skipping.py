"""Pictures that cannot be decoded raise, or are left out, in every backend alike."""

import shutil
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import loaders
import precache
from precache.errors import DatasetError, ImageError, SettingError
from precache.pictures import images
from precache.sources.rejected_list import default_list_path
from precache.sources.tree import scan_tree
from tests import loader_contract as contract
from tests.building import build_loader
from tests.conftest import IMAGES
from tests.damage import DAMAGE, damage_shards, damage_tree

SIZE = 32
# (backend, what it reads); backends `shards` and `synthetic` decode nothing
CASES = [
    ("pytorch", "raw"),
    ("dali", "raw"),
    ("webdataset", "webdataset"),
    ("dali", "webdataset"),
    ("dali", "dali"),
]
TREE_AND_SHARDS = [CASES[0], CASES[3]]


def skip_unless_installed(backend: str) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")


@pytest.fixture(scope="module")
def damaged(
    raw_tree: Path, converted: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Path], list[int]]:
    """Copies of the folders that hold encoded pictures, with each kind of damage, and the damaged ids."""
    root = tmp_path_factory.mktemp("damaged")
    ids = damage_tree(raw_tree, root / "raw")
    for kind in ("webdataset", "dali"):
        damage_shards(converted[kind], root / kind, ids)
    return {kind: root / kind for kind in ("raw", "webdataset", "dali")}, ids


@pytest.fixture(params=CASES, ids="-".join)
def build(request: pytest.FixtureRequest, damaged: tuple[dict[str, Path], list[int]]) -> contract.Build:
    """Function that builds loaders over a damaged folder; without checksums, which would fail first."""
    backend, kind = request.param
    skip_unless_installed(backend)
    settings: dict[str, Any] = {"size": SIZE, "workers": 2, "batch_size": 16, "check": "never"}
    return partial(build_loader, damaged[0][kind], backend=backend, on_error="skip", **settings)


@pytest.fixture
def good(damaged: tuple[dict[str, Path], list[int]]) -> list[int]:
    return [i for i in range(IMAGES) if i not in damaged[1]]


@pytest.fixture(params=["pytorch", "dali"])
def listed(
    request: pytest.FixtureRequest, raw_tree: Path, tmp_path: Path
) -> tuple[contract.Build, Path, list[int]]:
    """Function that builds loaders over a damaged raw tree with its list, the tree, and the damaged ids."""
    skip_unless_installed(request.param)
    tree = tmp_path / "tree"
    ids = damage_tree(raw_tree, tree)
    precache.check(tree, workers=0)
    settings: dict[str, Any] = {"size": SIZE, "workers": 1, "batch_size": 16, "on_error": "skip"}
    return partial(build_loader, tree, backend=request.param, **settings), tree, ids


def test_an_error_keeps_the_remedy_of_its_picture(raw_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that lists all such pictures is added to it."""

    def fail(data: bytes, path: str) -> None:
        raise ImageError(path, "needs too much memory", remedy="free some memory")

    monkeypatch.setattr(images, "decode_pixels", fail)
    dataset = loaders.ImageDataset(raw_tree, decode="tensor")
    with build_loader(raw_tree, backend="pytorch", size=SIZE, workers=0) as loader:
        for read in (lambda: next(iter(loader)), lambda: dataset[0]):
            with pytest.raises(ImageError) as caught:
                read()
            assert caught.value.remedy.startswith("free some memory; ")
            assert f"precache check {raw_tree}" in caught.value.remedy
            assert str(caught.value).endswith(f"needs too much memory; {caught.value.remedy}")


def test_every_backend_skips_the_same_pictures_and_names_each_once(
    build: contract.Build,
    damaged: tuple[dict[str, Path], list[int]],
    good: list[int],
    raw_tree: Path,
    converted: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each batch has the samples that it has without damage, except for the bad ones."""
    folders, bad = damaged
    path = build.args[0]  # type: ignore[attr-defined]
    undamaged = raw_tree if path.name == "raw" else converted[path.name]
    with build() as loader, build.func(undamaged, **build.keywords) as whole:  # type: ignore[attr-defined]
        for _ in range(2):
            served = []
            for batch, expected in zip(loader, whole, strict=True):
                is_good = ~torch.isin(expected.ids, torch.tensor(bad))
                assert torch.equal(expected.ids[is_good], batch.ids)
                assert torch.equal(expected.labels[is_good], batch.labels)
                assert torch.equal(expected.images[is_good], batch.images)
                assert batch.images.is_contiguous(memory_format=torch.channels_last)
                served += batch.ids.tolist()
            assert sorted(served) == good
    warnings = [record.getMessage() for record in caplog.records if record.name == "loaders.loader"]
    assert len(warnings) == len(set(warnings)) == len(DAMAGE)
    with build(on_error="raise") as loader, pytest.raises(ImageError) as caught:
        list(loader)
    remedies = ('on_error="skip"', f"precache check {path}")
    assert [remedy in str(caught.value) for remedy in remedies] == [path.name == "raw"] * 2
    samples = scan_tree(folders["raw"]).samples
    for sample_id in bad:
        names = (f"{folders['raw']}/{samples[sample_id].path}: ", f": sample {sample_id}: ")
        assert sum(any(name in line for name in names) for line in warnings) == 1


@pytest.mark.parametrize("decode", ["pil", "tensor"])
def test_image_dataset_names_the_command_that_lists_bad_pictures(
    decode: str, damaged: tuple[dict[str, Path], list[int]]
) -> None:
    """The remedy does not name `on_error="skip"`, since an ImageDataset leaves no sample out."""
    folders, bad = damaged
    dataset = loaders.ImageDataset(folders["raw"], decode=decode)
    for position in bad:
        with pytest.raises(ImageError) as caught:
            dataset[position]
        assert caught.value.path == dataset.samples[position][0]
        assert f"precache check {folders['raw']}" in caught.value.remedy
        assert "on_error" not in caught.value.remedy


@pytest.mark.parametrize("build", TREE_AND_SHARDS, indirect=True)
def test_batches_without_their_bad_pictures_are_not_shared(build: contract.Build) -> None:
    contract.check_a_fork_shares_no_batch(build)


def test_states_and_ranks_work_with_skipped_pictures(build: contract.Build, good: list[int]) -> None:
    contract.check_resume(build)
    contract.check_ranks_share_what_can_be_decoded(build, good)


@pytest.mark.parametrize("build", TREE_AND_SHARDS, indirect=True)
def test_a_batch_without_any_good_picture_raises(
    build: contract.Build, damaged: tuple[dict[str, Path], list[int]]
) -> None:
    """Batches are one picture each, in stored order; those before the first bad one are served."""
    _, bad = damaged
    served: list[int] = []
    with build(backend="synthetic", batch_size=1, shuffle=False) as whole:
        stored = contract.ids_of(whole)
    with build(batch_size=1, shuffle=False) as loader:
        batches = (batch.ids.tolist() for batch in loader)
        with pytest.raises(ImageError) as caught:
            served.extend(chain.from_iterable(batches))
    path = build.args[0]  # type: ignore[attr-defined]
    assert (f"precache check {path}" in str(caught.value)) == (path.name == "raw")
    assert served == stored[: min(stored.index(sample_id) for sample_id in bad)]


def test_listed_pictures_are_left_out_before_ordering(
    listed: tuple[contract.Build, Path, list[int]],
    good: list[int],
    raw_tree: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    build, tree, bad = listed
    with build(backend="synthetic") as reference, build() as loader:
        assert (loader.samples, len(loader)) == (len(good), -(-len(good) // 16))
        for _ in range(2):
            batches = [batch.ids.tolist() for batch in loader]
            assert [len(batch) for batch in batches] == [16, 16, 16, 9, 9]
            assert sorted(i for batch in batches for i in batch) == good
            assert batches == [batch.ids.tolist() for batch in reference]
    assert [record.name for record in caplog.records] == ["loaders.dataset"] * 2
    assert f"{len(DAMAGE)} of {IMAGES}" in caplog.text
    assert str(default_list_path(tree)) in caplog.text
    with build(on_error="raise") as whole:
        assert whole.samples == IMAGES
    path = scan_tree(tree).samples[bad[0]].path
    (tree / path).write_bytes((raw_tree / path).read_bytes())  # an entry is ignored once its file is repaired
    with build() as loader:
        assert sorted(contract.ids_of(loader)) == [i for i in range(IMAGES) if i not in bad[1:]]
        with pytest.raises(SettingError, match="dataset"):
            loader.load_state_dict(reference.state_dict())


@pytest.mark.parametrize(("backend", "kind"), [("shards", "shards"), *CASES[2:]])
def test_a_damaged_shard_is_never_skipped(
    backend: str, kind: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    skip_unless_installed(backend)
    path = Path(shutil.copytree(converted[kind], tmp_path / "copy"))
    shard = path / precache.open_dataset(path).manifest.shards[2].file_name
    shard.write_bytes(shard.read_bytes()[:-9000])
    with (
        build_loader(path, backend=backend, workers=1, on_error="skip") as loader,
        pytest.raises(DatasetError, match=str(shard)),
    ):
        list(loader)
