"""Sources whose pictures have masks, in a second tree (PHOTOS/cat/1.jpg, MASKS/cat/1.png) or in a table."""

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
"""Function (sample, max_pixels) -> (mask, its name in messages); raises ImageError if there is none."""
EXTENSIONS = (".png", ".tif", ".tiff", ".bmp", ".gif")
_CACHED_FOLDERS = 64  # lists of masks kept at a time: most sources list their pictures folder by folder


def mask_reader(source: Source) -> ReadMask | None:
    """Return the function that reads the masks of a source; None if it has no masks."""
    read: ReadMask | None = getattr(source, "read_mask", None)
    return read


def render_mask(source: Source, ref: SampleRef, size: tuple[int, int], rendering: Rendering) -> Pixels | None:
    """Return the mask of a picture as it is stored, see `masks.render`; None if the source has no masks.

    Args:
        size: width and height of the upright picture.

    Raises:
        ImageError: the picture has no mask, or none that fits it.
        SourceError: the mask cannot be read, or there is not enough memory.
    """
    read = mask_reader(source)
    if read is None:
        return None
    mask, mask_name = read(ref, rendering.max_pixels)
    return masks.render(mask, source.where(ref), mask_name, size, rendering)


@dataclass(frozen=True, slots=True)
class MaskedSource:
    """A source of pictures together with a folder of their masks.

    A mask has the path of its picture with another extension, or with a second one: the mask of `1.jpg` is
    `1.png`, `1.PNG` or `1.jpg.png`. Or a table has a column with the paths of masks, relative to `folder`.

    Attributes:
        source: source of the pictures.
        folder: folder of the masks.
        column: name of the column of paths; None if masks are found by the paths of their pictures.
        is_field: whether that column is a field, too.
        names: paths of the masks in `folder`, after the scan; `place` of a sample is its row here.
        places: int64 [n], `place` of each sample in `source`.
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
        """Paths of the pictures, and the folder of the masks, unless these lie beside the pictures."""
        return self.source.paths if self.column is not None else (*self.source.paths, self.folder)

    def scan(self) -> Scan:
        """Scan the pictures; the digest also covers paths and sizes of the masks."""
        if self.column is None and not self.folder.is_dir():
            raise SourceError(
                "no folder of masks",
                path=os.path.abspath(self.folder),
                remedy=(
                    "name it with --mask (a path that is not absolute begins in the folder where the command "
                    "runs)"
                ),
            )
        if self.column is None and os.path.realpath(self.folder) == os.path.realpath(str(self.root)):
            raise SourceError(
                "is the folder of the pictures", path=self.folder, remedy="name that of their masks"
            )
        scan = self.source.scan()
        samples = scan.samples
        if self.column is None:
            encoded_names = [os.fsencode(name) for name in self._find_names(samples)]
            ends = np.cumsum([len(name) for name in encoded_names], dtype=np.int64)
            names = Column(np.frombuffer(b"".join(encoded_names), np.uint8), ends)
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
        digest = hashlib.sha256(scan.digest.encode())
        mask_count = 0
        for ref in samples:
            name, size = masked._find(ref)
            if size is None:
                size = -1
            else:
                mask_count += 1
            digest.update(os.fsencode(name) + b"\0%d\0" % size)
        if not mask_count:
            first_mask = os.path.join(self.folder, masked._find(samples[0])[0])
            raise SourceError(
                f"none of its pictures has a mask; the first would be {first_mask}",
                path=self.root,
                remedy=(
                    "where masks have other names, a table with a column of their paths tells which "
                    "(--mask COLUMN)"
                ),
            )
        return replace(scan, source=masked, samples=samples, digest=digest.hexdigest())

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        return self.source.read(self._source_ref(ref), max_pixels)

    def where(self, ref: SampleRef) -> str:
        return self.source.where(self._source_ref(ref))

    def read_mask(self, ref: SampleRef, max_pixels: int) -> tuple[bytes, str]:
        """Return the file of the mask, and its path in the folder.

        Raises:
            ImageError: there is no such file.
            SourceError: the file cannot be read.
        """
        name, size = self._find(ref)
        if size is None:
            raise ImageError(self.where(ref), f"has no mask {os.path.join(self.folder, name)}")
        return read_picture(os.path.join(self.folder, name), max_pixels), name

    def _source_ref(self, ref: SampleRef) -> SampleRef:
        """Return the sample with its `place` in the source of the pictures."""
        return ref if self.places is None else replace(ref, place=int(self.places[ref.place]))

    def _find(self, ref: SampleRef) -> tuple[str, int | None]:
        """Return the path of a sample's mask in the folder, and its size in bytes; None if it is missing."""
        assert self.names is not None
        name = os.fsdecode(self.names.row_array(ref.place).tobytes())
        if os.path.isabs(name) and self.column is None:  # its picture lies outside the source's folder
            return name, None
        status = status_of(os.path.join(self.folder, name))
        return name, None if status is None else status[0]

    def _find_names(self, samples: Samples) -> Iterator[str]:
        """Yield the path of each sample's mask in the folder; if it has none, of the first that would fit."""
        list_masks = lru_cache(_CACHED_FOLDERS)(_list_masks)
        for ref in samples:
            folder, name = os.path.split(ref.path)
            stem = os.path.splitext(name)[0]
            mask_of = {} if os.path.isabs(folder) else list_masks(os.path.join(self.folder, folder))
            yield os.path.join(folder, mask_of.get(stem) or mask_of.get(name) or stem + EXTENSIONS[0])


def _list_masks(folder: str) -> dict[str, str]:
    """Return the masks in a folder by name without extension; of several, the first of `EXTENSIONS`."""
    try:
        names = read_with_retries(lambda: os.listdir(folder), folder)
    except SourceError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return {}
        raise
    candidates: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        stem, extension = os.path.splitext(name)
        if extension.lower() in EXTENSIONS:
            candidates.setdefault(stem, []).append((EXTENSIONS.index(extension.lower()), name))
    return {stem: min(ranked_names)[1] for stem, ranked_names in candidates.items()}
