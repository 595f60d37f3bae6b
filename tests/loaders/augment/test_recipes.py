"""Recipes and functions of the caller through `loaders.build`: the same pictures in every way of reading."""

import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import loaders
from loaders.augment.applying import apply_to_pictures
from loaders.augment.crops import Crops, make_views
from loaders.augment.mixing import draw_mixing, mix_images
from loaders.augment.policies import AUGMENTATIONS
from loaders.read import processes
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache.errors import ImageError, SettingError, TransformError
from tests import loader_contract as contract
from tests.building import build_loader
from tests.command import ROOT
from tests.conftest import IMAGES, OTHER_IMAGES, STORED_SIZE
from tests.damage import DAMAGE, damage_tree

SIZE, SMALL_SIZE = 24, 16
RECIPES = [name for name, settings in AUGMENTATIONS.items() if settings and settings.has_operations]
PROCESSES: dict[str, Any] = {"engine": "processes", "workers": 2}
Pictures = dict[int, tuple[torch.Tensor, ...]]


def small_recipe(name: str) -> loaders.RandomAugmentation:
    """Return a recipe without mixing, with small views where it has sizes of its own."""
    settings = AUGMENTATIONS[name]  # type: ignore[index]
    assert settings is not None
    if not isinstance(settings.views, int):
        views = tuple(replace(view, size=view.size and SMALL_SIZE) for view in settings.views)
        settings = replace(settings, views=views)
    return replace(settings, mixup=0, cutmix=0)


def by_id(batches: Iterable[loaders.Batch]) -> Pictures:
    """Views of each sample, by its id; a sample that is served twice has the same views both times."""
    served: Pictures = {}
    for batch in batches:
        for slot, sample_id in enumerate(batch.ids.tolist()):
            views = tuple(view[slot] for view in batch.views)
            assert sample_id not in served or are_equal(served[sample_id], views)
            served[sample_id] = views
    return served


