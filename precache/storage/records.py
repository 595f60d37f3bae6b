"""Files of JSON lines that are appended to, and files of records, which have a checksum in each line.

    {"journal": 1, "source_digest": "...", "checksum": "89b0d6f5e3a1c247"}

The checksum of a record is XXH3-64 over the checksum of the line before and over the line without its own
checksum. So a line that was changed, cut off, moved or copied from another file is detected; it and all lines
after it are ignored.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import xxhash

_END = re.compile(rb', "checksum": "([0-9a-f]{16})"\}\n\Z')
PROBED_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 28  # limits the memory that a file of another kind takes


@dataclass(frozen=True, slots=True)
class JsonLine:
    """Complete line of a file: its JSON object, its bytes, and the position of its end in the file."""

    content: dict[str, Any]
    raw: bytes
    end: int


def read_json_lines(file: BinaryIO) -> Iterator[JsonLine]:
    """Yield the lines from the current position of `file`, up to the first that is no complete JSON object.

    The last line is incomplete if its writer was killed, or is still writing. To read on later, or to append,
    start at the end of the last line that was yielded.
    """
    while line := file.readline(_MAX_LINE_BYTES):
        try:
            content = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            return
        if not isinstance(content, dict):
            return
        yield JsonLine(content, line, file.tell())


class RecordFile:
    """Open file of records, which has to be read to its end before records are appended.

    Attributes:
        count: number of records.
        damaged: whether other bytes follow the records.
    """

    def __init__(self, descriptor: int) -> None:
        self.count = 0
        self.damaged = False
        self._descriptor = descriptor
        self._previous = b""
        self._end = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records, up to the first damaged line."""
        with open(self._descriptor, "rb", closefd=False) as file:
            for line in read_json_lines(file):
                end = _END.search(line.raw)
                if end is None or _checksum(self._previous, line.raw[: end.start()] + b"}") != end[1]:
                    break
                del line.content["checksum"]
                self.count += 1
                self._previous, self._end = end[1], line.end
                yield line.content
            self.damaged = self._end < os.fstat(self._descriptor).st_size

    def append(self, content: dict[str, Any], *, durable: bool = True) -> None:
        """Append a record in place of damaged lines at the end, and sync the file if `durable`."""
        body = json.dumps(content).encode()
        checksum = _checksum(self._previous, body)
        line = body[:-1] + b', "checksum": "%s"}\n' % checksum
        if self.damaged:
            os.ftruncate(self._descriptor, self._end)
        try:
            _write(self._descriptor, line)
            if durable:
                os.fsync(self._descriptor)
        except BaseException:
            with suppress(OSError):  # lines after half a line could not be read
                os.ftruncate(self._descriptor, self._end)
            raise
        self.count += 1
        self.damaged = False
        self._previous = checksum
        self._end += len(line)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def may_be_records(start: bytes, key: str) -> bool:
    """Whether a file with these first bytes may be a file of records, whose first key is `key`.

    An empty file and one of zeros may be: a crash of the machine leaves such files.
    """
    expected = f'{{"{key}": '.encode()
    if start[: len(expected)] == expected[: len(start)] or not start.strip(b"\0"):
        return True
    first_line = start.split(b"\n", maxsplit=1)[0] + b"\n"
    return _END.search(first_line) is not None


def _checksum(previous: bytes, body: bytes) -> bytes:
    hasher = xxhash.xxh3_64(previous)
    hasher.update(body)
    return hasher.hexdigest().encode()


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
