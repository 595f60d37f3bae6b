"""Targets and fields of every kind, in every format, as stock readers and `verify` see them."""

import json
import math
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache import Recipe, convert, open_dataset, verify, verify_across, verify_deep
from precache.dataset.converted import ConvertedDataset
from precache.formats import FORMATS
from precache.sources.base import Source
from tests.precache.sources.listed import FIELDS, KINDS, SAMPLES, SHARES, TARGETS, listed


def make(source: Source, path: Path, name: str, **settings: Any) -> ConvertedDataset:
    recipe = Recipe(format=name, size=16, fit="crop", shard_bytes=8 * 16 * 16 * 3, splits=SHARES, **settings)
    convert(source, path, recipe, workers=0, max_rejects=1)
    return open_dataset(path)


def described(dataset: ConvertedDataset) -> dict[int, dict[str, Any]]:
    """Id -> what the .json of the tars has of it."""
    found = {}
    for shard in dataset.manifest.shards:
        with tarfile.open(dataset.shard_path(shard)) as tar:
            names = tar.getnames()
            for name in (name for name in names if name.endswith(".json")):
                member = tar.extractfile(name)
                assert member is not None
                labelled = name.replace(".json", ".cls") in names
                found[int(name[:8])] = {**json.load(member), "has_class": labelled}
    return found


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_index_has_every_target_and_field_as_it_was(target: str, tmp_path: Path) -> None:
    """In every format, whose shards have them, too, as `verify --deep` sees."""
    for name in FORMATS:
        dataset = make(listed(target), tmp_path / name, name)
        index = dataset.read_index()
        assert dataset.manifest.fields == KINDS
        for row, sample_id in enumerate(index.ids.tolist()):
            known = {field: index.fields[field].value(row) for field in FIELDS}
            assert known == {field: values[sample_id] for field, values in FIELDS.items()}
            if target not in ("class", "none"):
                assert index.targets is not None
                assert index.targets.value(row) == TARGETS[target][sample_id]
            assert index.labels[row] == (TARGETS[target][sample_id] if target == "class" else -1)
        assert verify(tmp_path / name) == []
        assert deep(listed(target), tmp_path / name) == ()


def test_tars_have_targets_and_fields_in_their_json(tmp_path: Path) -> None:
    for target in ("class", "classes"):
        found = described(make(listed(target), tmp_path / target, "webdataset"))
        assert sorted(found) == list(range(SAMPLES))
        for sample_id, known in found.items():
            assert known["fields"] == {name: values[sample_id] for name, values in FIELDS.items()}
            assert (known["width"], known["height"]) == (40, 32), "the picture's, not those of a field"
            assert known["has_class"] == (target == "class")
            assert known.get("target") == (None if target == "class" else TARGETS[target][sample_id])


@pytest.mark.parametrize("name", ["webdataset", "dali"])
def test_the_webdataset_library_and_dali_read_what_is_written(name: str, tmp_path: Path) -> None:
    dataset = make(listed("classes"), tmp_path / "out", name)
    read = read_with_webdataset if name == "webdataset" else read_with_dali
    found: dict[int, Mapping[str, Any]] = read(dataset)
    assert sorted(found) == list(range(SAMPLES))
    for sample_id, fields in found.items():
        for field, values in FIELDS.items():
            expected = values[sample_id]
            if isinstance(expected, str):
                assert fields[field] == expected
            else:
                flat = np.ravel(np.asarray(expected, np.float64))
                assert np.allclose(np.ravel(fields[field]), flat, rtol=1e-6)
        assert list(fields["target"]) == TARGETS["classes"][sample_id]


def read_with_webdataset(dataset: ConvertedDataset) -> dict[int, Mapping[str, Any]]:
    webdataset = pytest.importorskip("webdataset")
    urls = [str(dataset.shard_path(shard)) for shard in dataset.manifest.shards]
    samples = webdataset.WebDataset(urls, shardshuffle=False).decode()
    return {int(s["__key__"]): {**s["json"]["fields"], "target": s["json"]["target"]} for s in samples}


