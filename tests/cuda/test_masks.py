"""Masks are on the GPU with their pictures, and right, however late its streams are."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from precache import Recipe, convert
from precache.sources import SourceOptions
from tests.building import build_loader
from tests.cuda.simulator import simulated
from tests.cuda.streams import SCHEDULES
from tests.cuda.test_order import hardware, same
from tests.labelled_pictures import PICTURES, draw_trees
from tests.loaders.test_masks import spoil_a_mask

__all__ = ["hardware"]  # a fixture: nvJPEG
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "shards": ("shards", {}),
    "shards-train": ("shards", {"augment": "train", "size": 16, "cache": "device"}),
    "nvjpeg": ("webdataset", {"backend": "nvjpeg"}),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As of `labelled_pictures`; with a mask that changed on disk as KIND-damaged."""
    root = tmp_path_factory.mktemp("masked")
    trees = draw_trees(root)
    paths = {}
    for name in ("shards", "webdataset"):
        path = paths[name] = root / name
        recipe = Recipe(format=name, size=24, fit="crop", shard_bytes=5 * 24 * 24 * 3)
        convert(trees.photos, path, recipe, workers=0, options=SourceOptions(mask=str(trees.masks)))
        paths[f"{name}-damaged"] = root / f"{name}-damaged"
        shutil.copytree(path, paths[f"{name}-damaged"])
        spoil_a_mask(paths[f"{name}-damaged"])
    return paths


def serve(path: Path, device: str, settings: dict[str, Any]) -> list[tuple[torch.Tensor, ...]]:
    """Images, masks and ids of each batch, as a training reads them: later than it drops them."""
    read = []
    more = {"batch_size": 4, "workers": 1, "device": device, "on_error": "skip", **settings}
    with build_loader(path, **more) as loader:
        for _ in range(2):
            for batch in loader:
                read.append((batch.images + 0, batch.fields["mask"] + 0, batch.ids))
                del batch
    if device == "cuda":
        torch.cuda.synchronize()
    return [tuple(tensor.cpu() for tensor in tensors) for tensors in read]


@pytest.mark.parametrize("case", CASES)
def test_masks_are_right_whatever_is_late(case: str, paths: dict[str, Path]) -> None:
    """Also where one is left out with its picture."""
    kind, settings = CASES[case]
    path = paths[f"{kind}-damaged"]
    on_cpu = serve(path, "cpu", {**settings, "backend": kind, "cache": "none"})
    assert sum(len(ids) for *_, ids in on_cpu) == 2 * (PICTURES - 1)
    due = None
    for schedule in SCHEDULES:
        with simulated(schedule):
            found = serve(path, "cuda", settings)
        due = due or found
        assert all(same(due, found)), schedule
        assert all(same([batch[1:] for batch in found], [batch[1:] for batch in on_cpu]))


@pytest.mark.parametrize("case", CASES)
def test_a_mask_keeps_no_thread_waiting(case: str, paths: dict[str, Path]) -> None:
    kind, settings = CASES[case]
    with simulated("all late") as world:
        more = {"batch_size": 4, "workers": 1, "device": "cuda", **settings}
        with build_loader(paths[kind], **more) as loader:
            world.syncs.clear()  # building may
            batches = sum(1 for _ in range(2) for _ in loader)
        waits = [wait for wait in world.syncs if wait[0] != "MainThread"]
    assert len(waits) <= (batches + 2 if kind == "webdataset" else 0)
