"""Tar and zip archives of class folders, read without unpacking them to a tree.

    photos.tar     read in place: a picture is a range of its bytes
    photos.zip     read in place, too; members are stored or deflated
    photos.tar.gz  (.tgz, .bz2, .xz) decompressed to a tar first, see `precache.storage.staging`

Samples, paths, ids, labels, splits and digest are those of the tree that unpacking would make. An outermost
folder around everything else, such as 101_ObjectCategories/, is not part of the paths. A tar of WebDataset
samples is read as `precache.sources.webdataset` says.

`tarfile` and `zipfile` list the members and their offsets. No file is ever written under a member's name:

    class/1.jpg, ./class/1.jpg, /class/1.jpg    are the same file
    ../class/1.jpg                              is left out: it leads out of the archive
    class/1.jpg twice                           the last one is used, as when unpacking
    a hard link                                 is the file that it names
    a symbolic link                             is the file that it leads to; one to a folder is not followed
    a picture that unpacks to another size      is rejected

The whole archive is refused, with the member's name, if it has a link to a link, an archive inside, a member
that is encrypted or packed by another method than deflate, a sparse file, or a size that it cannot hold.
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
from precache.sources.tree import Node, is_skipped_folder, scan_folders, split_of
from precache.storage import open_regular, staging, temporary_path
from precache.storage.urls import Location

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz", ".zip")

FILE, FOLDER, LINK, HARD_LINK, OTHER = "file", "folder", "link", "hard link", "other"
INVALID_NAME = "has a name that leads out of the archive, or that no file can have"
_REPLACED = "appears again later in the archive; the last one is used"
_FILE_AND_FOLDER = "is a file and a folder"
_MAX_FOLDERS = 255  # how many folders may lie around a file
_MAX_LINK_LENGTH = 4095  # characters of a link's target

_COPY_AGAIN = "download or copy it again"
_UNPACK = "unpack it, and convert the folder"
_UNPACK_BOTH = "unpack both, and convert the folder"
_STORE_FILES = "make it with 'tar -h', or 'zip' without -y"
_READ_BYTES = 1 << 20
_LISTING_BYTES = 16 << 10  # read at a time while a tar is listed: a header, and often the next ones
_CONTINUED = b"M"  # type of a tar's member that began in another archive
_DUMPED_FOLDER = b"D"  # type of a folder in GNU's incremental archives
_MAX_MEMBER_BYTES = 1 << 40  # so that the sum of all sizes fits into 64 bits
_ENTRY = np.dtype([("header", "<i8"), ("packed", "<i8"), ("crc", "<u4"), ("method", "<u2")])
_LOCAL_HEADER_BYTES = 30  # size of the header before each member of a zip, without its names
_LOCAL_HEADER_MARK = b"PK\3\4"
_PREFIX_PACKED_BYTES = 4096  # packed bytes that are enough to unpack the first bytes of a member
_NAMES_BYTES = 256  # usually enough for name and extra field, so that one read gets header and data
_ENCRYPTED, _UTF8 = 0x1, 0x800  # flags of a zip's member
_DOS, _UNIX = 0, 3  # systems that a zip was made on


def is_archive(path: Path) -> bool:
    """Return whether the file's name is that of a tar or zip which can be read."""
    return path.name.lower().endswith(_SUFFIXES)


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """An archive of class folders as a `Source`.

    Attributes:
        root: file or URL of the archive.
        file: local file of the archive: `root`, or what was fetched from it.
        archive: the archive with its list of members; None before the scan.
        prefix: folder around all samples, with a slash, which their paths leave out; "" if there is none.
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
        from precache.sources import webdataset  # not above, since it imports this module

        archive = open_archive(self.file, str(self.root))
        contents = _MemberTree(archive)
        if self.options.class_depth is None and webdataset.has_samples(contents.top):
            source = webdataset.WebDatasetSource(self.root, self.file, self.options)
            return webdataset.scan_archives(source, (archive,))
        self.options.check_kind(CLASS_FOLDERS)
        contents.follow_links()
        class_depth = 1 if self.options.class_depth is None else self.options.class_depth
        top, prefix = contents.find_top(class_depth)
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
        """Return the name for messages: the archive's path, and the member's name."""
        return os.path.join(str(self.root), self.prefix, ref.path)


class Member(NamedTuple):
    """A member of an archive: a file, a folder or a link.

    Attributes:
        name: path in the archive, with slashes.
        kind: FILE, FOLDER, LINK, HARD_LINK or OTHER, such as a device.
        place: position of the content: an offset in a tar, a row of `Archive.entries` for a zip.
        size: size of the content in bytes.
        target: path that a link leads to.
    """

    name: str
    kind: str
    place: int = 0
    size: int = 0
    target: str = ""


@dataclass(slots=True, eq=False)
class Archive:
    """Reader of an archive's members; it is small, and pickled for worker processes.

    Attributes:
        name: path or URL of the archive in messages.
        path: path of the file that is read: the archive, or the tar that it was decompressed to.
        scanned_status: size of that file in bytes, and time of its last write in ns.
        modified_ns: time of the archive's last write.
        is_zip: whether it is a zip, not a tar.
        entries: `_ENTRY` [n], position, sizes and method of a zip's members; None before they are listed.
        file: open file while members are listed; its buffer often has the next header already.
    """

    name: str
    path: str
    scanned_status: tuple[int, int]
    modified_ns: int
    is_zip: bool = False
    entries: npt.NDArray[np.void] | None = None
    file: BinaryIO | None = None

    @property
    def size(self) -> int:
        """Size of the archive in bytes."""
        return self.scanned_status[0]

    def members(self) -> Iterator[Member]:
        """List the members, in the archive's order.

        Raises:
            SourceError: the archive is damaged, breaks off, or has a member that cannot be read in place.
        """
        with io.BufferedReader(_ArchiveFile(self), _LISTING_BYTES) as file:
            self.file = file
            try:
                yield from _zip_members(self, file) if self.is_zip else _tar_members(self, file)
            finally:
                self.file = None

    def read(self, start: int, count: int) -> bytes:
        """Read some bytes of the file; SourceError if they cannot be read, or the file has changed."""
        if self.file is None:
            return read_part(self.path, self.name, self.scanned_status, start, count)
        self.file.seek(start)
        return self.file.read(count)

    def first_bytes(self, place: int, size: int, count: int = kinds.PREFIX_BYTES) -> bytes:
        """Return the first bytes of a member; none if they cannot be unpacked."""
        if self.is_zip:
            return self._unzip(place, count, _PREFIX_PACKED_BYTES)
        return self.read(place, min(size, count))

    def content(self, where: str, place: int, size: int) -> bytes:
        """Return the content of a member, whose name in messages is `where`.

        Raises:
            ImageError: the member cannot be unpacked, or does not match its CRC-32.
            SourceError: the bytes cannot be read, or the file has changed.
        """
        if not self.is_zip:
            data = self.read(place, size)
            if len(data) != size:
                raise SourceError(
                    f"{len(data):,} of its {size:,} bytes could be read",
                    path=where,
                    remedy="check the disk or the network, then run the same command again",
                )
            return data
        assert self.entries is not None
        # neither reads nor unpacks more than it must: the member may be a bomb, or lie about its packed size
        data = self._unzip(place, size + 1, 2 * size + _READ_BYTES)
        if len(data) != size or zlib.crc32(data) != self.entries["crc"][place]:
            raise ImageError(where, "is damaged in the archive: it does not match its CRC-32")
        return data

    def picture(self, where: str, place: int, size: int, max_pixels: int) -> bytes:
        """Return the content of a picture; ImageError also if it is too large for one of `max_pixels`."""
        check_bytes(where, size, max_pixels)
        if self.entries is not None:
            check_bytes(where, int(self.entries["packed"][place]), max_pixels)
        return self.content(where, place, size)

    def error(self, message: str, remedy: str = _COPY_AGAIN) -> SourceError:
        """Return a SourceError about this archive; `message` begins with a verb."""
        return SourceError(message, path=self.name, remedy=remedy)

    def _unzip(self, place: int, max_bytes: int, max_packed_bytes: int) -> bytes:
        """Unpack the first `max_bytes` of a zip's member from `max_packed_bytes`; none if it is damaged."""
        assert self.entries is not None
        header, packed_bytes, _, method = self.entries[place].item()
        packed_bytes = min(packed_bytes, max_packed_bytes)
        block = self.read(header, _LOCAL_HEADER_BYTES + _NAMES_BYTES + packed_bytes)
        if len(block) < _LOCAL_HEADER_BYTES or not block.startswith(_LOCAL_HEADER_MARK):
            return b""
        # lengths of name and extra field, which lie between the header and the data
        names_bytes = int.from_bytes(block[26:28], "little") + int.from_bytes(block[28:30], "little")
        start = _LOCAL_HEADER_BYTES + names_bytes
        if names_bytes <= _NAMES_BYTES:
            packed = block[start : start + packed_bytes]
        else:
            packed = self.read(header + start, packed_bytes)
        if method == zipfile.ZIP_STORED:
            return packed[:max_bytes]
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, max_bytes)
        except zlib.error:
            return b""


