"""A tar or a zip of class folders: the samples are those of the tree that it would be unpacked into.

    photos.tar     read in place: a picture is a range of its bytes
    photos.zip     the same, stored or deflated
    photos.tar.gz  (.tgz, .bz2, .xz) unpacked as a whole first, see `precache.storage.staging`

Paths, ids, labels, splits and the digest are those of the tree; an outermost folder that holds everything
else, such as 101_ObjectCategories/, is left out of them. A tar that holds samples of WebDataset instead of
class folders is read as `precache.sources.webdataset` says.

`tarfile` and `zipfile` list the members and where they lie. Nothing is ever unpacked under a member's name:

    class/1.jpg, ./class/1.jpg, /class/1.jpg    the same file
    ../class/1.jpg                              left out: it leads out of the archive
    class/1.jpg twice                           the last one is used, as when it is unpacked
    a hard link                                 the file that it names
    a symbolic link                             the file that it leads to; to a folder: not followed
    a picture that unpacks to another size      rejected

The whole archive is refused, with the name of the member, for a link to a link, an archive in the archive, an
encrypted member or one that is neither stored nor deflated, a sparse file, and a size that it cannot hold.
"""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from precache.errors import ImageError, SourceError, did_you_mean
from precache.pictures import kinds
from precache.pictures.reading import check_bytes, read_part, read_with_retries
from precache.reporting import abridge, warn
from precache.sources.base import IgnoredPath, SampleRef, Scan
from precache.sources.options import CLASS_FOLDERS, SourceOptions
from precache.sources.tree import Node, is_left_alone, scan_folders, split_of
from precache.storage import open_regular, staging, temporary_path
from precache.storage.urls import Location

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz", ".zip")

FILE, FOLDER, LINK, HARD_LINK, OTHER = "file", "folder", "link", "hard link", "other"
NO_NAME = "has a name that leads out of the archive, or that no file can have"
_AGAIN = "appears again later in the archive; the last one is used"
_FILE_AND_FOLDER = "is a file and a folder"
_MOST_FOLDERS = 255  # around a file
_MOST_LINKED = 4095  # characters that the target of a link can have

_COPY_AGAIN = "download or copy it again"
_UNPACK = "unpack it, and convert the folder"
_UNPACK_BOTH = "unpack both, and convert the folder"
_STORE_FILES = "make it with 'tar -h', or 'zip' without -y"
_READ_BYTES = 1 << 20
_LISTING_BYTES = 16 << 10  # read at a time while a tar is listed: a header, and often some that follow
_CONTINUED = b"M"  # type of a tar's member that began in another archive
_DUMPED_FOLDER = b"D"  # of one in GNU's incremental archives
_MOST_MEMBER_BYTES = 1 << 40  # so that the sum of their sizes is a number of 64 bits
_ENTRY = np.dtype([("header", "<i8"), ("packed", "<i8"), ("crc", "<u4"), ("method", "<u2")])
_LOCAL_BYTES, _LOCAL_MARK = 30, b"PK\3\4"  # of the header before a zip's member
_FIRST_PACKED_BYTES = 4096  # that the first bytes of a member are unpacked from
_NAMES_BYTES = 256  # a name and what else is with it mostly have fewer: one read less
_ENCRYPTED, _UTF8 = 0x1, 0x800
_DOS, _UNIX = 0, 3  # systems that a zip was made on


