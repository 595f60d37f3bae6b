"""Files of JSON lines that are appended to; those of records have a checksum in each line.

    {"journal": 1, "source_digest": "...", "checksum": "89b0d6f5e3a1c247"}

A line's checksum is XXH3-64 over the checksum of the line before and over the line without its own: a line
that is changed, cut off, moved or copied from elsewhere does not count, nor does any after it.
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
_MAX_LINE_BYTES = 1 << 28  # of a file that is something else, no more than this is read


@dataclass(frozen=True, slots=True)
class JsonLine:
    """A whole line of a file: its object, its bytes, and where in the file it ends."""

    content: dict[str, Any]
    raw: bytes
    end: int


def read_json_lines(file: BinaryIO) -> Iterator[JsonLine]:
    """Yield the lines from where `file` stands, up to the first that is torn or is no JSON object.

    The last line is torn where its writer was killed, or is still writing: read on from the end of the line
    before, or append there.
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
    """An open file of records, by its descriptor: first read to its end, then appended to.

    Attributes:
        count: records that it holds.
        damaged: whether something else follows them.
    """

    def __init__(self, descriptor: int) -> None:
        self.count = 0
        self.damaged = False
        self._descriptor = descriptor
        self._previous = b""
        self._end = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The records, up to the first damaged line."""
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
        """Append a record, over what is damaged at the end; durable when this returns."""
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
            with suppress(OSError):  # half a line would spoil those after it
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
    """Whether a file that starts like this is one of ours, be it damaged: its first record begins with `key`.

    So is an empty one, and one of zeros: that is what a crash of the machine leaves.
    """
    wanted = f'{{"{key}": '.encode()
    first = start.split(b"\n", maxsplit=1)[0] + b"\n"
    begins_so = start[: len(wanted)] == wanted[: len(start)]
    return begins_so or not start.strip(b"\0") or _END.search(first) is not None


def _checksum(previous: bytes, body: bytes) -> bytes:
    hasher = xxhash.xxh3_64(previous)
    hasher.update(body)
    return hasher.hexdigest().encode()


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
