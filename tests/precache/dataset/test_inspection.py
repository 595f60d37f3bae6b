"""Contents of the page that `precache inspect --html` writes."""

import base64
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import convert, open_dataset
from precache.dataset.inspection import write_html
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.pictures import jpeg
from tests.command import run_here
from tests.conftest import CLASSES, small_recipe
from tests.format_contract import stored_samples


def test_page_shows_stored_pictures_of_each_class_and_rejected_files(tree: Path, tmp_path: Path) -> None:
    bad = sorted(tree.glob("*/*.jpg"))[0]
    bad.write_bytes(b"<html>")
    (tree / "<script>&.txt").write_text("x")
    convert(tree, tmp_path / "out", small_recipe("dali"), workers=0, max_rejects=0.02)
    result = run_here("precache", "inspect", "out", "--html", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    dataset, text = open_dataset(tmp_path / "out"), (tmp_path / "page.html").read_text()
    for name in (*dataset.manifest.classes, bad.relative_to(tree).as_posix(), "&lt;script&gt;&amp;.txt"):
        assert name in text
    pictures = re.findall(r'<img alt="[^"]* (\d+)" [^>]*src="data:image/jpeg;base64,([^"]+)">', text)
    assert len(pictures) == text.count("<img") == 24 + 5 * CLASSES
    pixels = {sample.id: sample.pixels(name) for name, sample in stored_samples(dataset)}
    for sample_id, data in pictures:
        shown = jpeg.decode_jpeg(base64.b64decode(data), "page").astype(int)
        picture = Image.fromarray(pixels[int(sample_id)])
        expected = picture.resize(shown.shape[1::-1], Image.Resampling.BILINEAR)
        assert np.abs(shown - np.asarray(expected)).mean() < 12
    assert not re.search(r"https?://|url\(|<script|<link", text), "needs no network, and runs nothing"


@pytest.mark.parametrize("classes", [3, 40])
def test_sheet_begins_with_one_picture_of_each_class(classes: int, tmp_path: Path) -> None:
    for number in range(classes * 12):
        path = tmp_path / f"tree/class {number % classes:02}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (200, 200), (number % 256, 0, 0)).save(path)
    convert(tmp_path / "tree", tmp_path / "out", small_recipe("shards", size=200), workers=0)
    write_html(open_dataset(tmp_path / "out"), tmp_path / "page.html")
    sheet = (tmp_path / "page.html").read_text().partition("<h2>")[0]
    captions = re.findall(r"<figcaption>([^<]*)</figcaption>", sheet)
    assert captions[:classes] == sorted(set(captions)) == [f"class {n:02}" for n in range(classes)]
    assert len(captions) == max(24, classes)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_write_html_raises_for_an_empty_shard(name: str, converted: dict[str, Path], tmp_path: Path) -> None:
    """Raise it in every format, although an empty file is a valid TFRecord file of no samples."""
    dataset = open_dataset(Path(shutil.copytree(converted[name], tmp_path / "copy")))
    shard = dataset.shard_path(dataset.manifest.shards[1])
    shard.write_bytes(b"")
    with pytest.raises(DatasetError, check=lambda error: error.path == shard and bool(error.remedy)):
        write_html(dataset, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