def is_archive(path: Path) -> bool:
    """Whether the file's name is that of an archive which is read here."""
    return path.name.lower().endswith(_SUFFIXES)


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """An archive as a `Source`.

    Attributes:
        file: that is read: `root`, or what was fetched from there.
        archive: once it is scanned; and `prefix`, the folder that all of its samples lie in, with a slash.
    """

    root: Location
    file: Path
    options: SourceOptions
    archive: "Archive | None" = None
    prefix: str = ""

    @property
    def paths(self) -> tuple[Location, ...]:
        return (self.root,)

    def scan(self) -> Scan:
        from precache.sources import webdataset  # it reads archives by this file

        archive = open_archive(self.file, str(self.root))
        contents = _Contents(archive)
        if self.options.class_depth is None and webdataset.holds_samples(contents.top):
            source = webdataset.WebDatasetSource(self.root, self.file, self.options)
            return webdataset.scan_archives(source, (archive,))
        self.options.only(CLASS_FOLDERS)
        contents.follow_links()
        class_depth = 1 if self.options.class_depth is None else self.options.class_depth
        top, prefix = contents.without_outer_folders(class_depth)
        scan = scan_folders(top, replace(self, archive=archive, prefix=prefix), class_depth)
        return replace(
            scan,
            ignored=(*contents.ignored, *scan.ignored),
            scanned=scan.scanned + len(contents.ignored),
            warnings=(*contents.warnings(self.root), *scan.warnings),
        )

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        assert self.archive is not None, "only a source that a scan gave is read"
        return self.archive.picture(self.where(ref), ref.place, ref.bytes, max_pixels)

    def where(self, ref: SampleRef) -> str:
        """The name for messages: the archive's path, and the member's name."""
        return os.path.join(str(self.root), self.prefix, ref.path)


class Member(NamedTuple):
    """One entry of an archive.

    Attributes:
        name: as a file system has it, with slashes.
        kind: FILE, FOLDER, LINK, HARD_LINK or OTHER, such as a device.
        place: where its content is: a byte of a tar, a row of `Archive.entries` for a zip.
        size: of its content, in bytes.
        target: of a link.
    """

    name: str
    kind: str
    place: int = 0
    size: int = 0
    target: str = ""


@dataclass(slots=True, eq=False)
class Archive:
    """An archive that is read from; small, and pickled.

    Attributes:
        shown: its name in messages.
        path: of the file that is read: what was unpacked, where the archive is compressed as a whole.
        scanned_status: size of that in bytes, and when it was last written, in ns.
        modified_ns: when the archive was last written.
        is_zip: or a tar.
        entries: `_ENTRY` [n], the members of a zip, once they are listed.
        file: open while members are listed: many are small, and lie where it has read already.
    """

    shown: str
    path: str
    scanned_status: tuple[int, int]
    modified_ns: int
    is_zip: bool = False
    entries: npt.NDArray[np.void] | None = None
    file: BinaryIO | None = None

    @property
    def size(self) -> int:
        """Bytes of the archive."""
        return self.scanned_status[0]

    def members(self) -> Iterator[Member]:
        """List the members, in the archive's order.

        Raises:
            SourceError: it is damaged, breaks off, or holds what cannot be read in place.
        """
        with io.BufferedReader(_ArchiveFile(self), _LISTING_BYTES) as file:
            self.file = file
            try:
                yield from _zip_members(self, file) if self.is_zip else _tar_members(self, file)
            finally:
                self.file = None

    def read(self, start: int, count: int) -> bytes:
        """Read some bytes of the file; SourceError if they cannot be read, or it is not as it was scanned."""
        if self.file is None:
            return read_part(self.path, self.shown, self.scanned_status, start, count)
        self.file.seek(start)
        return self.file.read(count)

    def first_bytes(self, place: int, size: int, count: int = kinds.PREFIX_BYTES) -> bytes:
        """The first bytes of a member; none where it cannot be unpacked."""
        if self.is_zip:
            return self._unzip(place, count, _FIRST_PACKED_BYTES)
        return self.read(place, min(size, count))

    def content(self, where: str, place: int, size: int) -> bytes:
        """The content of a member, whose name in messages is `where`.

        Raises:
            ImageError: it cannot be unpacked, or is not what it was packed from.
            SourceError: as `read`.
        """
        if not self.is_zip:
            data = self.read(place, size)
            if len(data) != size:
                raise SourceError(
                    f"{where}: {len(data):,} of its {size:,} bytes could be read; check the disk or the "
                    f"network, then run the same command again"
                )
            return data
        assert self.entries is not None
        # no more of either: it may be a bomb, or lie about its packed size
        data = self._unzip(place, size + 1, 2 * size + _READ_BYTES)
        if len(data) != size or zlib.crc32(data) != self.entries["crc"][place]:
            raise ImageError(where, "is damaged in the archive: it does not match its CRC-32")
        return data

    def picture(self, where: str, place: int, size: int, max_pixels: int) -> bytes:
        """The content of a picture; ImageError, too, where none of `max_pixels` can be so large."""
        check_bytes(where, size, max_pixels)
        if self.entries is not None:
            check_bytes(where, int(self.entries["packed"][place]), max_pixels)
        return self.content(where, place, size)

    def damaged(self, what: str, remedy: str = _COPY_AGAIN) -> SourceError:
        """An error to raise: `what` begins with a verb."""
        return SourceError(f"{self.shown}: {what}; {remedy}")

    def _unzip(self, place: int, most: int, most_packed: int) -> bytes:
        """Unpack `most` first bytes of a zip's member from `most_packed`; none where they are damaged."""
        assert self.entries is not None
        header, packed, _, method = self.entries[place].item()
        packed = min(packed, most_packed)
        found = self.read(header, _LOCAL_BYTES + _NAMES_BYTES + packed)
        if len(found) < _LOCAL_BYTES or not found.startswith(_LOCAL_MARK):
            return b""
        names = int.from_bytes(found[26:28], "little") + int.from_bytes(found[28:30], "little")
        start = _LOCAL_BYTES + names
        data = found[start : start + packed] if names <= _NAMES_BYTES else self.read(header + start, packed)
        if method == zipfile.ZIP_STORED:
            return data[:most]
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, most)
        except zlib.error:
            return b""