def are_equal(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def serve(path: Path, epoch: int = 1, **settings: Any) -> Pictures:
    settings = {"size": SIZE, "engine": "local", "workers": 1, "batch_size": 16, **settings}
    with build_loader(path, **settings) as loader:
        loader.set_epoch(epoch)
        return by_id(loader)


def serve_the_rest(path: Path, batches: int, **settings: Any) -> Pictures:
    """Serve what follows the first batches of epoch 1, by a loader that goes on from their state."""
    with build_loader(path, **settings) as loader:
        loader.set_epoch(1)
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    with build_loader(path, **settings) as loader:
        loader.load_state_dict(state)
        return by_id(loader)


def check_all_ways_serve_the_same(path: Path, serial_workers: int = 1, **settings: Any) -> Pictures:
    """Check that engines, workers, batches, ranks and resuming change no picture, and return epoch 1."""
    settings = {"size": SIZE, **settings}
    due = serve(path, workers=serial_workers, **settings)
    images = len(due)
    ways = [
        serve(path, workers=2, batch_size=7, shuffle=False, **settings),
        serve(path, batch_size=9, **PROCESSES, **settings),
        *(serve(path, world_size=3, rank=rank, last="pad", batch_size=5, **settings) for rank in range(3)),
        serve_the_rest(path, 1, batch_size=9, **PROCESSES, **settings),
        serve_the_rest(path, 1, batch_size=16, engine="local", workers=2, **settings),
    ]
    for served in ways:
        wrong = [number for number, views in served.items() if not are_equal(views, due[number])]
        assert wrong == []
    assert [len(served) for served in ways[:2]] == [images, images]
    assert {number for served in ways[2:5] for number in served} == {*due}
    assert 0 < len(ways[5]) < images
    for other in (serve(path, epoch=2, **settings), serve(path, seed=1, **settings)):
        alike = [number for number, views in other.items() if are_equal(views, due[number])]
        assert len(alike) <= images // 4, "another epoch or seed draws anew"
    return due


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_draws_by_seed_epoch_and_id_alone(name: str, converted: dict[str, Path]) -> None:
    check_all_ways_serve_the_same(converted["shards"], augment=small_recipe(name))


@pytest.mark.parametrize("kind", ["raw", "keep-webdataset"])
def test_pictures_of_any_size_draw_by_seed_epoch_and_id_alone(
    kind: str, other: dict[str, Path], shaped: dict[str, Path]
) -> None:
    due = check_all_ways_serve_the_same(
        {**other, **shaped}[kind], serial_workers=int(kind != "raw"), augment=small_recipe("dino")
    )
    assert len(due) == (OTHER_IMAGES if kind == "raw" else IMAGES)


@pytest.mark.parametrize("kind", ["raw", "dali"])
def test_dali_draws_by_seed_epoch_and_id_alone(
    kind: str, other: dict[str, Path], converted: dict[str, Path]
) -> None:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    path = {**converted, "raw": other["raw"]}[kind]
    settings: dict[str, Any] = {"augment": small_recipe("dino"), "backend": "dali"}
    due = serve(path, **settings)
    for served in (
        serve(path, batch_size=7, shuffle=False, workers=2, **settings),
        serve(path, rank=1, world_size=3, **settings),
        serve_the_rest(path, 1, size=SIZE, batch_size=16, **settings),
    ):
        assert served
        assert all(are_equal(views, due[number]) for number, views in served.items())


def without_operations(settings: loaders.RandomAugmentation) -> loaders.RandomAugmentation:
    """Return settings with the same crops and flips, and nothing else."""
    views = [
        loaders.RandomAugmentation(scale=view.scale, ratio=view.ratio, flip=view.flip, size=view.size)
        for view in settings.view_settings
    ]
    return loaders.RandomAugmentation(views=views)


@pytest.mark.filterwarnings("ignore:the pictures of:UserWarning")
@pytest.mark.parametrize("case", ["shards", "webdataset", "dali", "grey-shards", "grey-dali"])
@pytest.mark.parametrize("name", ["torchvision", "timm-a1", "deit3", "simclr", "dino"])
def test_operations_are_those_that_were_drawn(
    name: str, case: str, converted: dict[str, Path], shaped: dict[str, Path]
) -> None:
    """They are applied to what the backend serves without them, whatever its pixels are."""
    if case.endswith("dali"):
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    path, settings = {**converted, **shaped}[case], small_recipe(name)
    some: dict[str, Any] = {"shuffle": False, "batch_size": 24, "subset": np.arange(24)}
    cropped = serve(path, augment=without_operations(settings), **some)
    served = serve(path, augment=settings, **some)
    ids = np.array([*served])
    views = make_views(settings, SIZE)
    all_draws = Crops(STORED_SIZE, views, seed=0).draw(1, ids)
    changed = 0
    for number, draws in enumerate(all_draws):
        before = torch.stack([cropped[i][number] for i in ids.tolist()])
        after = torch.stack([served[i][number] for i in ids.tolist()])
        due = apply_to_pictures(before.permute(0, 2, 3, 1).contiguous(), draws.operations)
        assert torch.equal(after.permute(0, 2, 3, 1), due)
        changed += int((before != after).flatten(1).any(1).sum())
    assert changed > len(ids) * len(views) / 4


MIXED = replace(small_recipe("torchvision"), mixup=0.2, cutmix=1.0)


def check_mixed(mixed: loaders.Loader, unmixed: loaders.Loader) -> int:
    """Check that an epoch is that of `unmixed`, mixed by the documented rule; return how many are mixed."""
    classes, partnered = len(mixed.classes), 0
    for batch, plain in zip(mixed, unmixed, strict=True):
        assert torch.equal(batch.ids, plain.ids)
        assert torch.equal(batch.padding, plain.padding)
        weights = torch.nn.functional.one_hot(plain.labels, classes).float()
        due = plain.images.permute(0, 2, 3, 1)
        shape = (due.shape[1], due.shape[2])
        mixing = draw_mixing(0.2, 1.0, 0, 0, batch.ids.numpy(), shape)
        if mixing is None:
            assert len(batch.ids) == 1
            assert batch.partners is None
        else:
            assert torch.equal(batch.partners, torch.arange(len(batch.ids)).roll(1))
            due = mix_images(due.contiguous(), mixing)
            weights = mixing.lam * weights + (1 - mixing.lam) * weights[batch.partners]
            partnered += len(batch.ids)
        assert torch.equal(batch.images.permute(0, 2, 3, 1), due)
        assert batch.labels.dtype == torch.float32
        torch.testing.assert_close(batch.labels, weights)
        torch.testing.assert_close(batch.labels.sum(1), torch.ones(len(batch.ids)))
    return partnered


@pytest.mark.parametrize(
    ("settings", "mixed_pictures"),
    [
        ({"engine": "local", "workers": 2}, IMAGES),
        (PROCESSES, IMAGES),
        ({"rank": 2, "world_size": 3, "last": "pad", "workers": 1}, 32),
        ({"subset": [3, 40, 41], "batch_size": 2, "last": "partial", "workers": 1}, 2),
        ({"batch_size": 1, "workers": 1}, 0),
    ],
    ids=["local", "processes", "pad", "rest of one", "batches of one"],
)
def test_a_mixed_batch_is_the_unmixed_one_mixed(
    settings: dict[str, Any], mixed_pictures: int, converted: dict[str, Path]
) -> None:
    settings = {"batch_size": 16, "size": SIZE, **settings}
    unmixed = replace(MIXED, mixup=0, cutmix=0)
    with (
        build_loader(converted["shards"], augment=MIXED, **settings) as mixed,
        build_loader(converted["shards"], augment=unmixed, **settings) as plain,
    ):
        assert check_mixed(mixed, plain) == mixed_pictures


def test_labels_are_mixed_as_the_first_view(converted: dict[str, Path]) -> None:
    """In a small view the box of CutMix has another share of the pixels."""
    large, small = (loaders.RandomAugmentation(size=size) for size in (40, 5))
    settings: dict[str, Any] = {"batch_size": 16, "workers": 1}
    mixed, single = (
        build_loader(
            converted["shards"], augment=loaders.RandomAugmentation(views=views, cutmix=1.0), **settings
        )
        for views in ([large, small], [large])
    )
    with mixed, single:
        for batch, due in zip(mixed, single, strict=True):
            assert torch.equal(batch.views[0], due.images)
            assert torch.equal(batch.labels, due.labels)


def test_mixing_needs_classes(raw_tree: Path) -> None:
    with pytest.raises(SettingError, match=r"mixup 0\.2 and cutmix 1") as caught:
        build_loader(raw_tree, class_depth=0, augment="torchvision")
    assert "mixup=0, cutmix=0" in caught.value.remedy


def test_damaged_pictures_are_left_out_of_all_views_and_mixings(raw_tree: Path, tmp_path: Path) -> None:
    bad = damage_tree(raw_tree, tmp_path / "tree")
    damaged: dict[str, Any] = {"on_error": "skip", "size": SIZE, "batch_size": 16, "backend": "pytorch"}
    due = serve(raw_tree, augment=small_recipe("dino"), backend="pytorch")
    for workers in (0, 2):
        served = serve(tmp_path / "tree", augment=small_recipe("dino"), **{**damaged, "workers": workers})
        assert sorted(served) == [number for number in range(IMAGES) if number not in bad]
        assert all(are_equal(views, due[number]) for number, views in served.items())
        served = serve(tmp_path / "tree", augment=loaders.per_picture(small_transform()), **damaged)
        assert len(served) == IMAGES - len(DAMAGE)
    unmixed = replace(MIXED, mixup=0, cutmix=0)
    with (
        build_loader(tmp_path / "tree", augment=MIXED, workers=0, **damaged) as mixed,
        build_loader(tmp_path / "tree", augment=unmixed, workers=0, **damaged) as plain,
    ):
        assert check_mixed(mixed, plain) == IMAGES - len(DAMAGE)


@pytest.mark.parametrize(
    "backend", ["pytorch", "shards", "processes-shards", "webdataset", "dali", "synthetic"]
)
def test_views_of_other_sizes_stay_as_they_were_served(
    backend: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    engine, _, backend = backend.rpartition("-")
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    path = raw_tree if backend == "pytorch" else converted["shards" if backend == "synthetic" else backend]
    settings: dict[str, Any] = {"augment": small_recipe("dino"), "batch_size": 8, "workers": 1, "size": SIZE}
    settings |= {"backend": backend, "engine": engine or "local"}
    shapes = [(SIZE, SIZE)] * 2 + [(SMALL_SIZE, SMALL_SIZE)] * 8
    with (
        build_loader(path, dtype="float32", **settings) as floats,
        build_loader(path, **settings) as integers,
    ):
        assert floats.size == SIZE
        batches, copies = [], []
        for batch in floats:
            batches.append(batch)
            copies.append([view.clone() for view in batch.views])
        for batch, views, integer_batch in zip(batches, copies, integers, strict=True):
            assert [tuple(view.shape[2:]) for view in batch.views] == shapes
            assert are_equal(batch.views, views), "later batches have other memory"
            contract.check_normalised(integer_batch, batch, torch.float32, 1e-5)
        integers.set_size(20)
        assert integers.size == 20
        assert [view.shape[2] for view in next(iter(integers)).views] == [20] * 2 + [SMALL_SIZE] * 8


def test_a_view_without_a_size_has_that_of_the_loader(converted: dict[str, Path]) -> None:
    small, plain = loaders.RandomAugmentation(size=SMALL_SIZE), loaders.RandomAugmentation()
    augment = loaders.RandomAugmentation(views=[small, plain])
    with build_loader(converted["shards"], size=SIZE, augment=augment, workers=1) as loader:
        assert loader.size == SMALL_SIZE, "that of the first view"
        assert [view.shape[2] for view in next(iter(loader)).views] == [SMALL_SIZE, SIZE]
        loader.set_size(20)
        assert [view.shape[2] for view in next(iter(loader)).views] == [SMALL_SIZE, 20]


def test_a_size_that_no_view_takes_is_refused(converted: dict[str, Path]) -> None:
    augment = loaders.RandomAugmentation(size=SMALL_SIZE, views=2)
    with pytest.raises(SettingError, match="size 24 is for views without a size"):
        build_loader(converted["shards"], size=SIZE, augment=augment)
    with build_loader(converted["shards"], augment=augment, workers=1) as loader:
        due = by_id(loader)
        with pytest.raises(SettingError, match="size 24"):
            loader.set_size(SIZE)
        loader.set_epoch(0)
        served = by_id(loader)
    assert all(are_equal(views, due[number]) for number, views in served.items()), "nothing has changed"


@pytest.mark.parametrize("name", RECIPES)
def test_grey_pictures_are_warned_about_by_name(name: str, shaped: dict[str, Path]) -> None:
    settings = small_recipe(name)
    names = {
        "simclr": "saturation, hue, grey",
        "dino": "saturation, hue, grey",
        "deit3": "grey of policy 'three', saturation",
        "torchvision": "saturation of policy 'trivial'",
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        served = serve(shaped["grey-shards"], augment=settings)
    lines = [str(warning.message) for warning in caught]
    (line,) = lines
    due = names.get(name, f"saturation of policy '{settings.policy}'")
    assert f"are grey: {due} of augment do nothing to them" in line
    assert all(view.shape[0] == 1 for views in served.values() for view in views)


def small_transform() -> Any:
    return v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def float_transform(image: Image.Image) -> torch.Tensor:
    """Return floats of another shape, with noise."""
    small = torch.from_numpy(np.array(image.convert("L").resize((10, 12)), np.float32))
    return small[None] + torch.rand(1, 12, 10)


@pytest.mark.parametrize("kind", ["raw", "shards", "keep-webdataset"])
@pytest.mark.parametrize("transform", [small_transform(), float_transform], ids=["v2", "function"])
def test_a_transform_draws_by_seed_epoch_and_id_alone(
    transform: Any, kind: str, other: dict[str, Path], converted: dict[str, Path], shaped: dict[str, Path]
) -> None:
    path = {**converted, **shaped, "raw": other["raw"]}[kind]
    augment = loaders.per_picture(transform)
    is_float = transform is float_transform
    settings = {"size": (12, 10), "dtype": "float32"} if is_float else {}
    due = check_all_ways_serve_the_same(path, int(kind != "raw"), augment=augment, **settings)
    assert {(*views[0].shape, views[0].dtype) for views in due.values()} == (
        {(1, 12, 10, torch.float32)} if is_float else {(3, SIZE, SIZE, torch.uint8)}
    )
    with build_loader(path, augment=augment, dtype="float32", workers=1, batch_size=16) as loader:
        assert loader.size == ((12, 10) if is_float else SIZE)
        loader.set_epoch(1)
        batch = next(iter(loader))
    images = torch.stack([due[i][0] for i in batch.ids.tolist()])
    assert batch.images.dtype == torch.float32
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    if is_float:
        assert torch.equal(batch.images, images), "floats are not normalised"
    else:
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
        assert torch.allclose(batch.images, (images / 255 - mean) / std, atol=1e-5)


def draw_by_other_libraries(image: Image.Image) -> torch.Tensor:
    dropped = torch.dropout(torch.ones(64), 0.5, train=True).mean()  # it can be given no generator
    return torch.full((3, 2, 2), random.random() + np.random.rand() + float(dropped), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["raw", "shards"])
def test_in_processes_all_random_numbers_are_seeded(
    kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = {**converted, "raw": raw_tree}[kind]
    settings = {"augment": loaders.per_picture(draw_by_other_libraries), "dtype": "float16", "size": 2}
    state = random.getstate(), repr(np.random.get_state())
    due = serve(path, **settings, **PROCESSES)
    assert {views[0].dtype for views in due.values()} == {torch.float16}
    assert len({float(views[0].max()) for views in due.values()}) > IMAGES / 2
    for served in (
        serve(path, **settings, engine="processes", batch_size=7, shuffle=False),
        serve_the_rest(path, 1, **settings, **PROCESSES, batch_size=9),
    ):
        assert served
        assert all(are_equal(views, due[number]) for number, views in served.items())
    assert (random.getstate(), repr(np.random.get_state())) == state


@pytest.mark.parametrize("backend", ["dali", "synthetic"])
def test_a_transform_needs_a_backend_that_decodes_here(backend: str, converted: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match=backend) as caught:
        build_loader(converted["dali"], backend=backend, augment=loaders.per_picture(float_transform))
    assert "shards" in caught.value.remedy


class Failing:
    """Transform that fails at one of ten pictures."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, image: Image.Image) -> Image.Image:
        if torch.rand(1) < 0.1:
            raise self.error
        return image.resize((8, 8))


@pytest.mark.parametrize(
    "error", [KeyError("mine"), ImageError("other.jpg", "is bad"), StopIteration()], ids=repr
)
@pytest.mark.parametrize("way", ["local-shards", "processes-shards", "processes-raw"])
def test_an_exception_of_a_transform_names_picture_and_epoch(
    way: str, error: Exception, raw_tree: Path, converted: dict[str, Path]
) -> None:
    """It is no fault of the picture, which `on_error="skip"` would leave out."""
    engine, _, kind = way.partition("-")
    settings = {"engine": engine, "workers": 1, "on_error": "skip", "batch_size": 16}
    path = raw_tree if kind == "raw" else converted["shards"]
    augment = loaders.per_picture(Failing(error))
    with build_loader(path, augment=augment, **settings) as loader:
        loader.set_epoch(3)
        with pytest.raises(TransformError) as caught:
            list(loader)
    line = str(caught.value)
    assert "\n" not in line
    assert "epoch 3" in line
    assert "Failing" in line
    assert type(error).__name__ in line
    assert Path(caught.value.path).is_file() if kind == "raw" else ": sample " in caught.value.path
    assert (
        caught.value.__cause__ is error
        if engine == "local"
        else type(error).__name__ in str(caught.value.__cause__)
    )
    assert not isinstance(caught.value, ImageError)


def grow(image: Image.Image) -> torch.Tensor:
    return torch.zeros(3, 8, 8 + int(torch.randint(2, ())))


@pytest.mark.parametrize("engine", ["local", "processes"])
@pytest.mark.parametrize(
    ("transform", "match"),
    [
        (lambda image: torch.zeros(3, 4, 8), "size is 8, and .*lambda.* pictures of 4x8"),
        (grow, r"one shape and dtype, got .*\[3, 8, 8\] and .*\[3, 8, 9\]"),
        (lambda image: image.convert("L").resize((8, 8)), "3 channels .* returned 1"),
        (lambda image: torch.zeros(3, 8, 8, dtype=torch.bfloat16), "got bfloat16"),
    ],
    ids=["size", "shapes", "channels", "dtype"],
)
def test_what_a_transform_must_not_return_is_refused(
    transform: Any, match: str, engine: str, converted: dict[str, Path]
) -> None:
    augment = loaders.per_picture(transform)
    settings: dict[str, Any] = {"dtype": "float32", "workers": 1, "engine": engine, "size": 8}
    with (
        build_loader(converted["shards"], augment=augment, **settings) as loader,
        pytest.raises(SettingError, match=match),
    ):
        list(loader)


def test_floats_of_a_transform_are_not_served_as_uint8(converted: dict[str, Path]) -> None:
    with (
        build_loader(converted["shards"], augment=loaders.per_picture(float_transform)) as loader,
        pytest.raises(SettingError, match=r"dtype is 'uint8', and float_transform .* torch\.float32"),
    ):
        list(loader)


PROGRAM = """
import multiprocessing, sys
import loaders


def small(image):
    return image.resize((8, 8))


def main():
    path, method, augment = sys.argv[1:]
    multiprocessing.set_start_method(method)
    settings = {"dtype": "uint8", "batch_size": 4, "augment": augment or loaders.per_picture(small)}
    loader = loaders.build(path, reading=loaders.Reading(engine="processes", workers=1), **settings)
    for number, batch in enumerate(loader):
        print(len(batch.ids))
        if number == 2:
            break


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("method", "augment"), [("fork", "deit3"), ("spawn", "")])
def test_a_program_with_worker_processes_ends_by_itself(
    method: str, augment: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, str(script), str(converted["shards"]), method, augment],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["4", "4", "4"]


def test_a_transform_that_no_worker_process_can_have_is_refused(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def typed_in(image: Image.Image) -> Image.Image:
        return image

    typed_in.__module__ = "__main__"  # as in a program that is given by `python -c`
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(processes, "start_method", lambda: "spawn")
    for transform in (lambda image: image, typed_in, partial(typed_in)):
        augment = loaders.per_picture(transform)
        with build_loader(converted["shards"], augment=augment, **PROCESSES) as loader:
            with pytest.raises(SettingError, match="'spawn'") as caught:
                next(iter(loader))
            assert "top level" in caught.value.remedy


@pytest.mark.parametrize(
    "settings", [{"engine": "local", "workers": 2}, PROCESSES], ids=["local", "processes"]
)
def test_a_fork_leaves_a_recipes_workers_alone(settings: dict[str, Any], converted: dict[str, Path]) -> None:
    build = partial(build_loader, converted["shards"], augment=small_recipe("dino"), size=SIZE, **settings)
    contract.check_a_fork_shares_no_batch(build)
