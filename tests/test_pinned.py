"""Bytes of every format and fit, and ids of every order, stay as they are in `pinned.json`.

After an intended change `python -m tests.test_pinned` writes that file anew.
"""

import base64
import hashlib
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache import Recipe, convert
from tests.building import build_loader
from tests.command import ROOT

PINNED = ROOT / "tests/pinned.json"
FORMATS = ("shards", "webdataset", "dali")
FITS = ("keep", "crop", "pad", "stretch")
ORDERS = ("full", "window", False)
WORLDS = ((0, 1), (0, 3), (2, 3))
# A JPEG of 16x16, quality 90: at this size it is stored as it is, whatever library decodes it.
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMU"
    "FRUVDA8XGBYUGBIUFRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQU"
    "FBQUFBQUFBT/wAARCAAQABADASIAAhEBAxEB/8QAHwAAAQUBAQEBAQEAAAAAAAAAAAECAwQFBgcICQoL/8QAtRAAAgEDAwIEAwUF"
    "BAQAAAF9AQIDAAQRBRIhMUEGE1FhByJxFDKBkaEII0KxwRVS0fAkM2JyggkKFhcYGRolJicoKSo0NTY3ODk6Q0RFRkdISUpTVFVW"
    "V1hZWmNkZWZnaGlqc3R1dnd4eXqDhIWGh4iJipKTlJWWl5iZmqKjpKWmp6ipqrKztLW2t7i5usLDxMXGx8jJytLT1NXW19jZ2uHi"
    "4+Tl5ufo6erx8vP09fb3+Pn6/8QAHwEAAwEBAQEBAQEBAQAAAAAAAAECAwQFBgcICQoL/8QAtREAAgECBAQDBAcFBAQAAQJ3AAEC"
    "AxEEBSExBhJBUQdhcRMiMoEIFEKRobHBCSMzUvAVYnLRChYkNOEl8RcYGRomJygpKjU2Nzg5OkNERUZHSElKU1RVVldYWVpjZGVm"
    "Z2hpanN0dXZ3eHl6goOEhYaHiImKkpOUlZaXmJmaoqOkpaanqKmqsrO0tba3uLm6wsPExcbHyMnK0tPU1dbX2Nna4uPk5ebn6Onq"
    "8vP09fb3+Pn6/9oADAMBAAIRAxEAPwD4/wDBfwh/1f7j9K958F/CH/V/uP0r2PwX8If9X+4/SvefBfwh/wBX+4/SjB4zbUPDzxD+"
    "D3z/2Q=="
)


def make_tree(folder: Path) -> Path:
    """Write 50 JPEGs of 16x16 in 3 classes; each has another comment, so that their bytes differ."""
    for number in range(50):
        path = folder / f"{number % 3:03}.class" / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        comment = b"\xff\xfe\x00\x04%02d" % number
        path.write_bytes(JPEG[:2] + comment + JPEG[2:])
    return folder


def file_digests(tree: Path, folder: Path) -> dict[str, str]:
    """SHA-256 of every shard and shard's index, by format, fit and file name."""
    digests = {}
    for form, fit in product(FORMATS, FITS):
        out = folder / f"{form}-{fit}"
        recipe = Recipe(
            format=form, size=16, fit=fit, shard_bytes=10 * 16 * 16 * 3, splits="train=0.8,val=0.2"
        )
        convert(tree, out, recipe, workers=0)
        for path in sorted(out.glob("*-0*")):  # without the manifest and the dataset's index
            digests[f"{form} {fit} {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return digests


def order_digests(tree: Path, shards: Path) -> dict[str, str]:
    """SHA-256 of the ids of two epochs, by data, settings, shuffle, seed and rank."""
    subset = {"subset": range(0, 40, 3)}
    settings: dict[str, tuple[object, dict[str, object]]] = {
        "raw": (tree, {}),
        "raw subset": (tree, {**subset, "last": "partial"}),
        "raw weights": (tree, {"weights": "balanced"}),
        "shards": (shards, {}),
        "shards partial": (shards, {"last": "partial"}),
        "shards drop": (shards, {"last": "drop"}),
        "shards subset": (shards, {**subset, "last": "partial"}),
        "shards weights": (shards, {"weights": "balanced"}),
        "shards by nodes": (shards, {"per_node": 1}),
        "list": ([shards, shards], {"last": "partial"}),
    }
    digests = {}
    for (name, (path, more)), shuffle, seed, (rank, world) in product(
        settings.items(), ORDERS, (0, 7), WORLDS
    ):
        arguments: dict[str, Any] = {
            "last": "pad",
            "size": 16,
            "rank": rank,
            "world_size": world,
            "workers": 0,
            **more,
        }
        with build_loader(path, shuffle=shuffle, seed=seed, batch_size=4, **arguments) as loader:  # type: ignore[arg-type]
            ids = np.concatenate([batch.ids.numpy() for _ in range(2) for batch in loader])
        key = f"{name} {shuffle} seed {seed} rank {rank} of {world}"
        digests[key] = hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:16]
    return digests


def compute_digests(folder: Path) -> dict[str, dict[str, str]]:
    """Compute all digests, with files in `folder`."""
    tree = make_tree(folder / "tree")
    return {"bytes": file_digests(tree, folder), "orders": order_digests(tree, folder / "shards-keep")}


@pytest.fixture(scope="module")
def current_digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    return compute_digests(tmp_path_factory.mktemp("pinned"))


@pytest.mark.parametrize("kind", ["bytes", "orders"])
def test_bytes_and_orders_are_as_pinned(current_digests: dict[str, dict[str, str]], kind: str) -> None:
    assert current_digests[kind] == json.loads(PINNED.read_text())[kind]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PINNED.write_text(json.dumps(compute_digests(Path(scratch)), indent=1) + "\n")
