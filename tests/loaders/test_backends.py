"""The loader contract over every backend and everything that it reads."""

import math
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import loaders
from loaders.dataset import open_split
from precache import open_dataset
from precache.errors import DatasetError, PrecacheError, SettingError
from precache.manifest import write_index
from precache.source import scan_tree
from tests import loader_contract as contract
from tests.conftest import IMAGES, STORED_SIZE

RAW_SIZE = 40
# (backend, what it reads, distance in dB from the converter's pixels; JPEG costs what it costs)
ARMS = [
    ("pytorch", "raw", math.inf),
    ("shards", "shards", math.inf),
    ("webdataset", "webdataset", 34.0),
    ("dali", "raw", 42.0),
    ("dali", "webdataset", 34.0),
    ("dali", "dali", 34.0),
    ("synthetic", "raw", None),
    ("synthetic", "webdataset", None),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Arm:
    """One backend over one folder."""

    def __init__(self, backend: str, path: Path, worst_psnr: float | None, device: str) -> None:
        self.path = path
        self.worst_psnr = worst_psnr
        self.raw = not (path / "dataset.json").exists()
        self.size = RAW_SIZE if self.raw else STORED_SIZE
        self.build: contract.Build = partial(
            loaders.build, path, backend=backend, device=device, size=self.size, workers=2, batch_size=16
        )


@pytest.fixture(params=ARMS, ids=lambda arm: f"{arm[0]}-{arm[1]}")
def arm(request: pytest.FixtureRequest, raw_tree: Path, converted: dict[str, Path], device: str) -> Arm:
    backend, kind, worst_psnr = request.param
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    return Arm(backend, raw_tree if kind == "raw" else converted[kind], worst_psnr, device)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


def test_every_sample_appears_once_per_epoch(arm: Arm, raw_tree: Path) -> None:
    expected = [(sample.id, sample.label) for sample in scan_tree(raw_tree).samples]
    contract.check_every_sample_once_per_epoch(arm.build, expected)


def test_batches_have_the_promised_shape_dtype_and_layout(arm: Arm) -> None:
    contract.check_batches(arm.build, arm.size, IMAGES)


def test_the_short_batch_is_dropped_only_when_asked(arm: Arm) -> None:
    contract.check_last_drop(arm.build, IMAGES)


def test_order_depends_on_seed_and_epoch_alone(arm: Arm) -> None:
    contract.check_order_depends_on_seed_and_epoch_alone(arm.build)


def test_without_shuffle_the_order_is_the_stored_one(arm: Arm) -> None:
    stored = open_split(arm.path, "train").ids.tolist()
    assert (stored == sorted(stored)) == arm.raw
    contract.check_without_shuffle_the_order_is_the_stored_one(arm.build, stored)


def test_pixels_are_the_converters(arm: Arm, raw_tree: Path) -> None:
    if arm.worst_psnr is None:
        pytest.skip("noise by design")
    contract.check_pixels(arm.build, raw_tree, arm.size, arm.worst_psnr)


def test_floats_are_normalised(arm: Arm) -> None:
    contract.check_floats_are_normalised(arm.build)


def test_a_state_gives_the_rest_of_the_epoch(arm: Arm) -> None:
    contract.check_resume(arm.build)


def test_abandoned_iterators_leave_nothing(arm: Arm) -> None:
    contract.check_abandoned_iterators_leave_nothing(arm.build)


def test_an_exception_in_the_loop_leaves_nothing(arm: Arm) -> None:
    contract.check_an_exception_in_the_loop_leaves_nothing(arm.build)


def served_ids(path: Path, **settings: object) -> list[int]:
    with loaders.build(path, **{"workers": 1, "batch_size": 16, **settings}) as loader:
        return contract.ids_of(loader)


def test_backends_with_the_same_shuffle_serve_the_same_order(
    raw_tree: Path, converted: dict[str, Path]
) -> None:
    full = served_ids(converted["shards"], shuffle="full")
    assert served_ids(raw_tree, shuffle="full") == full
    window = served_ids(converted["shards"], shuffle="window")
    assert served_ids(converted["webdataset"]) == window
    pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    assert served_ids(converted["dali"]) == window
    assert served_ids(converted["webdataset"], backend="dali") == window
    assert served_ids(raw_tree, backend="dali", shuffle="full") == full


def test_a_converted_folder_is_centre_cropped(converted: dict[str, Path]) -> None:
    for kind, backend in (("shards", "shards"), ("webdataset", "webdataset"), ("dali", "dali")):
        if backend == "dali":
            pytest.importorskip("nvidia.dali", reason="DALI is not installed")
        for size in (31, 32, 1):
            with (
                loaders.build(converted[kind], backend=backend, shuffle=False, workers=1) as whole,
                loaders.build(converted[kind], backend=backend, shuffle=False, size=size, workers=1) as crop,
            ):
                start = round((STORED_SIZE - size) / 2)
                part = slice(start, start + size)
                for all_of_it, part_of_it in zip(whole, crop, strict=True):
                    assert torch.equal(all_of_it.images[:, :, part, part], part_of_it.images)


def test_auto_picks_the_backend_by_the_folder(raw_tree: Path, converted: dict[str, Path]) -> None:
    for path, backend in ((raw_tree, "pytorch"), *((converted[k], k) for k in ("shards", "webdataset"))):
        with loaders.build(path, workers=0) as loader:
            assert type(loader._reader).__module__ == f"loaders.{backend}"  # type: ignore[attr-defined]


def test_the_default_size_is_224_for_a_raw_tree_and_all_that_is_stored_else(
    raw_tree: Path, converted: dict[str, Path]
) -> None:
    with loaders.build(raw_tree, workers=0) as raw, loaders.build(converted["shards"]) as shards:
        assert (raw.size, shards.size) == (224, STORED_SIZE)
        assert next(iter(raw)).images.shape[2:] == (224, 224)


def test_classes_are_the_folders(raw_tree: Path, converted: dict[str, Path]) -> None:
    for path in (raw_tree, converted["shards"]):
        with loaders.build(path, workers=0) as loader:
            assert loader.classes[0] == "001.anchor"
            assert len(loader.classes) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"backend": "dalli"},
            "unknown backend 'dalli'; choose from: auto, dali, pytorch, shards, synthetic",
        ),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": -1}, "batch_size must be an integer of at least 1, got -1"),
        ({"workers": -1}, "workers must be an integer of at least 0, got -1"),
        ({"seed": -1}, "seed must be an integer from 0 to .*, got -1"),
        ({"size": 0}, "size must be an integer from 1 to 8,192, got 0"),
        ({"size": 49}, "size 49 is more than .* stores \\(48\\)"),
        ({"last": "some"}, "unknown last 'some'; choose from: drop, partial"),
        ({"shuffle": "a bit"}, "unknown shuffle 'a bit'; choose from: full, window"),
        ({"device": "gpu"}, "unknown device 'gpu'; choose from: cpu, cuda"),
        ({"device": "mps"}, "unknown device 'mps'; choose from: cpu, cuda"),
        ({"split": "validation"}, "unknown split 'validation'; choose from: train"),
        ({"dtype": torch.int32}, "unknown dtype torch.int32; choose from: torch.uint8"),
    ],
)
def test_a_bad_setting_names_field_value_and_choices(
    converted: dict[str, Path], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        loaders.build(converted["shards"], **settings)


def test_cuda_without_a_gpu_is_an_error(converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="device 'cuda' asked for, but torch finds no GPU"):
        loaders.build(converted["shards"], device="cuda")


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("shards", "raw"), ("pytorch", "shards"), ("webdataset", "dali"), ("dali", "shards")],
)
def test_a_folder_of_the_wrong_format_is_refused(
    backend: str, kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = raw_tree if kind == "raw" else converted[kind]
    with pytest.raises(DatasetError, match=f"{path}: holds .*, backend '{backend}' reads .*; use backend"):
        loaders.build(path, backend=backend)


def test_a_folder_without_manifest_or_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrecacheError, match=r"neither a converted dataset \(no dataset.json\)"):
        loaders.build(tmp_path)
    with pytest.raises(PrecacheError, match="nowhere: does not exist"):
        loaders.build(tmp_path / "nowhere")