def open_archive(path: Path, name: str) -> Archive:
    """Open the archive at `path`, called `name` in messages; decompress it first if it is a compressed tar.

    Raises:
        SourceError: there is no archive, or it cannot be read or decompressed.
    """
    try:
        status = read_with_retries(lambda: os.stat(path), name)
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            remedy = f"name an archive{did_you_mean(path)}"
            raise SourceError("does not exist", path=name, remedy=remedy) from error
        raise
    if not stat.S_ISREG(status.st_mode):
        raise SourceError("is not a file; expected an archive of class folders with pictures", path=name)
    scanned_status = status.st_size, status.st_mtime_ns
    archive = Archive(name, str(path), scanned_status, status.st_mtime_ns, path.name.lower().endswith(".zip"))
    if archive.is_zip:
        return archive
    start = archive.read(0, 6)
    for compression in _COMPRESSIONS:
        if start.startswith(compression.mark):
            unpacked = _decompress(archive, compression)
            status = os.stat(unpacked)
            return replace(archive, path=str(unpacked), scanned_status=(status.st_size, status.st_mtime_ns))
    return archive


class _ArchiveFile(io.FileIO):
    """File of an archive for tarfile and zipfile, which tries again when a disk fails for a moment."""

    def __init__(self, archive: Archive) -> None:
        with read_with_retries(lambda: open_regular(archive.path), archive.name) as file:
            super().__init__(os.dup(file.fileno()))
        self._archive_name = archive.name

    def readinto(self, buffer: Any) -> int:
        return read_with_retries(lambda: super(_ArchiveFile, self).readinto(buffer), self._archive_name) or 0


