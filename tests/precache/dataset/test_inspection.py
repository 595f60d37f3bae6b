"""The page that `precache inspect --html` writes."""

import base64
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import convert, open_dataset
from precache.example_data.sample_tree import make_sample
from precache.formats import FORMATS
from precache.pictures import jpeg
from tests.command import run_here
from tests.conftest import CLASSES, small_recipe


class Page(HTMLParser):
    """The text and the pictures of a page; open elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pictures: list[dict[str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.pictures.append({name: value or "" for name, value in attrs})
        elif tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.texts.append(data)


@pytest.mark.parametrize("folder", ["dali", "keep-shards"])
def test_the_page_shows_each_class_as_stored(
    folder: str, converted: dict[str, Path], shaped: dict[str, Path], tmp_path: Path
) -> None:
    path, name = {**converted, **shaped}[folder], folder.removeprefix("keep-")
    result = run_here("precache", "inspect", path, "--html", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    dataset = open_dataset(path)
    assert all(class_name in page.texts for class_name in dataset.manifest.classes)
    assert len(page.pictures) == 24 + 5 * CLASSES
    assert text.index("<img") < text.index("<h2>"), "it begins with pictures"
    assert not {"Rejected", "Ignored", "Splits"} & set(page.texts), "nothing that is empty"
    stored = {
        sample.id: sample.pixels("")
        for shard in dataset.manifest.shards
        for sample in FORMATS[name].read_shard(dataset.shard_path(shard))
    }
    for picture in page.pictures:
        kind, _, data = picture["src"].partition(",")
        assert kind == "data:image/jpeg;base64"
        shown = jpeg.decode_jpeg(base64.b64decode(data), "page").astype(int)
        whole = Image.fromarray(stored[int(picture["alt"].rpartition(" ")[2])])
        expected = whole.resize(shown.shape[1::-1], Image.Resampling.BILINEAR)
        assert np.abs(shown - np.asarray(expected)).mean() < 12
    assert not re.search(r"https?://|url\(|<script|<link", text), "needs no network"


def test_the_source_and_what_was_left_out_are_shown(raw_tree: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    bad = sorted(tree.glob("*/*.jpg"))[0]
    bad.write_bytes(b"<html>")
    (tree / "<script>&.txt").write_text("x")
    recipe = small_recipe("webdataset", size=16)
    convert(tree, tmp_path / "out", recipe, workers=0, max_rejects=0.02)
    sizes = open_dataset(tmp_path / "out").read_index().source_sizes
    run_here("precache", "inspect", tmp_path / "out", "--html", "page.html", cwd=tmp_path)
    text = (tmp_path / "page.html").read_text()
    shown = Page(text).texts
    assert "cannot be decoded (not a known image format)" in shown
    assert bad.relative_to(tree).as_posix() in shown
    assert "<script>&.txt" in shown
    shorter = sizes.min(axis=1)
    assert f"from {shorter.min()} to {shorter.max()}, median {np.median(shorter):,.0f}" in shown


def test_a_page_of_many_classes_stays_small_and_names_each_class(tmp_path: Path) -> None:
    classes = 26
    make_sample(tmp_path / "tree", images=2 * classes, classes=classes, like="caltech", workers=0)
    recipe = small_recipe("shards", size=16, splits="train=0.5,val=0.5")
    dataset = convert(tmp_path / "tree", tmp_path / "out", recipe, workers=0)
    shown = {}
    for flags in ((), ("--all-classes",)):
        run_here("precache", "inspect", "out", "--html", "page.html", *flags, cwd=tmp_path)
        page = Page((tmp_path / "page.html").read_text())
        assert all(name in page.texts for name in dataset.manifest.classes)
        assert {"Splits", "train", "val", "50.0%"} <= set(page.texts)
        shown[flags] = len(page.pictures)
    assert (shown[()], shown["--all-classes",]) == (24 + 2 * 20, 24 + 2 * classes)
