"""Line with `loaders.build` for a watched loader: when there is one, and that it fits the tree."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import loaders
from bench.report.waiting import Stream
from bench.watch.build_line import describe_build
from bench.watch.transforms import classes_checksum
from tests.bench.report.test_waiting import waiting_stream


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("ant", "bee"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(4):
            Image.new("RGB", (24, 24)).save(tmp_path / "photos" / name / f"{index}.png")
    return tmp_path / "photos"


def stream_of(root: Path, **changes: Any) -> Stream:
    """Make a stream of an ImageFolder of `photos` that waits."""
    stream = waiting_stream(**changes)
    classes = classes_checksum(["ant", "bee"], [0] * 4 + [1] * 4)
    build = {"arguments": {"batch_size": "4", "size": "16"}, "samples": 8, "classes": classes}
    return replace(stream, info={**stream.info, "root": str(root), "build": build})


def pasted(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def test_line_serves_the_tree_and_names_the_place_and_the_measurement(photos: Path) -> None:
    text = describe_build(stream_of(photos))
    line, command = pasted(text)
    assert text.startswith("In place of the DataLoader made at train.py:7, for this split:")
    assert line == f"loaders.build({str(photos)!r}, batch_size=4, size=16)"
    assert command == f"bench recommend {photos}"
    with eval(line, {"loaders": loaders}) as loader:
        assert loader.samples == 8


@pytest.mark.parametrize(
    ("info", "changes", "reason"),
    [
        ({"libraries": ["transformers"]}, {}, "the Trainer of transformers makes the DataLoader"),
        ({"build": {"reason": "the dataset is a Subset"}}, {}, "the dataset is a Subset"),
        ({"choice": "make(train=True)"}, {}, "by make(train=True)"),
        ({}, {"made": 2}, "train.py:7 makes several loaders"),
        ({}, {"loaders": 2}, "each step takes batches of 2 loaders"),
    ],
)
def test_no_line_is_given_where_it_would_serve_something_else(
    info: dict[str, Any], changes: dict[str, Any], reason: str, photos: Path
) -> None:
    stream = stream_of(photos, **changes)
    text = describe_build(replace(stream, info={**stream.info, **info}))
    assert reason in text
    assert "loaders/README.md" in text
    assert not pasted(text)


def test_no_line_is_given_for_samples_that_the_script_has_changed(photos: Path) -> None:
    (photos / "bee/3.png").unlink()  # as if the script had one more
    assert not pasted(describe_build(stream_of(photos)))


def test_no_line_is_given_for_splits_that_are_classes(photos: Path) -> None:
    parts = photos.parent / "parts"
    for split in ("train", "val"):
        shutil.copytree(photos, parts / split)
    stream = stream_of(parts)
    classes = classes_checksum(["train", "val"], [0] * 8 + [1] * 8)
    build = {**stream.info["build"], "classes": classes}
    assert not pasted(describe_build(replace(stream, info={**stream.info, "build": build})))


def test_no_line_is_given_for_a_tree_that_is_gone(photos: Path) -> None:
    assert "cannot be listed" in describe_build(stream_of(photos / "gone"))


def test_pictures_without_an_extension_are_counted(photos: Path) -> None:
    (photos / "ant/4").write_bytes((photos / "ant/3.png").read_bytes())
    text = describe_build(stream_of(photos))
    assert pasted(text)
    assert "It also serves 1 picture that ImageFolder does not take" in text


def test_loaders_of_other_things_get_no_word(photos: Path) -> None:
    stream = stream_of(photos, parts={})
    assert describe_build(replace(stream, info={**stream.info, "side": 0})) == ""
    assert describe_build(replace(stream, info={**stream.info, "kind": "loaders"})) == ""
