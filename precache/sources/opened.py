"""An archive that is read from: where a member lies in it, and what a picture of it is."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from precache.console.notices import warn
from precache.errors import SourceError, did_you_mean
from precache.pictures import kinds
from precache.pictures.reading import check_bytes, read_part, steadily
from precache.sources import spool, tar, zip
from precache.sources.members import Member
from precache.sources.spool import Spool
from precache.sources.window import Window

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz")
SUFFIXES = (*TAR_SUFFIXES, ".zip")
OTHER_SUFFIXES = (".rar", ".7z", ".tar.zst", ".tzst", ".tar.lz4", ".tar.lz", ".tar.z")


@dataclass(frozen=True, slots=True)
class Opened:
    """An archive; small, and pickled.

    Attributes:
        shown: how messages call it.
        path: of the file that is read: of the spool, where the archive is compressed as a whole.
        as_scanned: size of that in bytes, and when it was last written, in ns.
        modified_ns: when the archive was last written.
        zipped: whether it is a zip.
        before: bytes that lie before the zip.
        spool: keeps it.
    """

    shown: str
    path: str
    as_scanned: tuple[int, int]
    modified_ns: int
    zipped: bool = False
    before: int = 0
    spool: Spool | None = None

    @property
    def size(self) -> int:
        """Of what is read, in bytes."""
        return self.as_scanned[0]

    def read(self, start: int, count: int) -> bytes:
        """Some bytes of it; SourceError if they cannot be read, or it is not as it was scanned."""
        return read_part(self.path, self.as_scanned, start, count)

    def window(self) -> Window:
        """To scan it with."""
        return Window(self.path, self.shown, self.as_scanned)

    def members(self, window: Window) -> Iterator[Member]:
        """All of it; SourceError if it is damaged."""
        return zip.members(window) if self.zipped else tar.members(window)

    def start(self, place: int, size: int) -> bytes:
        """The first bytes of a member."""
        if self.zipped:
            return zip.first_bytes(self.read, place, self.before, kinds.PREFIX_BYTES)
        return self.read(place, min(size, kinds.PREFIX_BYTES))

    def picture(self, where: str, place: int, size: int, max_pixels: int) -> bytes:
        """The content of a member, which messages call `where`.

        Raises:
            ImageError: it is damaged, or larger than a picture can be.
            SourceError: as `read`.
        """
        check_bytes(where, size, max_pixels)
        if self.zipped:
            return zip.content(self.read, place, self.before, where, max_pixels)
        data = self.read(place, size)
        if len(data) != size:
            raise SourceError(
                f"{where}: {len(data):,} of its {size:,} bytes could be read; check the disk or the network, "
                f"then run the same command again"
            )
        return data


def open_archive(path: Path) -> Opened:
    """The archive at `path`; one that is compressed as a whole is unpacked into a file without a name.

    Raises:
        SourceError: there is none, it cannot be read, or it cannot be unpacked.
    """
    try:
        status = steadily(lambda: os.stat(path), path)
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise SourceError(f"{path}: does not exist; name an archive{did_you_mean(path)}") from error
        raise
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{path}: is no file; expected an archive of class folders with pictures")
    shown, as_scanned, modified_ns = str(path), (status.st_size, status.st_mtime_ns), status.st_mtime_ns
    if has_suffix(path, (".zip",)):
        before = zip.bytes_before(Window(shown, shown, as_scanned))
        return Opened(shown, shown, as_scanned, modified_ns, zipped=True, before=before)
    how = spool.compression(shown, as_scanned)
    if how is None:
        return Opened(shown, shown, as_scanned, modified_ns)
    warn(
        f"{path}: is read from its start, into {spool.folder()}; after {spool.COMMANDS[how]} it is "
        f"read in place"
    )
    unpacked = spool.unpack(path, as_scanned, how)
    status = os.stat(unpacked.path)
    return Opened(shown, unpacked.path, (status.st_size, status.st_mtime_ns), modified_ns, spool=unpacked)


def has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether the file's name ends with one of them."""
    return path.name.lower().endswith(suffixes)
