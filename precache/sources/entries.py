"""Entries of a tree: which files are pictures, which folders are searched, and why the others are ignored.

    ENTRY OF A FOLDER                      WHAT COMES
    1.jpg, 2.JPEG, 3.gif, 4.avif           a picture
    tmp (a JPEG)                           a picture
    RENAME2 (text)                         neither an image extension nor an image signature
    notes.txt                              no image extension
    drawing.svg                            SVG: a drawing, not a picture; render it first
    5.jxl                                  an unsupported kind of picture
    ._1.jpg, .hidden.jpg                   a hidden file
    6.jpg -> ../dog/1.jpg                  a picture
    gone.jpg -> gone.jpg, 7.jpg -> none    not a regular file
    greg/, x.jpg/                          a folder that is searched
    dogs -> ../dog                         a folder that is searched
    again -> ., above -> .., b/up -> ..    a link to a folder that it lies in
    .git/, .ipynb_checkpoints/             a hidden folder
    @eaDir/, lost+found/, __MACOSX/        a folder of the system

Torchvision's `ImageFolder` decides by the extension alone, and takes fewer kinds; it follows a link to a
folder above some 40 times. `precache.pictures.kinds` lists extensions and signatures.
"""

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from precache.pictures import kinds
from precache.pictures.reading import read_with_retries
from precache.storage import open_regular

SYSTEM_FOLDERS = frozenset((
    "__MACOSX", "@eaDir", "@Recycle", "#recycle", "#snapshot", "lost+found", "$RECYCLE.BIN",
    "System Volume Information", "__pycache__",
))  # fmt: skip
"""Folders that operating systems, network storages and programs put among the user's own."""
LINK_TO_PARENT = "a link to a folder that it lies in"


class Entry:
    """A file or a folder of a tree; an error of the disk raises SourceError."""

    __slots__ = ("_entry", "name")

    def __init__(self, entry: "os.DirEntry[str] | Path") -> None:
        self._entry, self.name = entry, entry.name

    def is_dir(self) -> bool:
        """Return whether this is a folder, or a link to one."""
        return self._test(self._entry.is_dir)

    def reason_to_ignore(self) -> str | None:
        """Return why this is neither a picture nor a folder that is searched; None if it is one of these."""
        is_hidden = self.name.startswith(".")
        if self.is_dir():
            if is_hidden or self.name in SYSTEM_FOLDERS:
                return "a hidden folder" if is_hidden else "a folder of the system"
            return LINK_TO_PARENT if self._is_link_to_parent() else None
        if not self._test(self._entry.is_file):
            return "not a regular file"
        if is_hidden:
            return "a hidden file"
        extension = kinds.extension(self.name)
        has_signature = not extension and kinds.begins_like_picture(self._first_bytes())
        if has_signature or extension in kinds.IMAGE_EXTENSIONS:
            return None
        return kinds.skip_reason(self.name)

    def entries(self) -> "list[Entry]":
        """Return the files and folders in the folder, sorted by name."""

        def list_entries() -> list[Entry]:
            with os.scandir(self._entry) as entries:
                return [Entry(entry) for entry in entries]

        return _sorted_by_name(read_with_retries(list_entries, os.fspath(self._entry)))

    def list_pictures(self) -> "tuple[list[str], list[Entry]]":
        """Return the names of the folder's files that have a picture's extension, and all other entries.

        The folder's list has the type of each entry (`d_type`), so that no call per file is needed, except
        for links, and on file systems that do not store the types.
        """

        def list_by_name() -> tuple[list[str], list[Entry]]:
            pictures: list[str] = []
            others: list[Entry] = []
            with os.scandir(self._entry) as entries:
                for entry in entries:
                    if _has_picture_name(entry.name) and entry.is_file(follow_symlinks=False):
                        pictures.append(entry.name)
                    else:
                        others.append(Entry(entry))
            return pictures, others

        pictures, others = read_with_retries(list_by_name, os.fspath(self._entry))
        return pictures, _sorted_by_name(others)

    def identity(self) -> tuple[int, int] | None:
        """Return device and inode number of the folder; None if the file system has no inode numbers."""
        status = read_with_retries(lambda: os.stat(self._entry), os.fspath(self._entry))
        return (status.st_dev, status.st_ino) if status.st_ino else None

    def _is_link_to_parent(self) -> bool:
        """Return whether this is a link, perhaps over other links, to a folder that contains it."""
        if not self._entry.is_symlink():
            return False
        path = os.path.abspath(self._entry)
        target = os.path.realpath(path)
        folders = (os.path.realpath(folder) for folder in Path(path).parents)
        return any(os.path.commonpath((target, folder)) == target for folder in folders)

    def _first_bytes(self) -> bytes:
        """Return the file's first bytes, at most `kinds.PREFIX_BYTES`."""

        def read_start() -> bytes:
            with open_regular(self._entry) as file:
                # not file.read, which returns None while a slow file system has no bytes yet
                return os.read(file.fileno(), kinds.PREFIX_BYTES)

        return read_with_retries(read_start, os.fspath(self._entry))

    def _test(self, is_kind: Callable[[], bool]) -> bool:
        """Return what `is_kind` returns; False for a link to itself."""

        def test() -> bool:
            try:
                return is_kind()
            except OSError as error:
                if error.errno == errno.ELOOP:  # a link to itself
                    return False
                raise

        return read_with_retries(test, os.fspath(self._entry))


def has_picture(folder: Entry, depth: int = 0) -> bool:
    """Return whether a picture lies below `folder`, at least `depth` folders deep."""
    pending = [(folder, depth)]
    while pending:
        folder, depth = pending.pop()
        for entry in folder.entries():
            if entry.is_dir():
                if entry.reason_to_ignore() is None:
                    pending.append((entry, depth - 1))
            elif depth <= 0 and entry.reason_to_ignore() is None:
                return True
    return False


def _has_picture_name(name: str) -> bool:
    """Return whether a file's name is that of a picture."""
    return name[name.rfind(".") :].lower() in kinds.IMAGE_EXTENSIONS and name[0] != "."


def _sorted_by_name(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.name)
