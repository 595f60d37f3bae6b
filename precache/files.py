"""The files of a dataset, as manifest and journal describe them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from precache.storage import crc32c_file


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a dataset: its name in the dataset's folder, bytes, and CRC-32C in hex."""

    name: str
    bytes: int
    crc32c: str


Held: TypeAlias = Callable[[FileEntry], AbstractContextManager[Path]]
"""Has a file lie on this machine until the end of a block, which gets its path; can be pickled."""


def in_folder(folder: Path) -> Held:
    """Of files that lie in `folder`."""
    return partial(_in_folder, folder)


@contextmanager
def _in_folder(folder: Path, file: FileEntry) -> Iterator[Path]:
    yield folder / file.name


def check_file(folder: Path, file: FileEntry, *, content: bool = True) -> str | None:
    """What is wrong with a file, as one line, or None; `content=False` looks at its size alone."""
    path = folder / file.name
    try:
        found_bytes = path.stat().st_size
        crc32c = crc32c_file(path) if content and found_bytes == file.bytes else file.crc32c
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    if found_bytes != file.bytes:
        return f"{path}: expected {file.bytes:,} bytes, got {found_bytes:,}"
    if crc32c != file.crc32c:
        return f"{path}: its checksum is not the manifest's (the bytes changed)"
    return None