def read_with_dali(dataset: ConvertedDataset) -> dict[int, Mapping[str, Any]]:
    pytest.importorskip("nvidia.dali")
    from nvidia.dali import Pipeline, fn
    from nvidia.dali import tfrecord as tfr

    floats = ("score", "place", "corners")
    features = {f"field/{name}": tfr.VarLenFeature(tfr.float32, 0.0) for name in floats}
    features |= {f"field/{name}": tfr.VarLenFeature(tfr.int64, 0) for name in ("width", "tokens")}
    features["shape/corners"] = tfr.VarLenFeature(tfr.int64, 0)
    features["field/caption"] = tfr.FixedLenFeature([], tfr.string, "")
    features["sample/id"] = tfr.FixedLenFeature([1], tfr.int64, -1)
    features["target"] = tfr.VarLenFeature(tfr.int64, 0)
    paths = [str(dataset.shard_path(shard)) for shard in dataset.manifest.shards]
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        indexes = [path.replace(".tfrecord", ".idx") for path in paths]
        read: Any = fn.readers.tfrecord(path=paths, index_path=indexes, features=features)
        pipeline.set_outputs(*read.values())
    pipeline.build()
    found: dict[int, Mapping[str, Any]] = {}
    for _ in range(dataset.manifest.samples):
        values = [np.asarray(output[0]) for output in pipeline.run()]
        fields: dict[str, Any] = {
            key.removeprefix("field/"): value for key, value in zip(read, values, strict=True)
        }
        fields["caption"] = fields["caption"].tobytes().decode()
        shape = [*np.shape(FIELDS["corners"][int(fields["sample/id"][0])])]
        assert fields["shape/corners"].tolist() == shape
        found[int(fields["sample/id"][0])] = fields
    return found


def deep(source: Source, path: Path) -> tuple[str, ...]:
    return verify_deep(path, source, workers=0).problems  # type: ignore[arg-type]


def test_a_field_that_is_another_in_its_shard_is_found_in_depth(tmp_path: Path) -> None:
    dataset = make(listed("number"), tmp_path / "out", "webdataset")
    shards = [dataset.shard_path(shard) for shard in dataset.manifest.shards]
    (shard,) = (shard for shard in shards if b"number 9" in shard.read_bytes())
    shard.write_bytes(shard.read_bytes().replace(b"number 9", b"number 8"))
    (problem,) = deep(listed("number"), tmp_path / "out")
    assert "sample 9 (9.png)" in problem


def test_datasets_with_other_fields_or_targets_are_told_apart(tmp_path: Path) -> None:
    numbers = make(listed("number"), tmp_path / "number", "shards")
    same = make(listed("number"), tmp_path / "same", "dali")
    assert verify_across([numbers.path, same.path]) == []
    fields = {**FIELDS, "caption": ["other", *FIELDS["caption"][1:]]}
    caption = make(listed("number", fields), tmp_path / "caption", "webdataset")
    (problem,) = verify_across([numbers.path, caption.path])
    assert "differs in 1 sample" in problem
    vector = make(listed("none"), tmp_path / "none", "shards")
    (problem,) = verify_across([numbers.path, vector.path])
    assert "targets and fields differ" in problem


def test_a_number_that_is_none_is_itself_in_every_format(tmp_path: Path) -> None:
    fields = {"x": [math.nan, math.inf, -0.0, *[1e300] * (SAMPLES - 3)]}
    for name in FORMATS:
        make(listed("none", fields), tmp_path / name, name)
        assert deep(listed("none", fields), tmp_path / name) == ()
    assert verify_across([tmp_path / name for name in FORMATS]) == []


def test_a_sample_without_its_picture_is_left_out_with_its_fields(tmp_path: Path) -> None:
    dataset = make(listed("classes", missing=(0, 5)), tmp_path / "out", "shards")
    assert [rejected.id for rejected in dataset.manifest.rejected] == [0, 5]
    index = dataset.read_index()
    assert index.fields["caption"].value(int(np.flatnonzero(index.ids == 23)[0])) == "number 23"
    assert len(index.fields["caption"]) == SAMPLES - 2
