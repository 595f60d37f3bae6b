"""Ranks that share `cache="ram"`: processes forked of one that has torch imported, which is quick."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import xxhash

from loaders.read import cache, host_memory
from tests.building import build_loader

ANSWER_S = 60


class Rank:
    """A process with a loader that has a cache.

    Args:
        prefix: of the names of their memory, tells those that share from those of other tests.
        room: bytes of memory that are free; 0: as there are.
        kill_at: how many pictures it keeps; in the midst of the last of them it is killed.
    """

    def __init__(self, path: Path, settings: dict[str, Any], prefix: str, room: int, kill_at: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, str(path), settings, prefix, room, kill_at)
        self.process = context.Process(target=_run, args=arguments)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """What it says next; EOFError: it has ended."""
        assert self._connection.poll(ANSWER_S), "says nothing"
        return self._connection.recv()

    def ask(self, epoch: int) -> None:
        """Have it serve an epoch; `hear` gives what."""
        self._connection.send(epoch)

    def serve(self, epoch: int) -> tuple[dict[int, int], int]:
        """What it serves in an epoch, id -> checksum of the pixels, and how many samples were read for it."""
        self.ask(epoch)
        served: tuple[dict[int, int], int] = self.hear()
        return served

    def kill(self) -> None:
        """As `kill -9`, and wait for it."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()
        self._connection.close()


def memory_files(pid: int | str = "self") -> dict[int, str]:
    """The memory that a process keeps pictures in: inode -> where it can be opened."""
    found = {}
    with suppress(OSError):  # it has ended, or is another user's
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with suppress(OSError):  # it has been closed
                if os.readlink(path).startswith("/memfd:precache-"):
                    found[os.stat(path).st_ino] = path
    return found


@contextmanager
def starting(prefix: str) -> Iterator[Callable[..., list[Rank]]]:
    """A function that starts ranks at a time, each with its own settings; they end with the block."""
    ranks: list[Rank] = []

    def start(path: Path, settings: list[dict[str, Any]], room: int = 0, kill_at: int = 0) -> list[Rank]:
        started = [Rank(path, each, prefix, room, kill_at) for each in settings]
        ranks.extend(started)
        assert [rank.hear() for rank in started] == ["ready"] * len(started)
        return started

    try:
        yield start
    finally:
        for rank in ranks:
            rank.close()


@contextmanager
def preloaded() -> Iterator[None]:
    """The process that ranks are forked of lives as long as the block."""
    multiprocessing.set_forkserver_preload([__name__])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    try:
        yield
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def checksums(batches: Any) -> dict[int, int]:
    """Id -> checksum of its pixels."""
    return {
        i: xxhash.xxh3_64_intdigest(image)
        for batch in batches
        for i, image in zip(
            batch.ids.tolist(), batch.images.permute(0, 2, 3, 1).contiguous().numpy(), strict=True
        )
    }


def _run(
    connection: Connection, path: str, settings: dict[str, Any], prefix: str, room_bytes: int, kill_at: int
) -> None:
    torch.set_num_threads(1)
    host_memory._PREFIX = prefix
    if room_bytes:
        host_memory.free_memory = lambda: (room_bytes, 0)  # type: ignore[assignment]
    read = copied = 0
    take_in, copyto = cache.CachedReader._take_in, np.copyto

    def count(self: Any, request: Any, slots: Any, batch: Any) -> Any:
        nonlocal read
        read += len(slots)
        return take_in(self, request, slots, batch)

    def break_off(out: Any, picture: Any) -> None:
        nonlocal copied
        copied += 1
        if copied == kill_at:
            copyto(out[: len(out) // 2], picture[: len(picture) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        copyto(out, picture)

    cache.CachedReader._take_in = count  # type: ignore[method-assign]
    if kill_at:
        cache.np = mock.Mock(wraps=np, copyto=break_off, uint8=np.uint8, bool_=np.bool_)  # type: ignore[assignment]
    with build_loader(path, **{"cache": "ram", "workers": 1, "batch_size": 8, **settings}) as loader:
        connection.send("ready")
        with suppress(EOFError):
            while True:
                loader.set_epoch(connection.recv())
                before = read
                connection.send((checksums(loader), read - before))
