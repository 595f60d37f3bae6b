"""What an archive holds, as the folders that it would be unpacked into; nothing is ever unpacked.

class/1.jpg, ./class/1.jpg, /class/1.jpg    the same file: where it would be written plays no part
../class/1.jpg                              left out: it leads out of the archive
class/1.jpg twice                           the last one counts, as when it is unpacked
a hard link                                 the file that it names
a symbolic link                             the file that it leads to; to a folder: not followed
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from precache.console.notices import some
from precache.pictures import kinds
from precache.sources.base import IgnoredPath

FILE, FOLDER, LINK, HARD_LINK, OTHER = "file", "folder", "link", "hard link", "other"
# More folders around a file, characters of a link's target, or links one after the other are an attack.
_MOST_FOLDERS, _MOST_LINKED, _MOST_HOPS = 255, 4096, 8
_AGAIN = "is in the archive again, further on; the last one counts"
_NO_LINK: tuple[str] = ("",)
NO_NAME = "has a name that leads out of the archive, or that no file can have"
_BOTH = "is a file and a folder"


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of an archive.

    Attributes:
        name: as it is stored, with slashes.
        kind: FILE, FOLDER, LINK, HARD_LINK or OTHER, such as a device.
        place: where its content is, a number that the archive's reader understands.
        size: of its content, in bytes.
        target: of a link.
    """

    name: bytes
    kind: str
    place: int = 0
    size: int = 0
    target: bytes = b""


@dataclass(frozen=True, slots=True)
class Home:
    """The archive that nodes lie in.

    Attributes:
        modified_ns: when it was last written.
        start: `(place, size) -> first bytes` of a member.
    """

    modified_ns: int
    start: Callable[[int, int], bytes]


class Node:
    """A file or a folder of an archive, see `precache.sources.folders.Inside`.

    Attributes:
        children: of a folder, by name; None for all else.
        place, size: as of `Member`; a size of -1 is that of what cannot be read.
    """

    __slots__ = ("children", "home", "name", "place", "size")

    def __init__(self, name: str, home: Home, *, folder: bool = False) -> None:
        self.name, self.home = name, home
        self.children: dict[str, Node] | None = {} if folder else None
        self.place, self.size = 0, -1

    @property
    def path(self) -> str:
        """Its name."""
        return self.name

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return self.children is not None

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self.children is None and self.size >= 0

    def entries(self) -> Iterable["Node"]:
        """What it holds."""
        return self.children.values() if self.children is not None else ()

    def status(self) -> os.stat_result:
        """Its size, and when the archive was last written; no number of a folder."""
        times = {"st_mtime_ns": self.home.modified_ns}
        return os.stat_result((0, 0, 0, 1, 0, 0, max(self.size, 0), 0, 0, 0), times)

    def start(self) -> bytes:
        """Its first bytes."""
        return self.home.start(self.place, self.size)[: kinds.PREFIX_BYTES]