def open_archive(path: Path, shown: str) -> Archive:
    """The archive at `path`, called `shown` in messages; one that is compressed as a whole is unpacked.

    Raises:
        SourceError: there is none, it cannot be read, or it cannot be unpacked.
    """
    try:
        status = read_with_retries(lambda: os.stat(path), shown)
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise SourceError(f"{shown}: does not exist; name an archive{did_you_mean(path)}") from error
        raise
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{shown}: is not a file; expected an archive of class folders with pictures")
    scanned_status = status.st_size, status.st_mtime_ns
    archive = Archive(
        shown, str(path), scanned_status, status.st_mtime_ns, path.name.lower().endswith(".zip")
    )
    start = b"" if archive.is_zip else archive.read(0, 6)
    for mark, (decompressed, command) in _COMPRESSIONS.items():
        if start.startswith(mark):
            unpacked = _unpack(archive, decompressed, command)
            status = os.stat(unpacked)
            return replace(archive, path=str(unpacked), scanned_status=(status.st_size, status.st_mtime_ns))
    return archive


class _ArchiveFile(io.FileIO):
    """An archive for Python's modules; a disk that fails for a moment is asked again."""

    def __init__(self, archive: Archive) -> None:
        with read_with_retries(lambda: open_regular(archive.path), archive.shown) as file:
            super().__init__(os.dup(file.fileno()))
        self._shown = archive.shown

    def readinto(self, buffer: Any) -> int:
        return read_with_retries(lambda: super(_ArchiveFile, self).readinto(buffer), self._shown) or 0


def _tar_members(archive: Archive, file: BinaryIO) -> Iterator[Member]:
    position = 0  # of a member's header
    try:
        tar = tarfile.TarFile(fileobj=file)
        while True:
            file.seek(position)
            # not tar.next(), which keeps all members: there may be 10,000,000
            member = tarfile.TarInfo.fromtarfile(tar)
            _check_in_tar(archive, member, position, tar.offset)
            kind = _kind_in_tar(member)
            yield Member(member.name, kind, member.offset_data, member.size, member.linkname)
            position = tar.offset
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # an empty block
        pass
    except SourceError:
        raise
    except Exception as error:  # nearly anything; RecursionError for headers about headers about headers
        what = f"is damaged, or breaks off, at byte {position:,}" if position else "is not a tar"
        raise archive.damaged(f"{what} ({_reason(error)})") from error
    while part := file.read(_READ_BYTES):
        if part.strip(b"\0"):
            raise archive.damaged(
                f"has more data after its end at byte {position:,}",
                f"if tars were joined with cat, join them with 'tar -A'; else {_COPY_AGAIN}",
            )


