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


_WAYS = (
    "flip", "flip", "byte", "cut", "cut out", "double", "append", "splice", "insert", "zeros", "number",
    "number",
)  # fmt: skip


def spoil(data: bytes, draw: random.Random, other: bytes = b"") -> bytes:
    """Return `data` with one to three random changes, and never `data` itself.

    Args:
        other: bytes that may be spliced in.
    """
    spoilt = data
    while spoilt == data:
        for _ in range(draw.choice((1, 1, 2, 3))):
            spoilt = _change(spoilt, draw, other)
    return spoilt


def _change(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """Return `data` with one random change, or as it is."""
    place = _place(data, draw)
    before, behind = data[:place], data[place:]
    match draw.choice(_WAYS):
        case "flip":
            new = bytes([(behind or b"\1")[0] ^ 1 << draw.randrange(8)])
        case "byte":
            new = bytes([draw.choice((0, 0xFF, draw.randrange(256)))])
        case "cut":
            return before
        case "cut out":
            return before + behind[draw.choice((1, 2, 8, 64, 512, 4096)) :]
        case "double":
            return before + behind[: draw.choice((1, 4, 16, 512, 4096))] + behind
        case "append":
            return data + draw.choice((b"\0", b"\n", b"}", other[:1000], bytes(4096), draw.randbytes(20)))
        case "splice":
            return before + other[_place(other, draw) :]
        case "insert":
            new = other[_place(other, draw) :][: draw.choice((4, 32, 256))]
        case "zeros":  # as of blocks that a disk has lost
            new = bytes(min(draw.choice((1, 16, 512, 4096)), len(behind)))
        case _:  # another number where a length, a count or an offset may stand
            kind, value = draw.choice("<>") + draw.choice("BHIQ"), draw.choice(_NUMBERS)
            new = struct.pack(kind, value & (1 << 8 * struct.calcsize(kind)) - 1)
    return before + new + behind[len(new) :]


def spoil_json(data: bytes, draw: random.Random, other: bytes = b"") -> bytes:
    """Return JSON with a number or a string replaced, or with the changes of `spoil`."""
    literals = list(_LITERAL.finditer(data))
    if not literals or draw.random() < 0.4:
        return spoil(data, draw, other)
    while True:
        literal = draw.choice(literals)
        new = draw.choice(_JSON) if draw.random() < 0.7 else draw.choice(literals)[0]
        if new != literal[0]:
            return data[: literal.start()] + new + data[literal.end() :]


def _place(data: bytes, draw: random.Random) -> int:
    """Draw an offset, half of the time near the start, where headers are."""
    if not data:
        return 0
    return draw.randrange(min(len(data), draw.choice((64, 600, len(data), len(data)))))


def replace_file(path: Path, draw: random.Random, elsewhere: Path) -> str:
    """Put something else in the place of a file; return what, in a word.

    Args:
        elsewhere: an empty folder, which gets the file.
    """
    moved = elsewhere / "kept"
    devices = ("/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem")
    links = {"loop": path.name, "dangling": "nowhere", "device": draw.choice(devices), "linked": str(moved)}
    kind = draw.choice(("deleted", "empty", "fifo", "folder", "swapped", *links))
    others = sorted(other for other in path.parent.iterdir() if other.is_file() and other != path)
    path.rename(moved)
    if kind in links:  # one of them leads to the file itself, which is no fault
        path.symlink_to(links[kind])
    elif kind == "empty":
        path.touch()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "swapped":
        other = draw.choice(others)
        other.rename(path)
        moved.rename(other)
    return kind
