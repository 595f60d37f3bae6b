"""Members of a zip, and their content: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT

The directory at the end says of each member where it begins, how it is packed and its CRC-32. `place` is
where the member's entry of this directory is, so that nothing of it need be kept.
"""

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from precache.errors import ImageError
from precache.pictures import kinds
from precache.pictures.reading import check_bytes
from precache.sources.members import FILE, FOLDER, LINK, OTHER, Member
from precache.sources.window import Reader, Window

_END, _END_MARK = struct.Struct("<4s4H2LH"), b"PK\5\6"
_LOCATOR, _LOCATOR_MARK = struct.Struct("<4sLQL"), b"PK\6\7"
_END64, _END64_MARK = struct.Struct("<4sQ2H2L4Q"), b"PK\6\6"
_ENTRY, _ENTRY_MARK = struct.Struct("<4s2B5H3L5H2L"), b"PK\1\2"
_LOCAL, _LOCAL_MARK = struct.Struct("<4s5H3L2H"), b"PK\3\4"
_MOST_COMMENT, _MOST_TARGET, _START_BYTES = 0xFFFF, 4096, 4096
_NAMES_BYTES = 256  # a name and what else is with it have mostly fewer: one read less
_STORED, _DEFLATED = 0, 8
_METHODS = {
    1: "shrink",
    6: "implode",
    9: "deflate64",
    12: "bzip2",
    14: "lzma",
    93: "zstd",
    95: "xz",
    99: "AES",
}
_ENCRYPTED, _UTF8 = 0x1, 0x800
_DOS, _UNIX = 0, 3
_MOST_BYTES = 1 << 40  # of a member; so that the sum of their sizes is a number of 64 bits
_WIDE16, _WIDE32, _ZIP64_EXTRA = 0xFFFF, 0xFFFFFFFF, 1


@dataclass(frozen=True, slots=True)
class _Entry:
    """Of the directory; `next` is where it ends."""

    name: bytes
    system: int
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    attributes: int
    header: int
    next: int

    @property
    def why_not(self) -> str | None:
        """Why it cannot be unpacked; None if it can."""
        if self.flags & _ENCRYPTED:
            return "is encrypted"
        if self.method not in (_STORED, _DEFLATED):
            return f"is packed by the method {_METHODS.get(self.method, self.method)}, not by deflate"
        return None


def bytes_before(window: Window) -> int:
    """How many bytes lie before the archive, such as a program that unpacks it; SourceError if it is none."""
    return _directory(window)[-1]


def members(window: Window) -> Iterator[Member]:
    """Those of the zip, in the order of its directory.

    Raises:
        SourceError: it is damaged, breaks off, or holds pictures that cannot be unpacked here.
    """
    start, end, count, before = _directory(window)
    position, found = start, 0
    while position < end:
        entry = _entry(window.read, position)
        if entry is None or entry.next > end:
            raise window.damaged(f"is damaged: expected an entry of its directory at byte {position:,}")
        name = _name(entry)
        where = os.fsdecode(name[-100:])
        if entry.header + before + _LOCAL.size + entry.packed > start or entry.size > _MOST_BYTES:
            raise window.damaged(f"is damaged: its member {where!r} cannot be as large as it says")
        if entry.why_not and kinds.extension(where) in kinds.IMAGE_EXTENSIONS:
            raise window.damaged(f"its member {where!r} {entry.why_not}", "unpack it, and convert the folder")
        yield _member(window, entry, name, position, before)
        position, found = entry.next, found + 1
    if found & _WIDE16 != count & _WIDE16:
        raise window.damaged(f"is damaged: its directory has {found:,} entries, expected {count:,}")


def content(read: Reader, place: int, before: int, where: str, max_pixels: int) -> bytes:
    """Of the member whose entry is at `place`; `before` as of `members`.

    Raises:
        ImageError: it cannot be unpacked, is not what it was packed from, or is larger than a picture can be.
    """
    entry = _entry(read, place)
    if entry is None:
        raise ImageError(where, "has no entry in the archive's directory")
    if entry.why_not:
        raise ImageError(where, entry.why_not)
    check_bytes(where, entry.packed, max_pixels)
    packed = _packed(read, entry, before, entry.packed)
    try:
        data = _unpacked(packed, entry, entry.size + 1)
    except zlib.error:
        data = b""
    if len(data) != entry.size or zlib.crc32(data) != entry.crc:
        raise ImageError(where, "is damaged in the archive: it does not match its CRC-32")
    return data


def first_bytes(read: Reader, place: int, before: int, count: int) -> bytes:
    """Of a member's content; none where it cannot be unpacked."""
    entry = _entry(read, place)
    if entry is None or entry.why_not:
        return b""
    try:
        return _unpacked(_packed(read, entry, before, _START_BYTES), entry, count)
    except zlib.error:
        return b""