def parts_of(name: str) -> list[str] | None:
    """The names of folders and file in a member's name; None if it is none to be read here."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return None if ".." in parts or "\0" in name or len(parts) > _MOST_FOLDERS else parts


class Contents:
    """The members of an archive, in folders.

    Attributes:
        top: the folder that they are all in.
        ignored: members that stand for no file or folder in it.
    """

    def __init__(self, members: Iterable[Member], home: Home) -> None:
        self.top = Node("", home, folder=True)
        self.ignored: list[IgnoredPath] = []
        self._home = home
        self._links: dict[int, tuple[Node, list[str], str]] = {}  # id of a node -> it, its path, its target
        self._astray: list[str] = []
        for member in members:
            self._add(member)
        for node, path, _ in self._links.values():
            found = self._follow(path)
            if found is None or not found.is_file():
                self._astray.append("/".join(path))
            else:
                node.place, node.size = found.place, found.size

    def warnings(self, archive: object) -> tuple[str, ...]:
        """What the user may not expect, one line each."""
        if not self._astray:
            return ()
        named = some([repr(path) for path in self._astray])
        return (
            f"{archive}: links that lead to no file of the archive are left out: {named}; "
            f"make it with 'tar -h', or 'zip' without -y, to have what they lead to in it",
        )

    def place(self, path: str) -> int:
        """Where the content of the file at `path` is."""
        found = _step(self.top, path.split("/"))
        assert found is not None
        return found.place

    def strip(self, class_depth: int) -> tuple[Node, str]:
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
        name = os.fsdecode(member.name)
        parts = parts_of(name)
        if parts is None:
            self.ignored.append(IgnoredPath(name, NO_NAME))
            return
        folder = self._folder(parts if member.kind == FOLDER else parts[:-1])
        if folder is None:
            self.ignored.append(IgnoredPath(name, _BOTH))
        elif parts and member.kind != FOLDER:
            self._put(folder, parts, member)

    def _put(self, folder: Node, parts: list[str], member: Member) -> None:
        assert folder.children is not None
        old = folder.children.get(parts[-1])
        if old is not None:
            self.ignored.append(IgnoredPath("/".join(parts), _AGAIN if old.children is None else _BOTH))
            if old.children is not None:
                return
            self._links.pop(id(old), None)
        node = Node(parts[-1], self._home)
        if member.kind == FILE:
            node.place, node.size = member.place, member.size
        elif member.kind == LINK:
            self._links[id(node)] = (node, parts, os.fsdecode(member.target[: _MOST_LINKED + 1]))
        elif member.kind == HARD_LINK:
            self._link(node, parts, [part for part in os.fsdecode(member.target).split("/") if part])
        folder.children[parts[-1]] = node

    def _link(self, node: Node, parts: list[str], target: list[str]) -> None:
        """To a member before it."""
        found = _step(self.top, [part for part in target if part != "."])
        if found is not None and found.is_file():
            node.place, node.size = found.place, found.size
        else:
            self._astray.append("/".join(parts))

    def _folder(self, parts: list[str]) -> Node | None:
        """The folder, made where it is missing; None where a file has its name."""
        node = self.top
        for part in parts:
            assert node.children is not None
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = Node(part, self._home, folder=True)
            elif child.children is None:
                return None
            node = child
        return node

    def _follow(self, path: list[str]) -> Node | None:
        """What the symbolic link at `path` leads to."""
        above, ahead, hops = [self.top], [*reversed(path)], 0
        while ahead:
            part = ahead.pop()
            if part == "..":
                above.pop()
            elif part not in ("", "."):
                child = (above[-1].children or {}).get(part)
                if child is None:
                    return None
                target = self._links.get(id(child), _NO_LINK)[-1]
                hops += bool(target)
                if target.startswith("/") or len(target) > _MOST_LINKED or hops > _MOST_HOPS:
                    return None
                if target:
                    ahead += reversed(target.split("/"))
                else:
                    above.append(child)
            if not above:
                return None
        return above[-1]


def _step(node: Node | None, parts: Iterable[str]) -> Node | None:
    for part in parts:
        node = (node.children or {}).get(part) if node is not None else None
    return node


def _outer_folder(top: Node, class_depth: int) -> Node | None:
    """The one folder in `top`, where it is not a class, nor the split that `precache.sources.tree` knows."""
    shown = list(_shown_folders(top))
    if len(shown) != 1 or shown[0].name == "train" or not _is_as_deep(shown[0], class_depth):
        return None
    flat = any(kinds.extension(node.name) in kinds.IMAGE_EXTENSIONS for node in top.entries())
    return None if flat and class_depth == 0 else shown[0]


def _shown_folders(node: Node) -> Iterator[Node]:
    """Those that neither a file system hides nor macOS has put there."""
    for child in node.entries():
        if child.is_dir() and not child.name.startswith(".") and child.name != "__MACOSX":
            yield child


def _is_as_deep(node: Node, depth: int) -> bool:
    return depth == 0 or any(_is_as_deep(child, depth - 1) for child in _shown_folders(node))