def _tar_members(archive: Archive, file: BinaryIO) -> Iterator[Member]:
    """List the members of a tar; see `Archive.members`."""
    position = 0  # offset of the next member's header
    try:
        tar = tarfile.TarFile(fileobj=file)
        while True:
            file.seek(position)
            # not tar.next(), which keeps all members in memory: there may be 10,000,000
            member = tarfile.TarInfo.fromtarfile(tar)
            _check_tar_member(archive, member, position, tar.offset)
            kind = _tar_member_kind(member)
            yield Member(member.name, kind, member.offset_data, member.size, member.linkname)
            position = tar.offset
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # an empty block ends the archive
        pass
    except SourceError:
        raise
    except Exception as error:  # tarfile raises nearly anything, even RecursionError for nested headers
        message = f"is damaged, or breaks off, at byte {position:,}" if position else "is not a tar"
        raise archive.error(f"{message} ({_reason(error)})") from error
    while part := file.read(_READ_BYTES):
        if part.strip(b"\0"):
            raise archive.error(
                f"has more data after its end at byte {position:,}",
                f"if tars were joined with cat, join them with 'tar -A'; else {_COPY_AGAIN}",
            )


def _check_tar_member(archive: Archive, member: tarfile.TarInfo, position: int, next_position: int) -> None:
    """Raise SourceError if the member, whose header is at `position`, cannot be read in place."""
    name = _short_name(member.name)
    end = member.offset_data + member.size if member.isreg() else next_position
    if member.size < 0 or next_position <= position:
        raise archive.error(f"is damaged: {name} at byte {position:,} has an impossible size")
    if member.issparse():
        raise archive.error(f"its member {name} is stored as a sparse file", _UNPACK)
    if member.type == _CONTINUED:
        raise archive.error(f"its member {name} continues in another archive", _UNPACK)
    if end > archive.size:
        raise archive.error(
            f"breaks off: {name} should end at byte {end:,}, and the archive has {archive.size:,} bytes"
        )


