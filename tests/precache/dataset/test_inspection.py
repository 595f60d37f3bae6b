"""The page that `precache inspect --html` writes."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from PIL import Image

from precache import convert, open_dataset
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


def test_the_page_shows_each_class_as_stored_and_what_was_left_out(tree: Path, tmp_path: Path) -> None:
    bad = sorted(tree.glob("*/*.jpg"))[0]
    bad.write_bytes(b"<html>")
    (tree / "<script>&.txt").write_text("x")
    convert(tree, tmp_path / "out", small_recipe("dali"), workers=0, max_rejects=0.02)
    result = run_here("precache", "inspect", "out", "--html", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    page, text = Page(tmp_path / "page.html"), (tmp_path / "page.html").read_text()
    dataset = open_dataset(tmp_path / "out")
    assert page.texts.issuperset(dataset.manifest.classes)
    assert page.texts.issuperset({bad.relative_to(tree).as_posix(), "<script>&.txt"})
    assert len(page.pictures) == 24 + 5 * CLASSES
    held = {sample.id: sample.pixels(name) for name, sample in stored(dataset)}
    for picture in page.pictures:
        kind, _, data = str(picture["src"]).partition(",")
        assert kind == "data:image/jpeg;base64"
        shown = jpeg.decode_jpeg(base64.b64decode(data), "page").astype(int)
        whole = Image.fromarray(held[int(str(picture["alt"]).rpartition(" ")[2])])
        expected = whole.resize(shown.shape[1::-1], Image.Resampling.BILINEAR)
        assert np.abs(shown - np.asarray(expected)).mean() < 12
    assert not re.search(r"https?://|url\(|<script|<link", text), "needs no network, and runs nothing"