def _check_in_tar(archive: Archive, member: tarfile.TarInfo, position: int, next_position: int) -> None:
    """Raise SourceError if the member, whose header is at `position`, cannot be read in place."""
    end = member.offset_data + member.size if member.isreg() else next_position
    if member.size < 0 or next_position <= position:
        what = f"is damaged: {_shown(member.name)} at byte {position:,} has an impossible size"
        raise archive.damaged(what)
    if member.issparse():
        raise archive.damaged(f"its member {_shown(member.name)} is stored as a sparse file", _UNPACK)
    if member.type == _CONTINUED:
        raise archive.damaged(f"its member {_shown(member.name)} continues in another archive", _UNPACK)
    if end > archive.size:
        raise archive.damaged(
            f"breaks off: {_shown(member.name)} should end at byte {end:,}, and the archive has "
            f"{archive.size:,} bytes"
        )


def _shown(name: str) -> str:
    return repr(name[-100:])


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__


def _kind_in_tar(member: tarfile.TarInfo) -> str:
    if member.isreg():
        return FILE
    if member.isdir() or member.type == _DUMPED_FOLDER:
        return FOLDER
    return LINK if member.issym() else HARD_LINK if member.islnk() else OTHER


def _zip_members(archive: Archive, file: BinaryIO) -> Iterator[Member]:
    try:
        infos = zipfile.ZipFile(file).infolist()
    except SourceError:
        raise
    except Exception as error:  # nearly anything, too
        raise archive.damaged(
            f"is not a zip, breaks off or is damaged ({_reason(error)})",
            f"{_COPY_AGAIN}, or join the parts of a zip of several files with 'zip -s 0'",
        ) from error
    archive.entries = np.zeros(len(infos), _ENTRY)
    infos.reverse()
    for row in range(len(infos)):
        info = infos.pop()  # and forget it: a million take 600 MB
        end = info.header_offset + _LOCAL_BYTES + info.compress_size
        if info.header_offset < 0 or end > archive.size or info.file_size > _MOST_MEMBER_BYTES:
            raise archive.damaged(
                f"is damaged: its member {_shown(info.filename)} cannot be as large as it says"
            )
        if info.flag_bits & _ENCRYPTED:
            raise archive.damaged(f"its member {_shown(info.filename)} is encrypted", _UNPACK)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            packed_by = f"is packed by method {info.compress_type}, not by deflate"
            raise archive.damaged(f"its member {_shown(info.filename)} {packed_by}", _UNPACK)
        archive.entries[row] = (info.header_offset, info.compress_size, info.CRC, info.compress_type)
        name, kind = _name_in_zip(info), stat.S_IFMT(info.external_attr >> 16)
        if name.endswith("/"):
            yield Member(name, FOLDER)
        elif info.create_system != _UNIX or kind in (0, stat.S_IFREG):
            yield Member(name, FILE, row, info.file_size)
        elif kind == stat.S_IFLNK:
            target = archive.first_bytes(row, info.file_size, _MOST_LINKED + 1)
            yield Member(name, LINK, target=os.fsdecode(target))
        else:
            yield Member(name, OTHER)


def _name_in_zip(info: zipfile.ZipInfo) -> str:
    """The name as a file system has it, in UTF-8 where the zip says nothing else."""
    name = info.filename
    if not info.flag_bits & _UTF8:
        stored = name.encode("cp437")  # which zipfile takes it for, and which has a letter for each byte
        try:
            name = stored.decode()
        except UnicodeDecodeError:
            name = name if info.create_system == _DOS else os.fsdecode(stored)
    return name.replace("\\", "/") if info.create_system == _DOS else name