def test_full_shuffle_of_a_sequential_format_is_refused(converted: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match="shuffle 'full' needs random access"):
        loaders.build(converted["webdataset"], shuffle="full")


def test_a_missing_package_is_named_with_its_install_command(
    raw_tree: Path, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, path, backend, package in (
        ("nvidia.dali", raw_tree, "dali", "nvidia-dali-cuda120"),
        ("webdataset", converted["webdataset"], "webdataset", "webdataset"),
    ):
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(ImportError, match=f"pip install {package}"):
            loaders.build(path, backend=backend)


# Failures reach the caller, with the file's name.


@pytest.mark.parametrize("backend", ["pytorch", "dali"])
@pytest.mark.parametrize("damage", ["html", "truncated", "empty", "gone"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_picture_is_named(
    backend: str, damage: str, workers: int, raw_tree: Path, tmp_path: Path
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    bad = sorted(tree.glob("*/*.jpg"))[40]
    with loaders.build(tree, backend=backend, size=32, workers=workers, batch_size=16) as loader:
        if damage == "gone":
            bad.unlink()
        else:
            content = bad.read_bytes()
            bad.write_bytes(
                {"html": b"<html>", "truncated": content[: len(content) // 2], "empty": b""}[damage]
            )
        with pytest.raises(PrecacheError, match=str(bad)) as caught:
            list(loader)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("backend", "kind"), [(b, k) for b, k, _ in ARMS if k != "raw" and b != "synthetic"])
@pytest.mark.parametrize("damage", ["gone", "truncated", "swapped"])
def test_a_damaged_shard_is_named(
    backend: str, kind: str, damage: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    path = Path(shutil.copytree(converted[kind], tmp_path / "copy"))
    files = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".tar", ".tfrecord"))
    content = files[3].read_bytes()
    with loaders.build(path, backend=backend, workers=2, batch_size=16) as loader:
        if damage == "gone":
            files[3].unlink()
        elif damage == "truncated":
            files[3].write_bytes(content[: len(content) - 12_000])
        else:
            files[3].write_bytes(files[2].read_bytes())
        with pytest.raises(DatasetError, match=str(files[3])) as caught:
            list(loader)
        assert "\n" not in str(caught.value)
        assert "precache verify" in str(caught.value)


@pytest.mark.parametrize("backend", ["webdataset", "dali"])
def test_a_jpeg_with_a_damaged_header_is_named(
    backend: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    """DALI 2.4 itself crashes on this one."""
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    path = Path(shutil.copytree(converted["webdataset"], tmp_path / "copy"))
    shard = path / "train-00000.tar"
    content = bytearray(shard.read_bytes())
    content[512:812] = bytes(300)
    shard.write_bytes(content)
    with (
        loaders.build(path, backend=backend, shuffle=False, workers=2) as loader,
        pytest.raises(PrecacheError, match=f"{shard}: sample .* cannot be decoded"),
    ):
        list(loader)


@pytest.mark.parametrize("backend", ["shards", "webdataset", "dali"])
def test_labels_that_differ_from_the_index_are_refused(
    backend: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    path = Path(shutil.copytree(converted[backend], tmp_path / "copy"))
    ids, labels = open_dataset(path).read_index("train")
    write_index(path, ids, np.roll(labels, 1), open_dataset(path).read_source_sizes())
    with (
        loaders.build(path, workers=1) as loader,
        pytest.raises(DatasetError, match="holds other samples than the dataset's index says"),
    ):
        list(loader)


def test_orientation_in_xmp_is_applied_by_every_backend(tmp_path: Path) -> None:
    """Pillow reads it there, DALI does not."""
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    (tmp_path / "class").mkdir()
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><d tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    picture = Image.new("RGB", (60, 40), "black")
    picture.paste("white", (0, 0, 20, 40))
    picture.save(tmp_path / "class/a.jpg", quality=95, xmp=xmp)
    served = []
    for backend in ("pytorch", "dali"):
        with loaders.build(tmp_path, backend=backend, size=32, workers=0) as loader:
            served.append(next(iter(loader)).images.int())
    assert served[0][0, :, 0].min() > 200, "turned: the white left side is on top"
    assert (served[0] - served[1]).abs().max() < 16


@pytest.mark.parametrize(
    "state", [{}, {"epoch": "x"}, {"epoch": 0, "served_batches": -3}, {"epoch": 0, "served_batches": 99}]
)
def test_a_malformed_state_is_refused(converted: dict[str, Path], state: dict[str, object]) -> None:
    with loaders.build(converted["shards"]) as loader:
        whole = {k: v for k, v in loader.state_dict().items() if k not in ("epoch", "served_batches")}
        with pytest.raises(SettingError, match="this state has"):
            loader.load_state_dict({**whole, **state})


def test_set_epoch_in_the_middle_of_an_epoch_holds_for_the_next(converted: dict[str, Path]) -> None:
    with loaders.build(converted["shards"], batch_size=16) as loader:
        for _ in loader:
            loader.set_epoch(5)
        assert loader.state_dict()["epoch"] == 5


def test_a_killed_worker_is_an_error_not_a_hang(raw_tree: Path) -> None:
    import os
    import signal

    import psutil

    before = psutil.Process().children()
    with loaders.build(raw_tree, size=32, workers=1, batch_size=1) as loader:
        iterator = iter(loader)
        next(iterator)
        (worker,) = (c for c in psutil.Process().children() if c not in before)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(PrecacheError, match="fewer workers"):
            list(iterator)


def test_a_closed_loader_says_so(converted: dict[str, Path]) -> None:
    loader = loaders.build(converted["shards"])
    loader.close()
    loader.close()
    with pytest.raises(SettingError, match="is closed; build another one"):
        iter(loader)


@pytest.mark.parametrize("change", ["seed", "batch_size", "path"])
def test_a_state_of_other_data_or_settings_is_refused(converted: dict[str, Path], change: str) -> None:
    with loaders.build(converted["shards"], batch_size=16) as loader:
        state = loader.state_dict()
    other = {"batch_size": 16, "seed": 0, "path": converted["shards"]}
    other[change] = converted["dali"] if change == "path" else 7
    backend = "synthetic"  # random access over any folder
    with (
        loaders.build(backend=backend, **other) as loader,
        pytest.raises(SettingError, match="this state was taken with"),
    ):
        loader.load_state_dict(state)


def test_another_epoch_starts_at_its_beginning(converted: dict[str, Path]) -> None:
    with loaders.build(converted["shards"], batch_size=16) as loader:
        next(iter(loader))
        assert (loader.state_dict()["epoch"], loader.state_dict()["served_batches"]) == (0, 1)
        loader.set_epoch(3)
        assert (loader.state_dict()["epoch"], loader.state_dict()["served_batches"]) == (3, 0)
        assert len(contract.ids_of(loader)) == IMAGES
        assert loader.state_dict()["epoch"] == 4


def test_a_split_smaller_than_a_dropped_batch_is_an_empty_epoch(converted: dict[str, Path]) -> None:
    with loaders.build(converted["shards"], batch_size=IMAGES + 1, last="drop") as loader:
        assert len(loader) == 0
        assert list(loader) == []


def test_iterating_again_ends_the_iterator_before(converted: dict[str, Path]) -> None:
    with loaders.build(converted["shards"], batch_size=16) as loader:
        first = iter(loader)
        ids = next(first).ids.tolist()
        second = list(loader)
        assert second[0].ids.tolist() == ids
        assert list(first) == []


def test_served_pixels_are_the_callers_to_keep(converted: dict[str, Path]) -> None:
    """No backend hands out a buffer that it writes to again."""
    for kind in ("shards", "webdataset", "dali"):
        if kind == "dali":
            pytest.importorskip("nvidia.dali", reason="DALI is not installed")
        with loaders.build(converted[kind], batch_size=8, shuffle=False, workers=2) as loader:
            kept = list(loader)
            copies = [batch.images.clone() for batch in loader]
        assert all(torch.equal(k.images, c) for k, c in zip(kept, copies, strict=True))
        assert not np.shares_memory(kept[0].images.numpy(), kept[-1].images.numpy())
