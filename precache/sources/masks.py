"""A source whose pictures have masks: in a tree, PHOTOS/cat/1.jpg and MASKS/cat/1.png, or in a table."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from precache.dataset.columns import Column, Ints
from precache.errors import ImageError, SettingError, SourceError
from precache.pictures import masks
from precache.pictures.images import Rendering
from precache.pictures.jpeg import Pixels
from precache.pictures.reading import read_picture, status_of
from precache.sources.base import SampleRef, Scan, Source
from precache.storage.urls import Location

ReadMask: TypeAlias = Callable[[SampleRef, int], tuple[bytes | Image.Image, str]]
"""(sample, most pixels) -> its mask, and the mask's name in messages; ImageError where there is none."""
EXTENSIONS = (".png", ".tif", ".tiff", ".bmp", ".gif")


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

    They lie under the paths of the pictures but for the extension; or a table has a column of their paths,
    relative to `folder` as those of its pictures are.

    Attributes:
        column: the name of that column.
        is_field: whether it is a field, too.
        names: its values, once it is scanned: a sample's `place` is its row here.
        places: int64 [n], of the samples in the table.
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
        masked = replace(self, source=scan.source)
        samples = scan.samples
        if self.column is not None:
            names = samples.fields[self.column]
            if names.kind != "text":
                raise SettingError(
                    f"--mask {self.column}: expected paths of masks in {self.root}, got numbers"
                )
            masked = replace(masked, names=names, places=samples.places)
            samples = replace(samples, places=np.arange(len(samples)), fields={**samples.fields})
            if not self.is_field:
                del samples.fields[self.column]
        digest, found = hashlib.sha256(scan.digest.encode()), 0
        for ref in samples:
            path, size = masked._find(ref)
            found += size is not None
            digest.update(os.fsencode(path) + b"\0%d\0" % (-1 if size is None else size))
        if not found:
            first = os.path.join(self.folder, masked._find(samples[0])[0])
            raise SourceError(f"{self.root}: none of its pictures has a mask; the first would be {first}")
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
        """Name of the mask in the folder, and its bytes; the name that is tried first, if there is none."""
        stem = os.path.splitext(ref.path)[0]
        names = [stem + extension for extension in EXTENSIONS]
        if self.names is not None:
            names = [str(self.names.value(ref.place))]
        elif os.path.isabs(stem):  # that would be the picture itself
            return names[0], None
        for name in names:
            if (status := status_of(os.path.join(self.folder, name))) is not None:
                return name, status[0]
        return names[0], None
