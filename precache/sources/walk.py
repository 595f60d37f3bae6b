"""The class folders of a tree, listed by this process or, where they hold many pictures, by several.

What is found, its order and the first error do not depend on how many processes there are.
"""

import os
import time
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from precache import executors
from precache.dataset.columns import Ints
from precache.errors import SourceError
from precache.sources import folders
from precache.sources.folders import Folder

_FIRST = 5_000  # pictures that are listed before other processes are worth their start: some 20 ms of work
_TASK = 10_000  # pictures of one task, about: less, and the processes would rather talk than list
_MOST_FOLDERS = 4_096  # of one task
_BLOCK = 1 << 14  # entries that are turned into columns at once: as objects they take ten times as much
_TICK_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Scanning:
    """How a large tree is scanned; what is found is the same.

    Attributes:
        workers: processes that list its folders; 0 or 1: the calling one.
        kept: file for what an unfinished scan has found, see `precache.sources.kept`; None: it is not kept.
    """

    workers: int = 0
    kept: Path | None = None


ALONE = Scanning()


@dataclass(frozen=True, slots=True)
class ClassFolder:
    """A folder of pictures to be listed.

    Attributes:
        folder: where it is.
        path: the same, relative to the root, with a slash; "" for the root.
        split, name: of the pictures: that they are in, and of their class.
    """

    folder: Folder
    path: str
    split: str
    name: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that is no sample, and looks like a picture that is `missed`, or not."""

    path: str
    reason: str
    missed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """What a class folder holds, sorted by name.

    Attributes:
        state: the folder's device and number, and when it was last written and changed, before it was listed.
        lasting: whether all this stays so, but for sizes and times, for as long as `state` does.
        paths: of its pictures, relative to the root, one behind the other.
        lengths: int64 [n], of these, in bytes.
        file_bytes, modified_ns: int64 [n].
        hashed: what the digest of the tree is over: each path and its size, with a zero byte behind it.
        left_out: what is none.
    """

    state: tuple[int, int, int, int]
    lasting: bool
    paths: bytes
    lengths: Ints
    file_bytes: Ints
    modified_ns: Ints
    hashed: bytes
    left_out: tuple[LeftOut, ...]

    def __len__(self) -> int:
        return len(self.lengths)


def list_folder(asked: ClassFolder) -> Listed:
    """List a folder; SourceError, whose `__cause__` is an OSError, if something of it cannot be read."""
    state, now_ns = state_of(asked.folder), time.time_ns()
    # a clock that ticks once in two seconds may not tell what is written now from what was just written
    lasting = state[2] < now_ns - _TICK_NS
    hashed, modified_ns, left_out = [], array("q"), []
    entries = folders.sorted_entries(asked.folder)
    entries.reverse()
    while entries:
        texts: list[str] = []
        for _ in range(min(len(entries), _BLOCK)):
            entry = entries.pop()  # and forget it: there may be 10,000,000
            path = asked.path + entry.name
            reason = folders.why_not_a_picture(entry)
            lasting = lasting and folders.says_its_folder(entry, reason)
            if reason is None:
                status = folders.status(entry)
                texts += (path, str(status.st_size))
                modified_ns.append(status.st_mtime_ns)
            else:
                left_out.append(LeftOut(path, reason, folders.looks_like_picture(entry)))
        hashed.append(os.fsencode("\0".join([*texts, ""])))
    return packed(state, hashed, np.array(modified_ns, np.int64), tuple(left_out), lasting=lasting)


def state_of(folder: Folder) -> tuple[int, int, int, int]:
    """As `Listed.state`; SourceError if that cannot be found out."""
    status = folders.status(folder)
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def packed(
    state: tuple[int, int, int, int],
    hashed: Sequence[bytes],
    modified_ns: Ints,
    left_out: tuple[LeftOut, ...],
    *,
    lasting: bool,
) -> Listed:
    """A `Listed`, of which `hashed`, in some pieces, holds paths and sizes."""
    joined, lengths, sizes = [], array("q"), array("q")
    for piece in hashed:
        *parts, _ = piece.split(b"\0")
        joined.append(b"".join(parts[::2]))
        lengths.extend(map(len, parts[::2]))
        sizes.extend(map(int, parts[1::2]))
    paths, numbers = b"".join(joined), (np.array(lengths, np.int64), np.array(sizes, np.int64))
    return Listed(state, lasting, paths, *numbers, modified_ns, b"".join(hashed), left_out)


def list_folders(asked: Sequence[ClassFolder], workers: int) -> Generator[Listed, None, None]:
    """`list_folder` of each, in their order; by `workers` processes where there is much to do.

    Raises:
        SourceError: as `list_folder`, of the first folder of which something cannot be read.
        WorkerError: a process died, again and again.
    """
    alone = pictures = 0
    while alone < len(asked) and (workers < 2 or pictures < _FIRST):
        listed = list_folder(asked[alone])
        alone += 1
        pictures += len(listed)
        yield listed
    if alone < len(asked):
        yield from _by_processes(asked[alone:], workers, pictures / alone)


@dataclass(slots=True)
class _Task:
    """Some folders, the first of which has the number `first`."""

    first: int
    folders: list[ClassFolder]

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"{os.fspath(self.folders[0].folder)} and what follows it"  # type: ignore[arg-type]


@dataclass(slots=True)
class _Done:
    """What became of a task: an error ends it, and has lost its cause on the way here."""

    first: int
    listed: list[Listed]
    error: SourceError | None = None
    cause: BaseException | None = None


def _by_processes(asked: Sequence[ClassFolder], workers: int, mean: float) -> Iterator[Listed]:
    """As `list_folders`, of folders that hold about `mean` pictures each."""
    seen = pictures = 0

    def tasks() -> Iterator[_Task]:
        first = 0
        while first < len(asked):
            each = pictures / seen if seen else mean
            count = int(max(1, min(_TASK / max(each, 1), _MOST_FOLDERS)))
            yield _Task(first, list(asked[first : first + count]))
            first += count

    waiting: dict[int, _Done] = {}
    following = 0
    with closing(executors.run(_list_task, tasks(), min(workers, len(asked)), lambda done: None)) as found:
        for done in found:
            waiting[done.first] = done
            seen += len(done.listed)
            pictures += sum(map(len, done.listed))
            while (done := waiting.pop(following, None)) is not None:
                yield from done.listed
                if done.error is not None:
                    raise done.error from done.cause
                following += len(done.listed)


def _list_task(task: _Task, tick: executors.Ticks) -> _Done:
    listed: list[Listed] = []
    for asked in task.folders:
        try:
            listed.append(list_folder(asked))
        except SourceError as error:
            return _Done(task.first, listed, error, error.__cause__)
    return _Done(task.first, listed)
