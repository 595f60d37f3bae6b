"""The small tree of pictures that attacks convert and read."""

from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 16
FORMATS = ("shards", "webdataset", "dali")
_SHAPES = [(16, 16), (24, 18), (20, 32), (17, 16), (32, 20), (16, 30)]


def make_tree(tree: Path, pictures: int = 12) -> None:
    """Write pictures of 16 to 32 pixels a side in 3 classes, one broken picture, and a text file."""
    rng = np.random.default_rng(7)
    for number in range(pictures):
        folder = tree / f"{number % 3:03}.class"
        folder.mkdir(parents=True, exist_ok=True)
        width, height = _SHAPES[number % len(_SHAPES)]
        pixels = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
        if number == 4:
            image.convert("L").save(folder / "4.png")
        else:
            image.save(folder / f"{number}.jpg", quality=95)
    (tree / "000.class/broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 this is not one")
    (tree / "001.class/notes.txt").write_text("not a picture")
