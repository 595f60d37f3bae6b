"""Reading an archive's headers one after the other: some of what follows is read with them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from precache.errors import SourceError
from precache.pictures.reading import read_part

Reader: TypeAlias = Callable[[int, int], bytes]
"""`(start, count) -> bytes` of a file; fewer where it ends before."""

_AHEAD_BYTES = 16 << 10


@dataclass(slots=True)
class Window:
    """A file that is scanned.

    Attributes:
        path: of the file.
        shown: how messages call it.
        as_scanned: its size in bytes, and when it was last written, in ns.
    """

    path: str
    shown: str
    as_scanned: tuple[int, int]
    _start: int = field(default=0, init=False)
    _bytes: bytes = field(default=b"", init=False)

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return self.as_scanned[0]

    def read(self, start: int, count: int) -> bytes:
        """A `Reader` of it; SourceError if it cannot be read, or is not as it was."""
        inside = start - self._start
        if not (inside >= 0 and inside + count <= len(self._bytes)):
            wanted = max(count, min(_AHEAD_BYTES, self.size - start))
            self._bytes, self._start, inside = read_part(self.path, self.as_scanned, start, wanted), start, 0
        return self._bytes[inside : inside + count]

    def damaged(self, what: str, remedy: str = "download or copy it again") -> SourceError:
        """An error to raise: the archive is not one; `what` begins with a verb."""
        return SourceError(f"{self.shown}: {what}; {remedy}")
