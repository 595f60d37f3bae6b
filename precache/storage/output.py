"""Large files that are written from start to end: in the background, past the page cache, with checksums.

A conversion writes more than the page cache holds, and reads none of it again. With direct I/O it does not
displace the pages of the source, which it does read. A thread writes one buffer while the next one fills.
Where there is no direct I/O (tmpfs, some network file systems, macOS), the same calls go through the cache.
"""

import errno
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import google_crc32c
import numpy as np

from precache.errors import thread_errors
from precache.storage import fsync_folder, open_new, temporary_path

_BUFFER_BYTES = 4 << 20
_BLOCK_BYTES = 4096  # direct I/O wants addresses, offsets and lengths in multiples of it
_DIRECT = getattr(os, "O_DIRECT", 0)


class OutputFile:
    """File that is written under a temporary name beside `path`, until `publish` renames it.

    As a context manager it is closed at the end of the block, or abandoned if the block raises.

    Attributes:
        path: final path.
        temporary: path until then.
        bytes: number of bytes that are written so far.
        crc32c: CRC-32C of all bytes, 8 hex digits; empty until the file is closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = temporary_path(path)
        self.bytes = 0
        self.crc32c = ""
        self._crc = 0
        self._descriptor = _open(self.temporary)
        self._buffers = [mmap.mmap(-1, _BUFFER_BYTES), mmap.mmap(-1, _BUFFER_BYTES)]
        self._filled = 0
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._new_start = b""
        self._old_start = b""

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        rest = memoryview(data).cast("B")
        self.bytes += len(rest)
        while rest:
            part = rest[: _BUFFER_BYTES - self._filled]
            self._buffers[0][self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == _BUFFER_BYTES:
                self._submit_buffer()

    def replace_start(self, old: bytes, new: bytes) -> None:
        """Replace the first bytes, which are `old`, by `new` of the same length when the file is closed."""
        self._old_start, self._new_start = old, new

    def close(self) -> None:
        """Write the last buffer; then the file is complete, but not durable."""
        self._submit_buffer()
        self._wait()
        self._stop()
        with open(self.temporary, "rb+") as file:
            file.truncate(self.bytes)
            file.write(self._new_start)
        if self._new_start:
            # a CRC is linear: the bytes behind the start change both CRCs alike, so zeros may stand for them
            rest_bytes = self.bytes - len(self._new_start)
            self._crc ^= _crc_before_zeros(self._old_start, rest_bytes)
            self._crc ^= _crc_before_zeros(self._new_start, rest_bytes)
        self.crc32c = f"{self._crc:08x}"

    def abandon(self) -> None:
        """Stop writing and remove the file; idempotent."""
        self._stop()
        self.temporary.unlink(missing_ok=True)

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abandon()
            return
        try:
            self.close()
        except BaseException:
            self.abandon()
            raise

    def _stop(self) -> None:
        self._writer.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    @thread_errors()
    def _submit_buffer(self) -> None:
        """Submit the filled buffer to the thread that writes, and go on with the other buffer."""
        self._wait()
        self._writing = self._writer.submit(self._put, self._buffers[0], self._filled)
        self._buffers.reverse()
        self._filled = 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _put(self, buffer: mmap.mmap, count: int) -> None:
        """Write `count` bytes of a buffer, rounded up to a block: the file is truncated when it is closed."""
        self._crc = google_crc32c.extend(self._crc, np.frombuffer(buffer, np.uint8, count))
        rest = memoryview(buffer)[: -(-count // _BLOCK_BYTES) * _BLOCK_BYTES]
        while rest:
            rest = rest[self._write(rest) :]

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno != errno.EINVAL or not _DIRECT:
                raise
            import fcntl  # a system with direct I/O has this module

            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
            return os.write(self._descriptor, data)


def _crc_before_zeros(start: bytes, zeros: int) -> int:
    """Compute CRC-32C of `start` followed by so many zero bytes."""
    crc: int = google_crc32c.value(start)
    block = bytes(min(zeros, _BUFFER_BYTES))
    for done in range(0, zeros, _BUFFER_BYTES):
        crc = google_crc32c.extend(crc, block[: zeros - done])
    return crc


def publish(files: Sequence[OutputFile]) -> None:
    """Make files durable and give them their final names, one file after the other."""
    try:
        for file in files:
            with open(file.temporary, "rb+") as written:
                os.fsync(written.fileno())
            os.replace(file.temporary, file.path)
    except BaseException:
        for file in files:
            file.temporary.unlink(missing_ok=True)
        raise
    for folder in {file.path.parent for file in files}:
        fsync_folder(folder)


def _open(path: Path) -> int:
    try:
        return open_new(path, _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # Linux creates the file before it refuses the flag
        return open_new(path)