def parts_of(name: str) -> list[str] | None:
    """The names of folders and file in a member's name; None if such a name is refused."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return None if ".." in parts or "\0" in name or len(parts) > _MOST_FOLDERS else parts


class _Contents:
    """The members of an archive, in the folders that it would be unpacked into.

    Attributes:
        top: the folder that they are all in.
        ignored: members that stand for no file or folder in it.
    """

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self.top = Node(lambda node: archive.first_bytes(node.place, node.bytes))
        self.top.children = {}
        self.ignored: list[IgnoredPath] = []
        self._archives: list[str] = []  # members that are archives themselves
        self._links: dict[str, str] = {}  # paths of symbolic links, and where they lead
        self._broken_links: list[str] = []
        for member in archive.members():
            self._add(member)

    def follow_links(self) -> None:
        """Let each symbolic link be the file that it leads to.

        Raises:
            SourceError: it leads to another link, or a member is an archive itself.
        """
        if self._archives:
            name = _shown(self._archives[0])
            raise self._archive.damaged(f"its member {name} is an archive itself", _UNPACK_BOTH)
        for path, target in self._links.items():
            target_path = os.path.normpath(os.path.join(os.path.dirname(path), target))
            if target_path in self._links:
                names = f"{_shown(path)} is a link to {_shown(target_path)}"
                raise self._archive.damaged(
                    f"its member {names}, which is a link", f"{_STORE_FILES}, or leave this link out"
                )
            node = self.top.find(path.split("/"))
            assert node is not None
            leads_out = target.startswith("/") or len(target) > _MOST_LINKED
            self._link(node, None if leads_out else self.top.find(target_path.split("/")))

    def warnings(self, archive: Location) -> tuple[str, ...]:
        """Warnings, one line each."""
        if not self._broken_links:
            return ()
        named = abridge([repr(path) for path in self._broken_links])
        return (
            f"{archive}: links to files that are not in the archive are left out: {named}; to include "
            f"these files, {_STORE_FILES}",
        )

    def without_outer_folders(self, class_depth: int) -> tuple[Node, str]:
        """The folder that the class folders are in, and its path with a slash: 101_ObjectCategories/.

        A folder on top that has none beside it is not one of the classes where class folders, `class_depth`
        deep, lie in it. What lies beside it becomes `ignored`.
        """
        top, prefix = self.top, ""
        while (inner := _outer_folder(top, class_depth)) is not None:
            beside = f"lies beside the folder {prefix}{inner.name}"
            self.ignored += (
                IgnoredPath(prefix + node.name, beside) for node in top.entries() if node is not inner
            )
            top, prefix = inner, f"{prefix}{inner.name}/"
        return top, prefix

    def _add(self, member: Member) -> None:
        parts = parts_of(member.name)
        if parts is None:
            self.ignored.append(IgnoredPath(member.name, NO_NAME))
            return
        folder = self._folder(parts if member.kind == FOLDER else parts[:-1])
        if folder is None:
            self.ignored.append(IgnoredPath(member.name, _FILE_AND_FOLDER))
        elif parts and member.kind != FOLDER:
            self._put(folder, parts, member)

    def _put(self, folder: Node, parts: list[str], member: Member) -> None:
        assert folder.children is not None
        old = folder.children.get(parts[-1])
        if old is not None and old.is_dir():
            self.ignored.append(IgnoredPath("/".join(parts), _FILE_AND_FOLDER))
            return
        linked = self.top.find(part for part in member.target.split("/") if part not in ("", "."))
        if old is not None:
            self.ignored.append(IgnoredPath(old.path, _AGAIN))
            self._links.pop(old.path, None)
            del folder.children[parts[-1]]
        node = folder.child(parts[-1])
        node.modified_ns = self._archive.modified_ns
        if member.kind == FILE:
            node.place, node.bytes = member.place, member.size
            if node.name.lower().endswith(_SUFFIXES) and not any(map(is_left_alone, parts)):
                self._archives.append(node.path)
        elif member.kind == LINK:
            self._links[node.path] = member.target
        elif member.kind == HARD_LINK:  # to a member before it
            self._link(node, linked)

    def _link(self, node: Node, target: Node | None) -> None:
        """Let `node` be the file that its link leads to."""
        if target is not None and target.is_file():
            node.place, node.bytes = target.place, target.bytes
        else:
            self._broken_links.append(node.path)

    def _folder(self, parts: list[str]) -> Node | None:
        """The folder, made where it is missing; None where a file has its name."""
        node = self.top
        for part in parts:
            assert node.children is not None
            is_new = part not in node.children
            node = node.child(part)
            if is_new:
                node.children = {}
            elif node.children is None:
                return None
        return node


def _outer_folder(top: Node, class_depth: int) -> Node | None:
    """The one folder in `top`, where it is neither a class nor a split, as `precache.sources.tree` says."""
    shown = list(_shown_folders(top))
    if len(shown) != 1 or split_of(shown[0].name) or not _is_as_deep(shown[0], class_depth):
        return None
    if class_depth == 0:  # pictures beside it have no labels, too
        return None if _loose_pictures(top) else shown[0]
    # a class may have folders; most of what is in a folder of classes lies in these
    left, waiting = _loose_pictures(shown[0]), list(_shown_folders(shown[0]))
    while left > 0 and waiting:
        folder = waiting.pop()
        left -= _loose_pictures(folder)
        waiting += _shown_folders(folder)
    return None if left > 0 else shown[0]


def _loose_pictures(node: Node) -> int:
    return sum(kinds.extension(child.name) in kinds.IMAGE_EXTENSIONS for child in node.entries())


def _shown_folders(node: Node) -> Iterable[Node]:
    """Folders that may be classes or splits."""
    for child in node.entries():
        if child.is_dir() and not is_left_alone(child.name):
            yield child


def _is_as_deep(node: Node, depth: int) -> bool:
    return depth == 0 or any(_is_as_deep(child, depth - 1) for child in _shown_folders(node))


_COMPRESSIONS: dict[bytes, tuple[Callable[..., Any], str]] = {
    b"\x1f\x8b": (gzip.open, "gunzip -k"),
    b"BZh": (bz2.open, "bunzip2 -k"),
    b"\xfd7zXZ": (lzma.open, "unxz -k"),
}
"""First bytes of a compressed file -> what decompresses it, and the command that unpacks it."""


def _unpack(archive: Archive, decompressed: Callable[..., Any], command: str) -> Path:
    """Unpack a compressed tar into the staging folder, since pictures are read in shuffled order.

    Raises:
        SourceError: it is damaged, cannot be read, or there is no room for what it holds.
    """
    folder = staging.folder()
    identity = f"{os.path.abspath(archive.path)} {archive.scanned_status}".encode(errors="surrogateescape")
    path = folder / f"{hashlib.sha256(identity).hexdigest()[:16]}.tar"
    if path.exists():  # of an earlier scan
        return path
    warn(
        f"{archive.shown}: is compressed as a whole, so it is unpacked into {folder.parent} first; after "
        f"'{command}' it is read in place"
    )
    temporary = temporary_path(path)
    try:
        with _ArchiveFile(archive) as packed, decompressed(packed) as unpacked, open(temporary, "xb") as file:
            shutil.copyfileobj(unpacked, file, _READ_BYTES)
        os.replace(temporary, path)
    except (EOFError, zlib.error, lzma.LZMAError, OSError, MemoryError) as error:
        if getattr(error, "errno", None) is None:
            reason = "it breaks off" if isinstance(error, EOFError) else str(error) or "out of memory"
            raise archive.damaged(f"cannot be unpacked ({reason})") from error
        free = shutil.disk_usage(folder).free
        raise SourceError(
            f"{archive.shown}: does not fit into {folder.parent} when it is unpacked ({error}; {free:,} "
            f"bytes are free); set TMPDIR to a folder on a larger disk, or unpack it with {command}"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path
