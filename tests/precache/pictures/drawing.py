"""Pictures and picture files for tests."""

import io
import os
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from precache.pictures import images
from precache.pictures.images import Size
from precache.pictures.jpeg import Pixels
from tests.command import ROOT

with suppress(ImportError):
    import pillow_heif

    pillow_heif.register_heif_opener()  # it encodes, too


def noise(*shape: int, dtype: Any = np.uint8, seed: int = 0) -> np.ndarray:
    """Draw random pixels, [height, width] or [height, width, channels]."""
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max + 1, shape, dtype=dtype)


def encode_image(picture: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """Encode a picture as a file of this kind; `exif` may be a number, its orientation."""
    if isinstance(options.get("exif"), int):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = options["exif"]
        options["exif"] = exif
    buffer = io.BytesIO()
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def load(path: str, size: Size) -> Pixels:
    """Load the picture at `path`, cropped to `size` as torchvision does."""
    return images.render(images.read_bytes(path), path, images.Rendering(size=size))[0]


def chunk(kind: bytes, content: bytes) -> bytes:
    """Make a chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, rows: bytes, depth: int = 8, colour: int = 6) -> bytes:
    """Make a PNG whose header states this size, whatever the size of `rows`."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def tiff(data: bytes, *tags: tuple[int, int]) -> bytes:
    """Make a TIFF with these tags; a value of -1 becomes the position of `data`."""
    start = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, start if value < 0 else value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def error_within_memory(memory_bytes: int, path: Path) -> str:
    """Error, 'TYPE MESSAGE', of rendering a picture in a process that may allocate so much more memory."""
    code = f"""
import resource, sys; from precache.pictures import images
data = images.read_bytes(sys.argv[1])
used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {memory_bytes},) * 2)
try: images.render(data, 'x', images.Rendering(size=8))
except Exception as error: print(type(error).__name__, error)
"""
    command, environment = [sys.executable, "-c", code, str(path)], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
