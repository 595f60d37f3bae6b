"""A raw image tree: class folders with pictures directly inside them.

    SRC/001.ak47/001_0001.jpg      sample, class '001.ak47'
    SRC/056.dog/greg/              ignored: a folder inside a class folder
    SRC/198.spider/RENAME2         ignored: neither an image extension nor an image signature

A tree whose folders are `train` and `val` (or `valid`, `validation`, `test`), with class folders in
each, keeps these splits: SRC/train/001.ak47/001_0001.jpg.

A file is a picture if its extension says so or, failing that, if its first bytes do: Caltech-101
holds a JPEG named 'tmp'. Whether a picture can be decoded shows only when it is decoded.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from precache.errors import SourceError

IMAGE_EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff")
)
SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test")
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*")


@dataclass(frozen=True, slots=True)
class SampleRef:
    """One picture of a tree.

    Attributes:
        id: rank in the sorted scan.
        path: relative to the root, with forward slashes.
        label: index of its class.
        bytes: size of the file.
        split: that the tree puts it in, or "" where it has none.
    """

    id: int
    path: str
    label: int
    bytes: int
    split: str = ""


@dataclass(frozen=True, slots=True)
class IgnoredPath:
    """Something in the tree that is not a sample; `path` is relative to the root."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Scan:
    """What a tree holds. Labels index `classes`; both are in sorted order of folder name."""

    root: Path
    classes: tuple[str, ...]
    samples: tuple[SampleRef, ...]
    ignored: tuple[IgnoredPath, ...]

    def digest(self) -> str:
        """SHA-256 (hex) over paths and sizes: tells two trees apart without reading pictures."""
        hasher = hashlib.sha256()
        for sample in self.samples:
            hasher.update(os.fsencode(sample.path) + b"\0%d\0" % sample.bytes)
        return hasher.hexdigest()


def scan_tree(root: str | os.PathLike[str]) -> Scan:
    """List the samples of the tree at `root`, sorted by class folder, then by file name.

    Raises:
        SourceError: `root` is missing, is not a folder, or has no class folder with a picture.
    """
    root = Path(root)
    if not root.is_dir():
        reason = "is not a folder" if root.exists() else "does not exist"
        raise SourceError(
            f"{root}: {reason}; expected a folder of class folders with pictures "
            f"(make one with 'precache sample {root}')"
        )
    ignored: list[IgnoredPath] = []
    found: list[tuple[str, str, str, int]] = []  # split, class, path, bytes
    for split, prefix in _split_folders(root):
        for class_name, path, size in _class_pictures(root, prefix, ignored):
            found.append((split, class_name, path, size))
    classes = sorted({class_name for _, class_name, _, _ in found})
    label_of = {name: label for label, name in enumerate(classes)}
    samples = [
        SampleRef(rank, path, label_of[class_name], size, split)
        for rank, (split, class_name, path, size) in enumerate(found)
    ]
    if not samples:
        raise SourceError(
            f"{root}: no class folder with pictures in it; expected {root}/CLASS/picture.jpg "
            f"(make a sample tree with 'precache sample DST')"
        )
    return Scan(root, tuple(classes), tuple(samples), tuple(ignored))


def _split_folders(root: Path) -> list[tuple[str, str]]:
    """(split, its folder's path with a slash); one without a name for a tree without splits."""
    folders = [e for e in _sorted_entries(root) if e.is_dir() and not e.name.startswith(".")]
    names = {folder.name for folder in folders}
    if "train" not in names or not names <= set(SPLIT_FOLDERS):
        return [("", "")]
    if any(_why_not_a_picture(entry) is None for folder in folders for entry in _sorted_entries(folder.path)):
        return [("", "")]  # a class that happens to be called train
    return [(folder.name, f"{folder.name}/") for folder in folders]


def _class_pictures(root: Path, prefix: str, ignored: list[IgnoredPath]) -> Iterator[tuple[str, str, int]]:
    """(class, path, bytes) of each picture in the class folders of `root/prefix`, sorted."""
    for folder in _sorted_entries(root / prefix):
        path = f"{prefix}{folder.name}"
        if not folder.is_dir():
            ignored.append(IgnoredPath(path, "a file beside the class folders"))
        elif folder.name.startswith("."):
            ignored.append(IgnoredPath(path, "a hidden folder"))
        else:
            empty = True
            for entry in _sorted_entries(folder.path):
                reason = _why_not_a_picture(entry)
                if reason is None:
                    empty = False
                    yield folder.name, f"{path}/{entry.name}", entry.stat().st_size
                else:
                    ignored.append(IgnoredPath(f"{path}/{entry.name}", reason))
            if empty:
                ignored.append(IgnoredPath(path, "a folder without pictures"))


def _sorted_entries(folder: str | os.PathLike[str]) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(f"{folder}: cannot be listed ({error.strerror}); check its permissions") from error


def _why_not_a_picture(entry: "os.DirEntry[str]") -> str | None:
    if entry.is_dir():
        return "a folder inside a class folder"
    if not entry.is_file():
        return "not a regular file"
    if entry.name.startswith("."):
        return "a hidden file"
    extension = os.path.splitext(entry.name)[1].lower()
    if extension in IMAGE_EXTENSIONS or _has_image_signature(entry.path):
        return None
    return "neither an image extension nor an image signature"


def _has_image_signature(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            start = file.read(16)
    except OSError:
        return False
    return start.startswith(_SIGNATURES) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")