def _packed(read: Reader, entry: _Entry, before: int, most: int) -> bytes:
    """The packed content, or its first bytes."""
    most = min(entry.packed, most)
    found = read(entry.header + before, _LOCAL.size + _NAMES_BYTES + most)
    if len(found) < _LOCAL.size or not found.startswith(_LOCAL_MARK):
        return b""
    *_, name_bytes, extra_bytes = _LOCAL.unpack_from(found)
    start = _LOCAL.size + name_bytes + extra_bytes
    if name_bytes + extra_bytes > _NAMES_BYTES:
        return read(entry.header + before + start, most)
    return found[start : start + most]


def _unpacked(packed: bytes, entry: _Entry, most: int) -> bytes:
    # a bomb is stopped at the size that its entry says
    return packed[:most] if entry.method == _STORED else zlib.decompressobj(-15).decompress(packed, most)


def _member(window: Window, entry: _Entry, name: bytes, position: int, before: int) -> Member:
    kind = stat.S_IFMT(entry.attributes >> 16) if entry.system == _UNIX else 0
    if name.endswith(b"/"):
        return Member(name, FOLDER)
    if kind == stat.S_IFLNK:
        target = first_bytes(window.read, position, before, _MOST_TARGET + 1)
        return Member(name, LINK, target=target)
    if kind not in (0, stat.S_IFREG):
        return Member(name, OTHER)
    return Member(name, FILE, position, entry.size)


def _name(entry: _Entry) -> bytes:
    """As a file system has it, in UTF-8 where the zip says what it is."""
    name = entry.name
    if entry.system == _DOS and not entry.flags & _UTF8:
        try:
            name.decode()
        except UnicodeDecodeError:
            name = name.decode("cp437").encode()
    return name.replace(b"\\", b"/") if entry.system == _DOS else name


def _directory(window: Window) -> tuple[int, int, int, int]:
    """Where the directory begins and ends, the number of its entries, and the bytes before the archive."""
    tail_start = max(0, window.size - _MOST_COMMENT - _END.size - _LOCATOR.size)
    tail = window.read(tail_start, window.size - tail_start)
    at = tail.rfind(_END_MARK)
    while at >= 0:
        fields = _END.unpack_from(tail, at) if at + _END.size <= len(tail) else None
        if fields is not None and at + _END.size + fields[-1] == len(tail):
            break
        at = tail.rfind(_END_MARK, 0, at)
    else:
        raise window.damaged("is no zip, or breaks off: the directory at its end is missing")
    assert fields is not None
    _, disk, first_disk, here, count, size, start, _ = fields
    end = tail_start + at
    if _WIDE32 in (size, start) or _WIDE16 in (here, count, disk):
        locator = window.read(end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size else b""
        if locator.startswith(_LOCATOR_MARK):
            return _directory64(window, end - _LOCATOR.size)
    if disk or first_disk or here != count:
        raise window.damaged("is a part of a zip of several files", "join them with 'zip -s 0'")
    before = end - size - start
    if before < 0:
        raise window.damaged("is damaged: its directory should begin before the archive does")
    return end - size, end, count, before


def _directory64(window: Window, end: int) -> tuple[int, int, int, int]:
    """The same, of a zip of more than 65,535 members or 4 GiB; its record ends at `end`."""
    stored = window.read(end - _END64.size, _END64.size) if end >= _END64.size else b""
    if not stored.startswith(_END64_MARK):
        raise window.damaged("is damaged: the record of its 64-bit directory is missing")
    *_, disk, first_disk, here, count, size, start = _END64.unpack(stored)
    end -= _END64.size
    before = end - size - start
    if disk or first_disk or here != count or before < 0:
        raise window.damaged(
            "is damaged, or a part of a zip of several files: its 64-bit directory does not fit"
        )
    return end - size, end, count, before


def _entry(read: Reader, position: int) -> _Entry | None:
    """The directory's entry at `position`; None if there is none."""
    stored = read(position, _ENTRY.size + _NAMES_BYTES)
    if len(stored) < _ENTRY.size or not stored.startswith(_ENTRY_MARK):
        return None
    _, _, system, _, flags, method, _, _, crc, packed, size, *rest = _ENTRY.unpack_from(stored)
    name_bytes, extra_bytes, comment_bytes, _, _, attributes, header = rest
    start, length = position + _ENTRY.size, name_bytes + extra_bytes
    text = stored[_ENTRY.size :] if length <= _NAMES_BYTES else read(start, length)
    text = text[:length]
    if len(text) < length:
        return None
    sizes = _widened([size, packed, header], text[name_bytes:])
    if sizes is None:
        return None
    size, packed, header = sizes
    name = text[:name_bytes]
    end = start + len(text) + comment_bytes
    return _Entry(name, system, flags, method, crc, packed, size, attributes, header, end)


def _widened(sizes: list[int], extra: bytes) -> list[int] | None:
    """The sizes, those of 32 bits that are full from the zip64 record; None if they are not there."""
    if _WIDE32 not in sizes:
        return sizes
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind == _ZIP64_EXTRA:
            record = extra[position : position + length]
            wide = [n for n, size in enumerate(sizes) if size == _WIDE32]
            if len(record) < 8 * len(wide):
                return None
            for n, number in zip(wide, struct.unpack_from(f"<{len(wide)}Q", record), strict=True):
                sizes[n] = number
            return sizes
        position += length
    return None
