"""Recipes on a simulated GPU: no wait for the device, no late work, and the pixels of the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import loaders
from loaders.augment.policies import AUGMENTATIONS
from precache import Recipe, convert
from precache.errors import SettingError
from precache.example_data.sample_tree import make_sample
from tests.building import build_loader
from tests.cuda.simulator import simulated
from tests.cuda.streams import SCHEDULES

SIZE, SMALL_SIZE, STORED_SIZE = 20, 12, 24
RECIPES = ["torchvision", "timm-a1", "deit3", "simclr", "dino"]
Parts = list[tuple[torch.Tensor, ...]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data sets of 22 pictures: of one size, each with its own, and of one size in grey."""
    root = tmp_path_factory.mktemp("recipes")
    make_sample(root / "raw", images=22, classes=3, seed=2, like="caltech", workers=0)
    for name, settings in (("crop", {}), ("keep", {"fit": "keep"}), ("grey", {"channels": "grey"})):
        recipe = Recipe(format="shards", size=STORED_SIZE, **{"fit": "crop", **settings})
        convert(root / "raw", root / name, recipe, workers=0)
    return {path.name: path for path in root.iterdir()}


def small_recipe(name: str, views: int = 3) -> loaders.RandomAugmentation:
    """Return a recipe with few and small views, where it has views of its own."""
    settings = AUGMENTATIONS[name]  # type: ignore[index]
    assert settings is not None
    if isinstance(settings.views, int):
        return settings
    return replace(
        settings, views=[replace(view, size=view.size and SMALL_SIZE) for view in settings.views[:views]]
    )


def serve(path: Path, device: str, epochs: int = 1, **settings: Any) -> Parts:
    settings = {"size": SIZE, "batch_size": 8, "workers": 1, "engine": "local", **settings}
    batches = []
    with build_loader(path, device=device, **settings) as loader:
        for _ in range(epochs):
            for batch in loader:
                batches.append(tuple(part + 0 for part in (*batch.views, batch.labels)))
                del batch
    if device != "cpu":
        torch.cuda.synchronize(device)
    return [tuple(part.cpu() for part in parts) for parts in batches]


@pytest.mark.filterwarnings("ignore:the pictures of:UserWarning")
@pytest.mark.parametrize("kind", ["crop", "keep", "grey"])
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_on_device_serves_the_pixels_of_the_cpu(name: str, kind: str, paths: dict[str, Path]) -> None:
    """A difference of 1 may grow where an operation follows another: few values differ by more than 2."""
    settings = {"augment": small_recipe(name)}
    on_cpu = serve(paths[kind], "cpu", **settings)
    with simulated("all late") as world:
        on_device = serve(paths[kind], "cuda:1", **settings)
        assert world.used == {1}
        assert [wait for wait in world.syncs if wait[0] != "MainThread"] == []
    gaps = []
    for (*views, labels), (*cpu_views, cpu_labels) in zip(on_device, on_cpu, strict=True):
        torch.testing.assert_close(labels, cpu_labels)
        for view, cpu_view in zip(views, cpu_views, strict=True):
            assert view.shape == cpu_view.shape
            gaps.append((view.int() - cpu_view.int()).abs().flatten())
    gap = torch.cat(gaps).float()
    assert gap.mean() < 0.3
    if kind == "keep":  # the reader has cropped both
        assert (gap > 1).float().mean() < 0.015
        assert gap.max() <= 4
    else:
        assert (gap > 2).float().mean() < 0.015


def flip(image: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image.resize((SIZE, SIZE)))).permute(2, 0, 1)
    return pixels.flip(2) if torch.rand(()) < 0.5 else pixels


FLOAT = {"dtype": torch.float32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("crop", {"augment": "torchvision", **FLOAT}),
    "mixed-keep": ("keep", {"augment": "timm-a1", "last": "pad", "rank": 1, "world_size": 3}),
    "views": ("crop", {"augment": small_recipe("dino"), "subset": range(6), "batch_size": 3, **FLOAT}),
    "cache": ("crop", {"augment": "deit3", "cache": "device", "subset": range(12), **FLOAT}),
    "one picture": ("crop", {"augment": "torchvision", "subset": [3, 4], "batch_size": 1, **FLOAT}),
    "transform": ("keep", {"augment": loaders.per_picture(flip), **FLOAT}),
}
"""Case -> (key of `paths`, settings)."""


@pytest.mark.parametrize("case", CASES)
def test_recipe_is_right_whatever_is_late(case: str, paths: dict[str, Path]) -> None:
    kind, settings = CASES[case]
    due: Parts = []
    for schedule in SCHEDULES:
        with simulated(schedule) as world:
            served = serve(paths[kind], "cuda", epochs=2, **settings)
            assert [wait for wait in world.syncs if wait[0] != "MainThread"] == [], schedule
        due = due or served
        for parts, due_parts in zip(served, due, strict=True):
            assert all(map(torch.equal, parts, due_parts)), schedule
    if case == "transform":
        for parts, cpu_parts in zip(due, serve(paths[kind], "cpu", epochs=2, **settings), strict=True):
            torch.testing.assert_close(parts, cpu_parts, rtol=0, atol=1e-5)
    if case == "one picture":
        assert {(*labels.shape, labels.dtype) for _, labels in due} == {(1, 3, torch.float32)}


def test_a_cache_cannot_keep_what_a_transform_draws(paths: dict[str, Path]) -> None:
    with simulated("at once"), pytest.raises(SettingError, match="per_picture") as caught:
        build_loader(paths["crop"], device="cuda", cache="device", augment=loaders.per_picture(flip))
    assert "leave the cache out" in caught.value.remedy