def _short_name(name: str) -> str:
    """Return the end of a member's name for a message, in quotes."""
    return repr(name[-100:])


def _reason(error: Exception) -> str:
    """Return the text of an exception of tarfile or zipfile on one short line."""
    return " ".join(str(error).split())[:100] or type(error).__name__


def _tar_member_kind(member: tarfile.TarInfo) -> str:
    if member.isreg():
        return FILE
    if member.isdir() or member.type == _DUMPED_FOLDER:
        return FOLDER
    if member.issym():
        return LINK
    return HARD_LINK if member.islnk() else OTHER


def _zip_members(archive: Archive, file: BinaryIO) -> Iterator[Member]:
    """List the members of a zip, and fill in `archive.entries`; see `Archive.members`."""
    try:
        infos = zipfile.ZipFile(file).infolist()
    except SourceError:
        raise
    except Exception as error:  # zipfile raises nearly anything
        raise archive.error(
            f"is not a zip, breaks off or is damaged ({_reason(error)})",
            f"{_COPY_AGAIN}, or join the parts of a zip of several files with 'zip -s 0'",
        ) from error
    archive.entries = np.zeros(len(infos), _ENTRY)
    infos.reverse()
    for row in range(len(infos)):
        info = infos.pop()  # frees it after its turn: a million take 600 MB
        name = _short_name(info.filename)
        end = info.header_offset + _LOCAL_HEADER_BYTES + info.compress_size
        if info.header_offset < 0 or end > archive.size or info.file_size > _MAX_MEMBER_BYTES:
            raise archive.error(f"is damaged: its member {name} cannot be as large as it says")
        if info.flag_bits & _ENCRYPTED:
            raise archive.error(f"its member {name} is encrypted", _UNPACK)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise archive.error(
                f"its member {name} is packed by method {info.compress_type}, not by deflate", _UNPACK
            )
        archive.entries[row] = (info.header_offset, info.compress_size, info.CRC, info.compress_type)
        path, file_type = _zip_member_path(info), stat.S_IFMT(info.external_attr >> 16)
        if path.endswith("/"):
            yield Member(path, FOLDER)
        elif info.create_system != _UNIX or file_type in (0, stat.S_IFREG):
            yield Member(path, FILE, row, info.file_size)
        elif file_type == stat.S_IFLNK:
            target = archive.first_bytes(row, info.file_size, _MAX_LINK_LENGTH + 1)
            yield Member(path, LINK, target=os.fsdecode(target))
        else:
            yield Member(path, OTHER)


def _zip_member_path(info: zipfile.ZipInfo) -> str:
    """Return the path of a zip's member with slashes; names without an encoding are read as UTF-8."""
    name = info.filename
    if not info.flag_bits & _UTF8:
        stored = name.encode("cp437")  # as zipfile has decoded it; cp437 has a character for each byte
        try:
            name = stored.decode()
        except UnicodeDecodeError:
            if info.create_system != _DOS:
                name = os.fsdecode(stored)
    return name.replace("\\", "/") if info.create_system == _DOS else name


