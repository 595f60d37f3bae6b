"""The page that `precache inspect --html` writes."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import convert, open_dataset
from precache.example_data.sample_tree import make_sample
from precache.pictures import jpeg
from tests.command import run_here
from tests.conftest import CLASSES, small_recipe
from tests.format_contract import stored


class Page(HTMLParser):
    """The text and the pictures of a page; open elements must be closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.pictures: list[dict[str, str | None]] = []
        self.texts: set[str] = set()
        self._open: list[str] = []
        self.feed(path.read_text())
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.pictures.append(dict(attrs))
        elif tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.add(data)


@pytest.mark.parametrize("folder", ["dali", "keep-shards"])
def test_the_page_shows_each_class_as_stored(
    folder: str, converted: dict[str, Path], shaped: dict[str, Path], tmp_path: Path
) -> None:
    path = {**converted, **shaped}[folder]
    result = run_here("precache", "inspect", path, "--html", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    page, text = Page(tmp_path / "page.html"), (tmp_path / "page.html").read_text()
    dataset = open_dataset(path)
    assert page.texts.issuperset(dataset.manifest.classes)
    assert len(page.pictures) == 24 + 5 * CLASSES
    assert text.index("<img") < text.index("<h2>"), "it begins with pictures"
    assert not {"Rejected", "Ignored", "Splits"} & page.texts, "nothing that is empty"
    held = {sample.id: sample.pixels(name) for name, sample in stored(dataset)}
    for picture in page.pictures:
        kind, _, data = str(picture["src"]).partition(",")
        assert kind == "data:image/jpeg;base64"
        shown = jpeg.decode_jpeg(base64.b64decode(data), "page").astype(int)
        whole = Image.fromarray(held[int(str(picture["alt"]).rpartition(" ")[2])])
        expected = whole.resize(shown.shape[1::-1], Image.Resampling.BILINEAR)
        assert np.abs(shown - np.asarray(expected)).mean() < 12
    assert not re.search(r"https?://|url\(|<script|<link", text), "needs no network"


def test_the_source_and_what_was_left_out_are_shown(tree: Path, tmp_path: Path) -> None:
    bad = sorted(tree.glob("*/*.jpg"))[0]
    bad.write_bytes(b"<html>")
    (tree / "<script>&.txt").write_text("x")
    convert(tree, tmp_path / "out", small_recipe("webdataset", size=16), workers=0, max_rejects=0.02)
    shorter = open_dataset(tmp_path / "out").read_index().source_sizes.min(axis=1)
    run_here("precache", "inspect", tmp_path / "out", "--html", "page.html", cwd=tmp_path)
    assert Page(tmp_path / "page.html").texts >= {
        "cannot be decoded (not a known image format)", bad.relative_to(tree).as_posix(), "<script>&.txt",
        f"from {shorter.min()} to {shorter.max()}, median {np.median(shorter):,.0f}",
    }  # fmt: skip


def test_a_page_of_many_classes_stays_small_and_names_each_class(tmp_path: Path) -> None:
    make_sample(tmp_path / "tree", images=52, classes=26, like="caltech", workers=0)
    recipe = small_recipe("shards", size=16, splits="train=0.5,val=0.5")
    dataset = convert(tmp_path / "tree", tmp_path / "out", recipe, workers=0)
    for flags, classes in (((), 20), (("--all-classes",), 26)):
        run_here("precache", "inspect", "out", "--html", "page.html", *flags, cwd=tmp_path)
        page = Page(tmp_path / "page.html")
        assert page.texts >= {"Splits", "train", "val", "50.0%", *dataset.manifest.classes}
        assert len(page.pictures) == 24 + 2 * classes
