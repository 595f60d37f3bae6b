"""Tars that are read in place: `tarfile` parses the headers, and each member is a range of the file's bytes.

No file is ever written under a member's name. A tar is refused, with the member's name or the offset:

    it is compressed as a whole          its pictures are read in shuffled order
    a header is damaged, or breaks off   `tarfile` would end there, as if the rest were not in the tar
    a member's size leads past the end   the tar breaks off
    a member is sparse, or continued     its content is not one range of the file
    data follow behind the end           tars were joined, and nobody would read the second
"""

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from precache.errors import SourceError, shell_command
from precache.pictures.reading import read_part, read_with_retries
from precache.storage import open_regular

MAX_TEXT_BYTES = 1 << 20
"""Size up to which the content of a member is read with its header."""
_COPY_AGAIN = "download or copy it again"
_PACK_AGAIN = "write the tar again, with whole files"
_READ_BYTES = 1 << 20
_LISTING_BYTES = 16 << 10  # read at a time while a tar is listed: a header, and often the next ones
_CONTINUED = b"M"  # type of a member that began in another tar
_DUMPED_FOLDER = b"D"  # type of a folder in GNU's incremental tars
_COMPRESSIONS = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
"""Command that decompresses a file which begins with these bytes."""


class Member(NamedTuple):
    """A member of a tar that is no folder.

    Attributes:
        name: path in the tar, with slashes.
        is_file: whether it is a file, and no link or device.
        offset: offset of the content in the tar.
        size: size of the content in bytes.
        text: the content, if it was read with the header; else None.
    """

    name: str
    is_file: bool
    offset: int
    size: int
    text: bytes | None


@dataclass(frozen=True, slots=True)
class Tar:
    """Path of a tar, its size in bytes, and the time of its last write in ns, which it must keep."""

    path: str
    size: int
    modified_ns: int

    def members(self, text_suffixes: tuple[str, ...] = ()) -> Iterator[Member]:
        """List the members that are no folders, in the tar's order.

        Args:
            text_suffixes: endings of names, in lower case, of the members to read with their headers.

        Raises:
            SourceError: the tar is damaged, breaks off, or has a member that cannot be read in place.
        """
        with _RetryingFile(self.path) as unbuffered, io.BufferedReader(unbuffered, _LISTING_BYTES) as file:
            for member in _list_headers(self, file):
                if member.isdir() or member.type == _DUMPED_FOLDER:
                    continue
                name, offset, size = member.name, member.offset_data, member.size
                text = None
                if size <= MAX_TEXT_BYTES and name.lower().endswith(text_suffixes) and member.isreg():
                    file.seek(offset)
                    text = file.read(size)
                yield Member(name, member.isreg(), offset, size, text)

    def read(self, where: str, offset: int, size: int) -> bytes:
        """Return the content of a member, whose name in messages is `where`.

        Raises:
            SourceError: the bytes cannot be read, or the file has changed.
        """
        data = read_part(self.path, self.path, (self.size, self.modified_ns), offset, size)
        if len(data) != size:
            raise SourceError(
                f"{len(data):,} of its {size:,} bytes could be read",
                path=where,
                remedy="check the disk or the network, then run the same command again",
            )
        return data

    def error(self, message: str, remedy: str = _COPY_AGAIN) -> SourceError:
        """Return a SourceError about this tar; `message` begins with a verb."""
        return SourceError(message, path=self.path, remedy=remedy)


def open_tar(path: Path) -> Tar:
    """Open the tar at `path`.

    Raises:
        SourceError: it cannot be read, or is compressed.
    """
    status = read_with_retries(lambda: os.stat(path), path)
    tar = Tar(str(path), status.st_size, status.st_mtime_ns)
    start = read_part(tar.path, tar.path, (tar.size, tar.modified_ns), 0, max(map(len, _COMPRESSIONS)))
    for mark, command in _COMPRESSIONS.items():
        if start.startswith(mark):
            raise tar.error(
                "is compressed as a whole, and its pictures are read in shuffled order",
                f"decompress it, as with '{shell_command(command, path)}'",
            )
    return tar


class _RetryingFile(io.FileIO):
    """File that tries again when a disk fails for a moment."""

    def __init__(self, path: str) -> None:
        with read_with_retries(lambda: open_regular(path), path) as file:
            super().__init__(os.dup(file.fileno()))
        self._path = path

    def readinto(self, buffer: Any) -> int:
        return read_with_retries(lambda: super(_RetryingFile, self).readinto(buffer), self._path) or 0


def _list_headers(tar: Tar, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """List the headers of all members, folders included; see `Tar.members`."""
    position = 0  # offset of the next header
    try:
        parser = tarfile.TarFile(fileobj=file)
        while True:
            file.seek(position)
            # not parser.next(), which takes a damaged header for the end, and keeps all members in memory
            member = tarfile.TarInfo.fromtarfile(parser)
            _check_member(tar, member, position, parser.offset)
            yield member
            position = parser.offset
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # an empty block ends the tar
        pass
    except SourceError:
        raise
    except Exception as error:  # tarfile raises nearly anything, even RecursionError for nested headers
        message = f"is damaged, or breaks off, at byte {position:,}" if position else "is not a tar"
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise tar.error(f"{message} ({reason})") from error
    while part := file.read(_READ_BYTES):
        if part.strip(b"\0"):
            raise tar.error(
                f"has more data after its end at byte {position:,}",
                f"if tars were joined with cat, put them into a folder, each as it was; else {_COPY_AGAIN}",
            )


def _check_member(tar: Tar, member: tarfile.TarInfo, position: int, next_position: int) -> None:
    """Raise SourceError if the member, whose header is at `position`, cannot be read in place."""
    name = repr(member.name[-100:])
    end = member.offset_data + member.size if member.isreg() else next_position
    if member.size < 0 or next_position <= position:
        raise tar.error(f"is damaged: {name} at byte {position:,} has an impossible size")
    if member.issparse():
        raise tar.error(f"its member {name} is stored as a sparse file", _PACK_AGAIN)
    if member.type == _CONTINUED:
        raise tar.error(f"its member {name} continues in another tar", _PACK_AGAIN)
    if end > tar.size:
        raise tar.error(f"breaks off: {name} should end at byte {end:,}, and the tar has {tar.size:,} bytes")
