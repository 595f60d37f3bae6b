"""Damage trees and datasets: undecodable pictures, flipped bits, changed manifests."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from safetensors.numpy import load_file

from precache import open_dataset
from precache.dataset.columns import Column
from precache.dataset.index import INDEX_NAME, column_arrays, write_arrays
from precache.dataset.manifest import MANIFEST_NAME
from precache.formats import FORMATS, Sample
from precache.sources.tree import scan_tree
from precache.storage.output import publish

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "html": lambda content: b"<html>",
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
}


def damage_tree(source: Path, tree: Path) -> list[int]:
    """Copy `source` to `tree`, and damage a picture in each way of DAMAGE; return their ids."""
    shutil.copytree(source, tree)
    samples = scan_tree(source).samples
    jpegs = [sample for sample in samples if sample.path.endswith(".jpg")][3::9][: len(DAMAGE)]
    for sample, spoil in zip(jpegs, DAMAGE.values(), strict=True):
        path = tree / sample.path
        path.write_bytes(spoil(path.read_bytes()))
    return [sample.id for sample in jpegs]


def damage_shards(source: Path, path: Path, ids: list[int]) -> None:
    """Copy a folder of JPEG shards, and damage the samples `ids`; the manifest stays as it was."""
    shutil.copytree(source, path)
    dataset = open_dataset(path)
    spoil = dict(zip(ids, DAMAGE.values(), strict=True))
    form = FORMATS[dataset.manifest.recipe.format]
    for shard in dataset.manifest.shards:
        samples = []
        for sample in form.read_shard(dataset.shard_path(shard)):
            assert isinstance(sample.data, bytes)
            data = sample.data
            if sample.id in spoil:  # the others stay where the index says
                data = spoil[sample.id](data).ljust(len(data), b"\0")
            samples.append(Sample(sample.id, sample.label, data, "", (48, 48)))
        writer = form.writer(path / shard.name, len(samples), dataset.manifest.recipe.size)
        for sample in samples:
            writer.add(sample)
        publish(writer.finish())


def flip_a_bit(path: Path, shard_number: int = 2, row: int = 4) -> tuple[Path, int]:
    """Flip a bit in the middle of a picture of the dataset at `path`; return its shard's path and its id."""
    dataset = open_dataset(path)
    shard = dataset.shard_path(dataset.manifest.shards[shard_number])
    stored = list(FORMATS[dataset.manifest.recipe.format].read_shard(shard))[row]
    data = stored.data if isinstance(stored.data, bytes) else stored.data.tobytes()
    content = shard.read_bytes()
    place = content.index(data) + len(data) // 2
    with open(shard, "r+b") as file:  # in place, because a loader may have the file mapped
        file.seek(place)
        file.write(bytes([content[place] ^ 16]))
    return shard, stored.id


def edit_manifest(path: Path, **changes: Any) -> None:
    """Change entries of the manifest of the dataset at `path`, and correct its checksum."""
    content = {**json.loads((path / MANIFEST_NAME).read_bytes()), **changes, "checksum": ""}
    content["checksum"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (path / MANIFEST_NAME).write_text(json.dumps(content))


def edit_samples(path: Path, **columns: Column) -> None:
    """Change columns of the samples in the index, and correct all checksums."""
    arrays = {**load_file(path / INDEX_NAME), **column_arrays(columns)}
    edit_manifest(path, index=msgspec.to_builtins(write_arrays(path, arrays)))


def rename_split(path: Path, split: str) -> None:
    """Rename the only split of the dataset at `path`, and with it its shards, in the manifest."""
    content = json.loads((path / MANIFEST_NAME).read_bytes())
    (old_name,) = content["samples_per_class"]
    renamed = {name: {split: content[name][old_name]} for name in ("samples_per_class", "statistics")}
    edit_manifest(path, **renamed)
