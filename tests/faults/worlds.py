"""The small tree that is attacked, what undisturbed runs make of it, and what the user has beside it."""

import random
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 16
FORMATS = ("shards", "webdataset", "dali")
_SHAPES = [(16, 16), (24, 18), (20, 32), (17, 16), (32, 20), (16, 30)]


def make_tree(tree: Path, pictures: int = 12) -> None:
    """Pictures of 16 to 32 pixels a side in 3 classes, one that is none, and a file beside them."""
    random_bytes = np.random.default_rng(7)
    for number in range(pictures):
        folder = tree / f"{number % 3:03}.class"
        folder.mkdir(parents=True, exist_ok=True)
        width, height = _SHAPES[number % len(_SHAPES)]
        pixels = random_bytes.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
        if number == 4:
            image.convert("L").save(folder / "4.png")
        else:
            image.save(folder / f"{number}.jpg", quality=95)
    (tree / "000.class/broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 this is not one")
    (tree / "001.class/notes.txt").write_text("not a picture")


def arguments(source: Path, out: Path, name: str, *, workers: int = 0, size: int = SIZE) -> list[str]:
    """The command line of `precache` that converts the tree: shards of 3 pictures in two splits."""
    return [
        "convert", str(source), str(out), "--format", name, "--size", str(size), "--fit", "crop",
        "--shard-bytes", str(3 * size * size * 3), "--splits", "train=0.7,val=0.3",
        "--workers", str(workers), "--max-rejects", "0.5",
    ]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes | None]:
    """Path below the folder -> bytes; None for what is no regular file. Empty if there is no folder."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if path.is_symlink() or not path.is_dir():
            regular = path.is_file() and not path.is_symlink()
            found[str(path.relative_to(folder))] = path.read_bytes() if regular else None
    return found


def difference(found: dict[str, bytes | None], expected: dict[str, bytes | None]) -> str:
    """How two contents differ, in a few words; empty if they do not."""
    missing, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    parts = [f"{word} {', '.join(names[:3])}" for word, names in
             (("missing", missing), ("more:", more), ("other bytes:", other)) if names]  # fmt: skip
    return "; ".join(parts)


class Belongings:
    """Files of the user's, in and beside a DST; whatever happens, they stay as they are."""

    def __init__(self) -> None:
        self._files: dict[Path, bytes] = {}

    def put(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._files[path] = content

    def put_dataset(self, source: Path, folder: Path) -> None:
        """A finished dataset of the user's."""
        shutil.copytree(source, folder)
        self._files.update({path: path.read_bytes() for path in folder.iterdir()})

    def put_beside(self, out: Path, draw: random.Random, dataset: Path) -> None:
        """What people have beside a dataset: copies, notes, and names that a program might want."""
        if draw.random() < 0.6:
            return
        for name in draw.sample((".old/thesis.txt", ".bak/thesis.txt", ".txt", ".partial", "-1/notes.md"), 2):
            self.put(out.parent / (out.name + name), b"mine")
        self.put(out.with_name(f".{out.name}"), b"also mine")
        if draw.random() < 0.3:
            self.put_dataset(dataset, out.with_name(out.name + ".new"))

    def forget(self, path: Path) -> None:
        """Take one back."""
        del self._files[path]
        path.unlink()

    def names_in(self, folder: Path) -> set[str]:
        """Of those that lie in `folder`."""
        return {str(path.relative_to(folder)) for path in self._files if path.is_relative_to(folder)}

    def lost(self) -> str:
        """What is not as it was, in a few words; empty if all is."""
        for path, content in self._files.items():
            if not path.is_file():
                return f"the user's {path.parent.name}/{path.name} is gone"
            if path.read_bytes() != content:
                return f"the user's {path.parent.name}/{path.name} was changed"
        return ""

    def strays(self, out: Path, said: str) -> str:
        """What lies beside `out`, is nobody's, and more than a hidden lock file; empty if nothing does.

        What the user was told of, in `said`, is no stray: it could not be removed.
        """
        ours = {"target", out.name}  # where a DST that is a link leads
        ours |= {
            path.relative_to(out.parent).parts[0] for path in self._files if path.is_relative_to(out.parent)
        }
        for path in out.parent.iterdir():
            small = path.name.startswith(".") and path.is_file() and path.stat().st_size < 4096
            if path.name not in ours and path.name not in said and not small:
                return f"{path.name} is left behind"
        return ""
