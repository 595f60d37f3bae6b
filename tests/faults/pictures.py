"""Damaged pictures of every format that Pillow writes here, through the converter's decode.

Each gives pixels or an ImageError of one line; in a bounded time, and in bounded memory. A few are small
files of very many pixels.
"""

import io
import random
import resource
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

from precache import ImageError, Recipe
from precache.pictures import images
from tests.faults import mutations, nursery
from tests.faults.tally import RIGHT, Outcome

_MOST_BYTES = 3 << 29  # 100 million pixels of four bytes, and a copy
_ADDRESS_BYTES = 5 << 30
CASE_S, CHUNK = 20.0, 50
_SIDE = 32
_BOMBS, _BOMB_EACH = 2, 400
_PNG = b"\x89PNG\r\n\x1a\n"
_WAYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("RGB", "JPEG", {"quality": 95}), ("RGB", "JPEG", {"quality": 60, "subsampling": 2}),
    ("RGB", "JPEG", {"progressive": True}), ("RGB", "JPEG", {"restart_marker_rows": 1}),
    ("RGB", "JPEG", {"exif": "turned"}), ("L", "JPEG", {}), ("CMYK", "JPEG", {}),
    ("RGB", "PNG", {}), ("RGBA", "PNG", {"pnginfo": "texts"}), ("P", "PNG", {"transparency": 3}),
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


def prepare(world: Path) -> None:
    for number, (name, data) in enumerate([*_write_bombs(), *_write_all()]):
        (world / f"{number:02} {name}").write_bytes(data)


def load(world: Path) -> Pictures:
    return [(path.name[3:], path.read_bytes()) for path in sorted(world.iterdir())]


def warm(world: Pictures) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))


def case(world: Pictures, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    bombs, pictures = world[:_BOMBS], world[_BOMBS:]
    name, data = draw.choice(pictures) if seed % _BOMB_EACH else bombs[seed // _BOMB_EACH % _BOMBS]
    spoilt = mutations.spoil(data, draw, draw.choice(pictures)[1]) if seed % _BOMB_EACH else data
    if data.startswith(_PNG) and draw.random() < 0.6:
        spoilt = _with_checksums(spoilt)
    how = replace(
        Recipe(format="shards", size=_SIDE).rendering,
        fit=draw.choice(("crop", "crop", "pad", "stretch")),
        allow_truncated=draw.random() < 0.2,
        scaled_decode=draw.random() < 0.2,
    )
    nursery.say(name)
    Path("/proc/self/clear_refs").write_text("5")  # the most memory so far is that of now
    try:
        pixels, _ = images.render(spoilt, "picture", how)
    except ImageError as error:
        if "\n" in str(error) or len(str(error)) > 1000:
            return Outcome(
                "traceback", f"{name}: an error of {len(str(error))} characters: {str(error)[:100]!r}"
            )
        outcome = Outcome("clean")
    except BaseException as error:
        return Outcome("traceback", f"{name}: {nursery.describe(error)}")
    else:
        outcome = RIGHT
        if pixels.shape != (_SIDE, _SIDE, 3) or pixels.dtype != np.uint8:
            return Outcome("wrong", f"{name}: {pixels.dtype} {pixels.shape}")
    if (most := _most_memory()) > _MOST_BYTES:
        return Outcome("crash", f"{name}: {len(spoilt):,} bytes took {most / 2**30:.1f} GiB")
    return outcome


def _with_checksums(png: bytes) -> bytes:
    """The PNG with its chunks' checksums made to fit: decoders look no further at one that does not."""
    fixed, place = bytearray(png), len(_PNG)
    while place + 12 <= len(fixed):
        stop = place + 8 + int.from_bytes(fixed[place : place + 4], "big")
        if stop + 4 > len(fixed):
            break
        fixed[stop : stop + 4] = zlib.crc32(fixed[place + 4 : stop]).to_bytes(4, "big")
        place = stop + 4
    return bytes(fixed)


def _most_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _write_bombs() -> Iterator[tuple[str, bytes]]:
    """PNGs of grey with transparency that are one colour: less than a MiB each."""
    for width, height in ((13_000, 13_000), (1, 170_000_000)):
        packer = zlib.compressobj(9)
        row, rows = bytes(1 + 2 * width), max(1, (1 << 20) // (1 + 2 * width))
        packed = [packer.compress(row * min(rows, height - first)) for first in range(0, height, rows)]
        header = struct.pack(">IIBBBBB", width, height, 8, 4, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", b"".join([*packed, packer.flush()])), (b"IEND", b""))
        whole = b"".join(struct.pack(">I", len(c)) + kind + c + bytes(4) for kind, c in chunks)
        yield f"PNG of {width:,} x {height:,}", _with_checksums(_PNG + whole)


def _write_all() -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of a picture of each kind; those that this Pillow cannot write are left out."""
    rng = np.random.default_rng(3)
    noise = Image.fromarray(rng.integers(0, 256, (9, 11, 3), np.uint8)).resize(
        (44, 36), Image.Resampling.BICUBIC
    )
    for mode, form, options in _WAYS:
        image = (
            Image.fromarray(rng.integers(0, 65536, (36, 44), np.uint16))
            if mode == "I;16"
            else noise.convert(mode)
        )
        settings = dict(options)
        if settings.get("save_all"):
            settings["append_images"] = [image.rotate(90), image.rotate(180)]
        if "exif" in settings:
            exif = Image.Exif()
            exif[0x0112] = 6
            settings["exif"] = exif
        if "pnginfo" in settings:
            texts = PngImagePlugin.PngInfo()
            texts.add_text("Comment", "long " * 400, zip=True)
            texts.add_itxt("Title", "short")
            settings["pnginfo"] = texts
        buffer = io.BytesIO()
        try:
            image.save(buffer, form, **settings)
        except (KeyError, OSError, ValueError):
            continue
        yield f"{form} {mode} {' '.join(options)}".strip(), buffer.getvalue()
