"""Attack `pictures`: the converter decodes damaged pictures of every format that Pillow can write here.

Each has to give pixels or an ImageError of one line, within bounded time and memory. A few are small files of
very many pixels.
"""

import io
import random
import re
import resource
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, PngImagePlugin

from precache import ImageError, Recipe
from precache.pictures import images
from tests.faults import mutations
from tests.faults.runner import CLEAN, RIGHT, Attack, CaseFailure, Outcome, announce

_MAX_BYTES = 3 << 29  # peak memory of a case: 100 million pixels of four bytes, and a copy
_ADDRESS_BYTES = 5 << 30
_SIDE = 32
_BOMBS, _BOMB_EVERY = 2, 400  # how many small files of many pixels; one case in so many is of them
_PNG = b"\x89PNG\r\n\x1a\n"
_TURNED, _TEXTS = Image.Exif(), PngImagePlugin.PngInfo()
_TURNED[ExifTags.Base.Orientation] = 6
_TEXTS.add_text("Comment", "long " * 400, zip=True)
_TEXTS.add_itxt("Title", "short")
_KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("RGB", "JPEG", {"quality": 95}), ("RGB", "JPEG", {"quality": 60, "subsampling": 2}),
    ("RGB", "JPEG", {"progressive": True}), ("RGB", "JPEG", {"restart_marker_rows": 1}),
    ("RGB", "JPEG", {"exif": _TURNED}), ("L", "JPEG", {}), ("CMYK", "JPEG", {}),
    ("RGB", "PNG", {}), ("RGBA", "PNG", {"pnginfo": _TEXTS}), ("P", "PNG", {"transparency": 3}),
    ("1", "PNG", {}), ("LA", "PNG", {}), ("I;16", "PNG", {}), ("RGB", "PNG", {"save_all": True}),
    ("P", "GIF", {}), ("P", "GIF", {"save_all": True}),
    ("RGB", "WEBP", {}), ("RGBA", "WEBP", {"lossless": True}), ("RGB", "WEBP", {"save_all": True}),
    ("RGB", "TIFF", {}), ("RGB", "TIFF", {"compression": "tiff_lzw"}),
    ("L", "TIFF", {"compression": "tiff_adobe_deflate"}), ("RGB", "TIFF", {"compression": "jpeg"}),
    ("1", "TIFF", {"compression": "group4"}), ("I;16", "TIFF", {}), ("F", "TIFF", {}), ("CMYK", "TIFF", {}),
    ("RGB", "BMP", {}), ("P", "BMP", {}), ("RGB", "PPM", {}), ("L", "PPM", {}), ("RGBA", "ICO", {}),
    ("RGB", "TGA", {"compression": "tga_rle"}), ("RGB", "JPEG2000", {}), ("RGB", "AVIF", {}),
    ("RGB", "DDS", {}), ("RGB", "PCX", {}), ("RGB", "SGI", {}), ("RGB", "EPS", {}),
)  # fmt: skip
Pictures = list[tuple[str, bytes]]


def _prepare(folder: Path) -> Pictures:
    return [*_write_bombs(), *_write_all()]


def _limit_memory(setup: Pictures) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))


def _spoil(setup: Pictures, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    bombs, pictures = setup[:_BOMBS], setup[_BOMBS:]
    name, data = draw.choice(pictures) if seed % _BOMB_EVERY else bombs[seed // _BOMB_EVERY % _BOMBS]
    spoilt = mutations.spoil(data, draw, draw.choice(pictures)[1]) if seed % _BOMB_EVERY else data
    if data.startswith(_PNG) and draw.random() < 0.6:
        spoilt = _with_checksums(spoilt)
    rendering = replace(
        Recipe(format="shards", size=_SIDE).rendering,
        fit=draw.choice(("crop", "crop", "pad", "stretch")),
        allow_truncated=draw.random() < 0.2,
        scaled_decode=draw.random() < 0.2,
    )
    announce(f"{name}, {len(spoilt):,} bytes")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory
    outcome = RIGHT
    try:
        pixels, _ = images.render(spoilt, "picture", rendering)
        if pixels.shape != (_SIDE, _SIDE, 3) or pixels.dtype != np.uint8:
            raise CaseFailure("wrong", f"{pixels.dtype} {pixels.shape}")
    except ImageError as error:
        if "\n" in str(error) or len(str(error)) > 1000:
            raise CaseFailure("traceback", f"{len(str(error))} characters: {str(error)[:100]!r}") from error
        outcome = CLEAN
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if int(peak_kib) * 1024 > _MAX_BYTES:
        raise CaseFailure("crash", f"took {int(peak_kib) / 2**20:.1f} GiB")
    return outcome


def _with_checksums(png: bytes) -> bytes:
    """Correct the checksums of a PNG's chunks: decoders look no further than a wrong one."""
    fixed, place = bytearray(png), len(_PNG)
    while place + 12 <= len(fixed):
        stop = place + 8 + int.from_bytes(fixed[place : place + 4], "big")
        if stop + 4 > len(fixed):
            break
        fixed[stop : stop + 4] = zlib.crc32(fixed[place + 4 : stop]).to_bytes(4, "big")
        place = stop + 4
    return bytes(fixed)


def _write_bombs() -> Iterator[tuple[str, bytes]]:
    """Write PNGs of very many pixels of one grey with transparency, less than a MiB each: (name, bytes)."""
    for width, height in ((13_000, 13_000), (1, 170_000_000)):
        packer = zlib.compressobj(9)
        row, rows = bytes(1 + 2 * width), max(1, (1 << 20) // (1 + 2 * width))
        packed = [packer.compress(row * min(rows, height - first)) for first in range(0, height, rows)]
        header = struct.pack(">IIBBBBB", width, height, 8, 4, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", b"".join([*packed, packer.flush()])), (b"IEND", b""))
        whole = b"".join(struct.pack(">I", len(c)) + kind + c + bytes(4) for kind, c in chunks)
        yield f"PNG of {width:,} x {height:,}", _with_checksums(_PNG + whole)


def _write_all() -> Iterator[tuple[str, bytes]]:
    """Write a picture of each kind that this Pillow can write: (name, bytes)."""
    rng = np.random.default_rng(3)
    noise = Image.fromarray(rng.integers(0, 256, (9, 11, 3), np.uint8))
    noise = noise.resize((44, 36), Image.Resampling.BICUBIC)
    deep = Image.fromarray(rng.integers(0, 65536, (36, 44), np.uint16))
    for mode, form, options in _KINDS:
        image = deep if mode == "I;16" else noise.convert(mode)
        more = {"append_images": [image.rotate(90), image.rotate(180)]} if "save_all" in options else {}
        buffer = io.BytesIO()
        try:
            image.save(buffer, form, **options, **more)
        except (KeyError, OSError, ValueError):
            continue
        yield f"{form} {mode} {' '.join(options)}".strip(), buffer.getvalue()


ATTACKS = {"pictures": Attack(_prepare, _spoil, prepare_child=_limit_memory, case_s=20, chunk=50)}
