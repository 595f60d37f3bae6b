"""What lies in a folder, on disk or in an archive: pictures, folders, and what is neither, and why."""

import errno
import os
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from precache.pictures import kinds
from precache.pictures.reading import steadily
from precache.storage import open_regular


class Inside(Protocol):
    """What lies in an archive, asked as `os.DirEntry` is; nothing of this fails for a moment."""

    @property
    def name(self) -> str:
        """Without those of its folders."""

    @property
    def path(self) -> str:
        """What messages call it."""

    def is_dir(self) -> bool:
        """Whether it is a folder."""

    def is_file(self) -> bool:
        """Whether it is a file that can be read."""

    def entries(self) -> Iterable["Inside"]:
        """What it holds."""

    def status(self) -> os.stat_result:
        """Its size, and when it was last written."""

    def start(self) -> bytes:
        """As many of its first bytes as `kinds.PREFIX_BYTES`."""


Entry: TypeAlias = os.DirEntry[str] | Inside
Folder: TypeAlias = str | os.PathLike[str] | Inside

LOOP = "a link to a folder that it lies in"
HIDDEN_FOLDER = "a hidden folder"
NO_PICTURES = "a folder without pictures"
INNER_FOLDER = "a folder inside a class folder"
NO_FILE = "not a regular file"
HIDDEN_FILE = "a hidden file"


def sorted_entries(folder: Folder) -> list[Entry]:
    """What `folder` holds, by name.

    Raises:
        SourceError: it cannot be listed.
    """
    if not isinstance(folder, str | os.PathLike):
        return sorted(folder.entries(), key=lambda entry: entry.name)

    def entries() -> list[Entry]:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)

    return steadily(entries, os.fspath(folder))


def is_folder(entry: Entry) -> bool:
    """Whether it is a folder, or a link to one; SourceError if that cannot be found out."""
    return steadily(lambda: _is(entry, entry.is_dir), entry.path)


def is_loop(entry: Entry) -> bool:
    """Whether it is a link to a folder that it lies in: following it leads here again."""
    if not isinstance(entry, os.DirEntry) or not entry.is_symlink():
        return False
    target, here = os.path.realpath(entry.path), os.path.realpath(os.path.dirname(entry.path))
    return os.path.commonpath((target, here)) == target


def status(entry: Entry | Folder) -> os.stat_result:
    """Of what it leads to; SourceError if that cannot be found out."""
    if not isinstance(entry, os.DirEntry | str | os.PathLike):
        return entry.status()
    try:  # what nearly always works is asked without ceremony: a tree may hold 10,000,000 files
        return os.stat(entry)
    except OSError:
        return steadily(lambda: os.stat(entry), os.fspath(entry))


def why_not_a_picture(entry: Entry) -> str | None:
    """Why this, in a class folder, is no sample; None if it is one."""
    if is_listed_as_picture(entry):
        return None
    if is_folder(entry):
        return INNER_FOLDER
    if not steadily(lambda: _is(entry, entry.is_file), entry.path):
        return NO_FILE
    if entry.name.startswith("."):
        return HIDDEN_FILE
    if kinds.extension(entry.name) in kinds.IMAGE_EXTENSIONS or _begins_as_picture(entry):
        return None
    return kinds.why_not_read(entry.name)


def looks_like_picture(entry: Entry) -> bool:
    """Whether the user may have taken it for a sample."""
    return not entry.name.startswith(".") and kinds.looks_like_picture(entry.name) and not is_folder(entry)


def says_its_folder(entry: Entry, reason: str | None) -> bool:
    """Whether `reason`, of `why_not_a_picture`, holds for as long as the folder is not written to.

    What a link leads to, and what a file begins with, may change without it.
    """
    if is_listed_as_picture(entry):
        return True
    kinds_alone = reason in (INNER_FOLDER, NO_FILE, HIDDEN_FILE)
    return kinds_alone and isinstance(entry, os.DirEntry) and not entry.is_symlink()


def is_listed_as_picture(entry: Entry) -> bool:
    """Whether the folder's own list says that it is a file, not a link, named as a picture: as usual."""
    name = entry.name
    if name.startswith(".") or name[name.rfind(".") :].lower() not in kinds.IMAGE_EXTENSIONS:
        return False
    try:
        return isinstance(entry, os.DirEntry) and entry.is_file(follow_symlinks=False)
    except OSError:  # such a list says nothing of kinds, and asking failed: ask with patience
        return False


def _is(entry: Entry, question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return False
        raise


def _begins_as_picture(entry: Entry) -> bool:
    def start() -> bytes:
        descriptor = open_regular(entry.path)
        try:  # a file object's `read` gives None where there is nothing yet
            return os.read(descriptor, kinds.PREFIX_BYTES)
        finally:
            os.close(descriptor)

    first = steadily(start, entry.path) if isinstance(entry, os.DirEntry) else entry.start()
    return kinds.is_picture(entry.name, first)
