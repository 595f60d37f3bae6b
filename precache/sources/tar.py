"""Tars that are read in place: each member is a range of the file's bytes.

`tarfile` parses the headers. A tar is refused, with the member's name, if it breaks off, or has a member that
cannot be read in place: a sparse file, or one that continues in another tar. No file is ever written under a
member's name.
"""

import io
import os
import tarfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from precache.errors import SourceError, shell_command
from precache.pictures.reading import check_bytes, read_part, read_with_retries
from precache.storage import open_regular

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
        place: offset of the content in the tar.
        size: size of the content in bytes.
    """

    name: str
    is_file: bool
    place: int
    size: int


@dataclass(slots=True, eq=False)
class Tar:
    """Reader of a tar's members; it is small, and pickled for worker processes.

    Attributes:
        path: path of the file.
        scanned_status: size of the file in bytes, and time of its last write in ns.
        file: open file while members are listed; its buffer often has the next header already.
    """

    path: str
    scanned_status: tuple[int, int]
    file: BinaryIO | None = None

    @property
    def size(self) -> int:
        """Size of the tar in bytes."""
        return self.scanned_status[0]

    @property
    def modified_ns(self) -> int:
        """Time of the tar's last write."""
        return self.scanned_status[1]

    def members(self) -> Generator[Member, None, None]:
        """List the members that are no folders, in the tar's order.

        Raises:
            SourceError: the tar is damaged, breaks off, or has a member that cannot be read in place.
        """
        with io.BufferedReader(_TarFile(self), _LISTING_BYTES) as file:
            self.file = file
            try:
                yield from _list_members(self, file)
            finally:
                self.file = None

    def content(self, where: str, place: int, size: int) -> bytes:
        """Return the content of a member, whose name in messages is `where`.

        Raises:
            SourceError: the bytes cannot be read, or the file has changed.
        """
        data = self.read(place, size)
        if len(data) != size:
            raise SourceError(
                f"{len(data):,} of its {size:,} bytes could be read",
                path=where,
                remedy="check the disk or the network, then run the same command again",
            )
        return data

    def picture(self, where: str, place: int, size: int, max_pixels: int) -> bytes:
        """Return the content of a picture; ImageError if it is too large for one of `max_pixels`."""
        check_bytes(where, size, max_pixels)
        return self.content(where, place, size)

    def error(self, message: str, remedy: str = _COPY_AGAIN) -> SourceError:
        """Return a SourceError about this tar; `message` begins with a verb."""
        return SourceError(message, path=self.path, remedy=remedy)

    def read(self, start: int, count: int) -> bytes:
        """Read some bytes of the file; SourceError if they cannot be read, or the file has changed."""
        if self.file is None:
            return read_part(self.path, self.path, self.scanned_status, start, count)
        self.file.seek(start)
        return self.file.read(count)


def open_tar(path: Path) -> Tar:
    """Open the tar at `path`.

    Raises:
        SourceError: it cannot be read, or is compressed.
    """
    status = read_with_retries(lambda: os.stat(path), path)
    tar = Tar(str(path), (status.st_size, status.st_mtime_ns))
    start = tar.read(0, max(map(len, _COMPRESSIONS)))
    for mark, command in _COMPRESSIONS.items():
        if start.startswith(mark):
            raise tar.error(
                "is compressed as a whole, and its pictures are read in shuffled order",
                f"decompress it, as with '{shell_command(command, path)}'",
            )
    return tar


class _TarFile(io.FileIO):
    """File of a tar for `tarfile`, which tries again when a disk fails for a moment."""

    def __init__(self, tar: Tar) -> None:
        with read_with_retries(lambda: open_regular(tar.path), tar.path) as file:
            super().__init__(os.dup(file.fileno()))
        self._tar_path = tar.path

    def readinto(self, buffer: Any) -> int:
        return read_with_retries(lambda: super(_TarFile, self).readinto(buffer), self._tar_path) or 0


def _list_members(tar: Tar, file: BinaryIO) -> Iterator[Member]:
    """List the members that are no folders; see `Tar.members`."""
    position = 0  # offset of the next member's header
    try:
        parser = tarfile.TarFile(fileobj=file)
        while True:
            file.seek(position)
            # not parser.next(), which keeps all members in memory: there may be 10,000,000
            member = tarfile.TarInfo.fromtarfile(parser)
            _check_member(tar, member, position, parser.offset)
            if not member.isdir() and member.type != _DUMPED_FOLDER:
                yield Member(member.name, member.isreg(), member.offset_data, member.size)
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
