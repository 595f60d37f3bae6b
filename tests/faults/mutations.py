"""Damage to bytes and to files, drawn from a seed."""

import os
import random
import re
import struct
from pathlib import Path

_NUMBERS = (0, 1, -1, 127, 255, 256, *(2**n - less for n in (15, 16, 31, 32, 62, 63, 64) for less in (0, 1)))
_JSON = (
    b"-1", b"0", b"1e999", b"-0.0", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b'"\\ud800"', b'"../x"',
    b'"/etc"', b"1" + b"0" * 30, b"1" + b"0" * 5000, b"9223372036854775807", b"-9223372036854775809",
    b"[" * 100_000, b'{"a":' * 50_000, b'"' + b"a" * 70_000 + b'"', b"4503599627370496",
    b'"train"', b'"dataset.json"',
)  # fmt: skip
_LITERAL = re.compile(rb'-?\d+(?:\.\d+)?|"(?:[^"\\]|\\.)*"')


def spoil(data: bytes, draw: random.Random, other: bytes = b"") -> bytes:
    """`data` with one to three changes; never `data` itself. `other` is spliced in."""
    spoilt = data
    while spoilt == data:
        for _ in range(draw.choice((1, 1, 2, 3))):
            spoilt = draw.choice(_WAYS)(spoilt, draw, other)
    return spoilt


def _flip(data: bytes, draw: random.Random, other: bytes) -> bytes:
    if not data:
        return b"\0"
    place = _place(data, draw)
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def _byte(data: bytes, draw: random.Random, other: bytes) -> bytes:
    place = _place(data, draw)
    return data[:place] + bytes([draw.choice((0, 0xFF, draw.randrange(256)))]) + data[place + 1 :]


def _cut(data: bytes, draw: random.Random, other: bytes) -> bytes:
    return data[: _place(data, draw)]


def _cut_out(data: bytes, draw: random.Random, other: bytes) -> bytes:
    start = _place(data, draw)
    return data[:start] + data[start + draw.choice((1, 2, 8, 64, 512, 4096)) :]


def _double(data: bytes, draw: random.Random, other: bytes) -> bytes:
    start = _place(data, draw)
    stop = start + draw.choice((1, 4, 16, 512, 4096))
    return data[:stop] + data[start:stop] + data[stop:]


def _append(data: bytes, draw: random.Random, other: bytes) -> bytes:
    return data + draw.choice((b"\0", b"\n", b"}", other[:1000], bytes(4096), draw.randbytes(20)))


def _splice(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """The start of one, the end of the other; or a piece of it in place."""
    if draw.random() < 0.5:
        return data[: _place(data, draw)] + other[_place(other, draw) :]
    piece = other[(start := _place(other, draw)) : start + draw.choice((4, 32, 256))]
    place = _place(data, draw)
    return data[:place] + piece + data[place + len(piece) :]


def _zeros(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """As disks lose blocks."""
    start = _place(data, draw)
    count = min(draw.choice((1, 16, 512, 4096)), len(data) - start)
    return data[:start] + bytes(count) + data[start + count :]


def _number(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """Another number where a length, a count or an offset may stand."""
    value, width = draw.choice(_NUMBERS), draw.choice("BHIQ")
    packed = struct.pack(draw.choice("<>") + width, value & (1 << 8 * struct.calcsize(width)) - 1)
    place = _place(data, draw)
    return data[:place] + packed + data[place + len(packed) :]


def spoil_json(data: bytes, draw: random.Random, other: bytes = b"") -> bytes:
    """Text with a number or a string of it replaced, or damage as to any other bytes."""
    literals = list(_LITERAL.finditer(data))
    if not literals or draw.random() < 0.4:
        return spoil(data, draw, other)
    while True:
        found = draw.choice(literals)
        new = draw.choice(_JSON) if draw.random() < 0.7 else draw.choice(literals)[0]
        if new != found[0]:
            return data[: found.start()] + new + data[found.end() :]


def _place(data: bytes, draw: random.Random) -> int:
    """Anywhere, but half of the time where headers are."""
    if not data:
        return 0
    return draw.randrange(min(len(data), draw.choice((64, 600, len(data), len(data)))))


_WAYS = (_flip, _flip, _byte, _cut, _cut_out, _double, _append, _splice, _zeros, _number, _number)


def replace_file(path: Path, draw: random.Random, elsewhere: Path) -> str:
    """Put something else in the place of a file; what, in a word. `elsewhere` is an empty folder."""
    kind = draw.choice(
        ("deleted", "empty", "fifo", "folder", "loop", "dangling", "device", "swapped", "linked")
    )
    if kind == "swapped":
        others = sorted(p for p in path.parent.iterdir() if p.is_file() and p != path)
        other = draw.choice(others)
        temporary = elsewhere / "swap"
        path.rename(temporary)
        other.rename(path)
        temporary.rename(other)
        return f"swapped with {other.name}"
    kept = elsewhere / "kept"
    path.rename(kept)
    if kind == "empty":
        path.touch()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "device":
        path.symlink_to(draw.choice(("/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem")))
    elif kind == "linked":  # what was there, by a link: allowed
        path.symlink_to(kept)
    return kind


def content_of(path: Path) -> bytes | None:
    """The bytes of a regular file; None if it is something else, or not there."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else None