def path_parts(name: str) -> list[str] | None:
    """Return the names of folders and file in a member's name; None if such a name is not allowed."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name or len(parts) > _MAX_FOLDERS:
        return None
    return parts


class _MemberTree:
    """Members of an archive, in the folders that unpacking it would make.

    Attributes:
        top: folder that the archive would be unpacked into.
        ignored: members that are no file or folder in it, and why.
    """

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self.top = Node(lambda node: archive.first_bytes(node.place, node.bytes))
        self.top.children = {}
        self.ignored: list[IgnoredPath] = []
        self._inner_archives: list[str] = []  # paths of members that are archives themselves
        self._links: dict[str, str] = {}  # path of each symbolic link -> its target
        self._broken_links: list[str] = []
        for member in archive.members():
            self._add(member)

    def follow_links(self) -> None:
        """Replace each symbolic link by the file that it leads to.

        Raises:
            SourceError: a link leads to another link, or a member is an archive itself.
        """
        if self._inner_archives:
            name = _short_name(self._inner_archives[0])
            raise self._archive.error(f"its member {name} is an archive itself", _UNPACK_BOTH)
        for path, target in self._links.items():
            target_path = os.path.normpath(os.path.join(os.path.dirname(path), target))
            if target_path in self._links:
                names = f"{_short_name(path)} is a link to {_short_name(target_path)}"
                raise self._archive.error(
                    f"its member {names}, which is a link", f"{_STORE_FILES}, or leave this link out"
                )
            node = self.top.find(path.split("/"))
            assert node is not None
            target_node = self.top.find(target_path.split("/"))
            if target.startswith("/") or len(target) > _MAX_LINK_LENGTH:  # leads out of the archive
                target_node = None
            self._copy_target(node, target_node)

    def warnings(self, archive: Location) -> tuple[str, ...]:
        """Return a warning of broken links, if there are any."""
        if not self._broken_links:
            return ()
        names = abridge([repr(path) for path in self._broken_links])
        return (
            f"{archive}: links to files that are not in the archive are left out: {names}; to include "
            f"these files, {_STORE_FILES}",
        )

    def find_top(self, class_depth: int) -> tuple[Node, str]:
        """Return the folder with the class folders, and its path with a slash, as 101_ObjectCategories/.

        A single outermost folder is not a class if class folders, `class_depth` deep, lie in it. Files beside
        it are added to `ignored`.
        """
        top, prefix = self.top, ""
        while (inner := _outer_folder(top, class_depth)) is not None:
            reason = f"lies beside the folder {prefix}{inner.name}"
            self.ignored += (
                IgnoredPath(prefix + node.name, reason) for node in top.entries() if node is not inner
            )
            top, prefix = inner, f"{prefix}{inner.name}/"
        return top, prefix

    def _add(self, member: Member) -> None:
        """Add a member to the folders, or to `ignored`."""
        parts = path_parts(member.name)
        if parts is None:
            self.ignored.append(IgnoredPath(member.name, INVALID_NAME))
            return
        folder = self._make_folder(parts if member.kind == FOLDER else parts[:-1])
        if folder is None:
            self.ignored.append(IgnoredPath(member.name, _FILE_AND_FOLDER))
        elif parts and member.kind != FOLDER:
            self._add_file(folder, parts, member)

    def _add_file(self, folder: Node, parts: list[str], member: Member) -> None:
        """Add a file or a link to its folder; it replaces an earlier member of the same name."""
        assert folder.children is not None
        earlier = folder.children.get(parts[-1])
        if earlier is not None and earlier.is_dir():
            self.ignored.append(IgnoredPath("/".join(parts), _FILE_AND_FOLDER))
            return
        target = self.top.find(part for part in member.target.split("/") if part not in ("", "."))
        if earlier is not None:
            self.ignored.append(IgnoredPath(earlier.path, _REPLACED))
            self._links.pop(earlier.path, None)
            del folder.children[parts[-1]]
        node = folder.child(parts[-1])
        node.modified_ns = self._archive.modified_ns
        if member.kind == FILE:
            node.place, node.bytes = member.place, member.size
            is_skipped = any(is_skipped_folder(part) for part in parts)
            if node.name.lower().endswith(_SUFFIXES) and not is_skipped:
                self._inner_archives.append(node.path)
        elif member.kind == LINK:
            self._links[node.path] = member.target
        elif member.kind == HARD_LINK:  # its target is always an earlier member
            self._copy_target(node, target)

    def _copy_target(self, node: Node, target: Node | None) -> None:
        """Give a link the content of its target; a link without a target is noted as broken."""
        if target is not None and target.is_file():
            node.place, node.bytes = target.place, target.bytes
        else:
            self._broken_links.append(node.path)

    def _make_folder(self, parts: list[str]) -> Node | None:
        """Return the folder at this path, made if it is missing; None if a file has its name."""
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
    """Return the only folder in `top` if it holds the class folders, and is no class or split; else None."""
    folders = list(_visible_folders(top))
    if len(folders) != 1 or split_of(folders[0].name) or not _has_depth(folders[0], class_depth):
        return None
    outer = folders[0]
    if class_depth == 0:
        # pictures beside the folder are samples, too, so it is not around all samples
        return None if _count_pictures(top) else outer
    # a class may hold folders, too, but then most of its pictures lie directly in it
    surplus, pending = _count_pictures(outer), list(_visible_folders(outer))
    while surplus > 0 and pending:
        folder = pending.pop()
        surplus -= _count_pictures(folder)
        pending += _visible_folders(folder)
    return None if surplus > 0 else outer


def _count_pictures(folder: Node) -> int:
    """Count the pictures that lie directly in a folder, by their extensions."""
    return sum(kinds.extension(child.name) in kinds.IMAGE_EXTENSIONS for child in folder.entries())


def _visible_folders(folder: Node) -> Iterable[Node]:
    """Yield the folders in a folder that may be classes or splits."""
    for child in folder.entries():
        if child.is_dir() and not is_skipped_folder(child.name):
            yield child


def _has_depth(folder: Node, depth: int) -> bool:
    """Return whether folders lie at least `depth` deep in a folder."""
    return depth == 0 or any(_has_depth(child, depth - 1) for child in _visible_folders(folder))


class _Compression(NamedTuple):
    """A compression of whole tars.

    Attributes:
        mark: first bytes of a compressed file.
        open: function that opens a compressed file for reading.
        command: command that a user can decompress the file with.
    """

    mark: bytes
    open: Callable[..., Any]
    command: str


_COMPRESSIONS = (
    _Compression(b"\x1f\x8b", gzip.open, "gunzip -k"),
    _Compression(b"BZh", bz2.open, "bunzip2 -k"),
    _Compression(b"\xfd7zXZ", lzma.open, "unxz -k"),
)


def _decompress(archive: Archive, compression: _Compression) -> Path:
    """Decompress a tar into the staging folder, since pictures are read in shuffled order.

    Raises:
        SourceError: the archive is damaged or cannot be read, or the disk has no room for the tar.
    """
    folder = staging.folder()
    identity = f"{os.path.abspath(archive.path)} {archive.scanned_status}".encode(errors="surrogateescape")
    path = folder / f"{hashlib.sha256(identity).hexdigest()[:16]}.tar"
    if path.exists():  # an earlier scan has made it
        return path
    warn(
        f"{archive.name}: is compressed as a whole, so it is unpacked into {folder.parent} first; after "
        f"'{compression.command}' it is read in place"
    )
    temporary = temporary_path(path)
    try:
        with (
            _ArchiveFile(archive) as packed,
            compression.open(packed) as unpacked,
            open(temporary, "xb") as file,
        ):
            shutil.copyfileobj(unpacked, file, _READ_BYTES)
        os.replace(temporary, path)
    except (EOFError, zlib.error, lzma.LZMAError, OSError, MemoryError) as error:
        if getattr(error, "errno", None) is None:
            reason = "it breaks off" if isinstance(error, EOFError) else str(error) or "out of memory"
            raise archive.error(f"cannot be unpacked ({reason})") from error
        free_bytes = shutil.disk_usage(folder).free
        raise SourceError(
            f"does not fit into {folder.parent} when it is unpacked ({error}; {free_bytes:,} bytes are free)",
            path=archive.name,
            remedy=f"set TMPDIR to a folder on a larger disk, or unpack it with {compression.command}",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path
