"""Members of a tar: https://www.gnu.org/software/tar/manual/html_node/Standard.html, GNU and pax headers.

Each member is a header of 512 bytes and its content, padded to blocks of that size. What does not fit into
the header, such as a long name, comes before it, as content of a member of its own. Two empty blocks are the
end.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from precache.errors import printable
from precache.sources.members import FILE, FOLDER, HARD_LINK, LINK, OTHER, Member
from precache.sources.window import Reader, Window

_BLOCK = 512
_EMPTY = bytes(_BLOCK)
_NAME, _SIZE, _SUM, _TYPE = slice(0, 100), slice(124, 136), slice(148, 156), slice(156, 157)
_TARGET, _MAGIC, _PREFIX = slice(157, 257), slice(257, 263), slice(345, 500)
_KINDS = {b"0": FILE, b"\0": FILE, b"7": FILE, b"1": HARD_LINK, b"2": LINK, b"5": FOLDER, b"D": FOLDER}
_EMPTY_KINDS = (b"1", b"2", b"3", b"4", b"5", b"6")  # no content follows, whatever size the header says
_LONG_NAME, _LONG_TARGET, _PAX, _PAX_GLOBAL = b"L", b"K", (b"x", b"X"), b"g"
_MOST_HEADER_BYTES = 1 << 20  # of long names and pax records
_REST_BYTES = 1 << 20
_OCTAL = re.compile(rb"[0-7]*")


@dataclass(slots=True)
class _Said:
    """What headers before that of a member say of it."""

    name: bytes | None = None
    target: bytes | None = None
    records: dict[bytes, bytes] = field(default_factory=dict)


def members(window: Window) -> Iterator[Member]:
    """Those of the tar, in its order; `place` is where their content begins.

    Raises:
        SourceError: it is damaged, breaks off, or holds what cannot be read in place.
    """
    position, said = 0, _Said()
    always: dict[bytes, bytes] = {}
    while (header := window.read(position, _BLOCK)) != _EMPTY:
        _check_header(window, header, position)
        kind, size, start = header[_TYPE], _number(window, header, position), position + _BLOCK
        about = kind in (_LONG_NAME, _LONG_TARGET, _PAX_GLOBAL, *_PAX)
        records = {} if about else {**always, **said.records}
        if b"size" in records:
            size = _decimal(window, records[b"size"], position)
        name = said.name or records.get(b"path") or _stored_name(header)
        if kind in _EMPTY_KINDS:
            size = 0
        if start + size > window.size:
            raise window.damaged(
                f"breaks off: {_shown(name)} should end at byte {start + size:,}, and the archive has "
                f"{window.size:,} bytes"
            )
        if about:
            _take(window, said, always, kind, start, size)
        else:
            if kind in (b"S", b"M") or any(key.startswith(b"GNU.sparse") for key in records):
                what = "continues in another archive" if kind == b"M" else "is stored as a sparse file"
                raise window.damaged(f"{_shown(name)} {what}", "unpack it, and convert the folder")
            target = said.target or records.get(b"linkpath") or _text(header[_TARGET])
            is_folder = kind == b"\0" and name.endswith(b"/")  # as tar of before 1988 has it
            yield Member(name, FOLDER if is_folder else _KINDS.get(kind, OTHER), start, size, target)
            said = _Said()
        position = start + size + -size % _BLOCK
    _check_end(window, position)


def content(read: Reader, place: int, size: int) -> bytes:
    """Of a member."""
    return read(place, size)


def _check_header(window: Window, header: bytes, position: int) -> None:
    if len(header) < _BLOCK:
        if position == 0:
            raise window.damaged("is no tar: it is shorter than one header")
        raise window.damaged(f"breaks off at byte {window.size:,}, before the two empty blocks of its end")
    stored = header[_SUM].strip(b" \0")
    wanted = int(stored, 8) if stored and _OCTAL.fullmatch(stored) else -1
    summed = header[: _SUM.start] + b" " * 8 + header[_SUM.stop :]
    # some old programs took bytes for signed numbers
    if wanted != sum(summed) and wanted != sum(byte - (byte & 128) * 2 for byte in summed):
        what = "is no tar" if position == 0 else "is damaged"
        raise window.damaged(f"{what}: expected the header of a member at byte {position:,}, got other bytes")


def _number(window: Window, header: bytes, position: int) -> int:
    """The size: in octal, or in binary where the first bit is set."""
    stored = header[_SIZE]
    if stored[0] == 0x80:
        return int.from_bytes(stored[1:], "big")
    digits = stored.split(b"\0", 1)[0].strip(b" ")
    if not _OCTAL.fullmatch(digits):
        raise window.damaged(f"is damaged: the size of the member at byte {position:,} is no number")
    return int(digits or b"0", 8)


def _decimal(window: Window, digits: bytes, position: int) -> int:
    if not digits.isdigit() or len(digits) > 18:
        raise window.damaged(f"is damaged: the size of the member at byte {position:,} is no number")
    return int(digits)


def _stored_name(header: bytes) -> bytes:
    prefix = _text(header[_PREFIX]) if header[_MAGIC] == b"ustar\0" else b""
    name = _text(header[_NAME])
    return prefix + b"/" + name if prefix else name


def _text(stored: bytes) -> bytes:
    return stored.split(b"\0", 1)[0]


def _take(
    window: Window, said: _Said, always: dict[bytes, bytes], kind: bytes, start: int, size: int
) -> None:
    """Note what a header says of the member behind it, or of all that follow."""
    if size > _MOST_HEADER_BYTES:
        raise window.damaged(f"is damaged: a name of {size:,} bytes at byte {start:,}")
    text = window.read(start, size)
    if kind == _LONG_NAME:
        said.name = _text(text)
    elif kind == _LONG_TARGET:
        said.target = _text(text)
    else:
        (always if kind == _PAX_GLOBAL else said.records).update(_records(window, text, start))


def _records(window: Window, text: bytes, start: int) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of each line `25 path=class/picture.jpg`, the number being the bytes of the line."""
    position = 0
    while position < len(text) and text[position]:
        digits = text[position : position + 8].split(b" ", 1)[0]
        length = int(digits) if digits.isdigit() else 0
        line = text[position : position + length]
        key, equals, value = line[len(digits) + 1 : -1].partition(b"=")
        if not equals or len(line) < length or line[-1:] != b"\n":
            raise window.damaged(f"is damaged: no pax record at byte {start + position:,}")
        yield key, value
        position += length


def _check_end(window: Window, position: int) -> None:
    """Behind the end nothing but empty blocks may follow: else a part of the archive would be passed over."""
    at = position
    while at < window.size:
        part = window.read(at, min(_REST_BYTES, window.size - at))
        if part.strip(b"\0"):
            raise window.damaged(
                f"has more behind its end at byte {position:,}",
                "where tars were joined with cat, join them with 'tar -A'; else download or copy it again",
            )
        at += len(part)


def _shown(name: bytes) -> str:
    return printable(repr(name.decode(errors="surrogateescape")[-100:]))
