"""A source whose pictures have masks: in a tree, PHOTOS/cat/1.jpg and MASKS/cat/1.png, or in a table."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from precache.dataset.columns import Column, Ints
from precache.errors import ImageError, SettingError, SourceError
from precache.pictures import masks
from precache.pictures.images import Rendering
from precache.pictures.jpeg import Pixels
from precache.pictures.reading import read_picture, read_with_retries, status_of
from precache.sources.base import SampleRef, Samples, Scan, Source
from precache.storage.urls import Location

ReadMask: TypeAlias = Callable[[SampleRef, int], tuple[bytes | Image.Image, str]]
"""(sample, most pixels) -> its mask, and the mask's name in messages; ImageError where there is none."""
EXTENSIONS = (".png", ".tif", ".tiff", ".bmp", ".gif")
_FOLDERS = 64  # whose masks are known at a time: most sources list their pictures folder by folder


def reader_of(source: Source) -> ReadMask | None:
    """How masks are read from a source; None where it has none."""
    read: ReadMask | None = getattr(source, "read_mask", None)
    return read


def render_mask(source: Source, ref: SampleRef, size: tuple[int, int], how: Rendering) -> Pixels | None:
    """What is stored of the mask of a picture, see `masks.render`; None where the source has no masks.

    Args:
        size: width and height of the upright picture.

    Raises:
        ImageError: there is none for this picture, or none that fits it.
        SourceError: it cannot be read, or there is not enough memory.
    """
    read = reader_of(source)
    if read is None:
        return None
    data, name = read(ref, how.max_pixels)
    return masks.render(data, source.where(ref), name, size, how)


@dataclass(frozen=True, slots=True)
class MaskedSource:
    """`source`, and the masks of its pictures in `folder`.

    They lie under the paths of the pictures with another extension, or with one more: that of `1.jpg` is
    `1.png`, `1.PNG` or `1.jpg.png`. Or a table has a column of their paths, relative to `folder` as those of
    its pictures are.

    Attributes:
        column: the name of that column.
        is_field: whether it is a field, too.
        names: of the masks in `folder`, once it is scanned: a sample's `place` is its row here.
        places: int64 [n], of the samples in the source.
    """

    source: Source
    folder: Path
    column: str | None = None
    is_field: bool = False
    names: Column | None = None
    places: Ints | None = None

    @property
    def root(self) -> Location:
        return self.source.root

    @property
    def paths(self) -> tuple[Location, ...]:
        """The paths of the pictures, and the folder of the masks where it is one of its own."""
        return self.source.paths if self.column is not None else (*self.source.paths, self.folder)

    def scan(self) -> Scan:
        """Of the pictures; its digest is that of paths and sizes of the masks, too."""
        if self.column is None and not self.folder.is_dir():
            raise SourceError(
                f"{os.path.abspath(self.folder)}: no folder of masks; name it with --mask (a path that is "
                f"not absolute begins in the folder where the command runs)"
            )
        if self.column is None and os.path.realpath(self.folder) == os.path.realpath(str(self.root)):
            raise SourceError(f"{self.folder}: is the folder of the pictures; name that of their masks")
        scan = self.source.scan()
        samples = scan.samples
        if self.column is None:
            found_names = [os.fsencode(name) for name in self._found_names(samples)]
            ends = np.cumsum([len(name) for name in found_names], dtype=np.int64)
            names = Column(np.frombuffer(b"".join(found_names), np.uint8), ends)
        else:
            names = samples.fields[self.column]
            if names.kind != "text":
                raise SettingError(
                    f"--mask {self.column}: expected paths of masks in {self.root}, got numbers"
                )
        masked = replace(self, source=scan.source, names=names, places=samples.places)
        samples = replace(samples, places=np.arange(len(samples)), fields={**samples.fields})
        if self.column is not None and not self.is_field:
            del samples.fields[self.column]
        digest, found = hashlib.sha256(scan.digest.encode()), 0
        for ref in samples:
            path, size = masked._find(ref)
            found += size is not None
            digest.update(os.fsencode(path) + b"\0%d\0" % (-1 if size is None else size))
        if not found:
            first = os.path.join(self.folder, masked._find(samples[0])[0])
            raise SourceError(
                f"{self.root}: none of its pictures has a mask; the first would be {first}; where masks have "
                f"other names, a table with a column of their paths tells which (--mask COLUMN)"
            )
        return replace(scan, source=masked, samples=samples, digest=digest.hexdigest())

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        return self.source.read(self._in_source(ref), max_pixels)

    def where(self, ref: SampleRef) -> str:
        return self.source.where(self._in_source(ref))

    def read_mask(self, ref: SampleRef, max_pixels: int) -> tuple[bytes, str]:
        """The file of the mask, and its name in the folder.

        Raises:
            ImageError: there is none.
            SourceError: it cannot be read.
        """
        name, size = self._find(ref)
        if size is None:
            raise ImageError(self.where(ref), f"has no mask {os.path.join(self.folder, name)}")
        return read_picture(os.path.join(self.folder, name), max_pixels), name

    def _in_source(self, ref: SampleRef) -> SampleRef:
        return ref if self.places is None else replace(ref, place=int(self.places[ref.place]))

    def _find(self, ref: SampleRef) -> tuple[str, int | None]:
        """Name of the mask in the folder, and its bytes; None: there is none of this name."""
        assert self.names is not None
        name = os.fsdecode(self.names.array(ref.place).tobytes())
        status = (
            None
            if os.path.isabs(name) and self.column is None
            else status_of(os.path.join(self.folder, name))
        )
        return name, None if status is None else status[0]

    def _found_names(self, samples: Samples) -> Iterator[str]:
        """The name in the folder of each sample's mask; where there is none, the one that is tried first."""
        listed = lru_cache(_FOLDERS)(_list_masks)
        for ref in samples:
            folder, name = os.path.split(ref.path)
            stem = os.path.splitext(name)[0]
            found = {} if os.path.isabs(folder) else listed(os.path.join(self.folder, folder))
            yield os.path.join(folder, found.get(stem) or found.get(name) or stem + EXTENSIONS[0])


def _list_masks(folder: str) -> dict[str, str]:
    """The masks in a folder by their names without the extension: of several, one of the first extension."""
    try:
        names = read_with_retries(lambda: os.listdir(folder), folder)
    except SourceError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return {}
        raise
    masks: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        stem, extension = os.path.splitext(name)
        if extension.lower() in EXTENSIONS:
            masks.setdefault(stem, []).append((EXTENSIONS.index(extension.lower()), name))
    return {stem: min(known)[1] for stem, known in masks.items()}
