"""Limits of the system that this process meets during a block."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STACK_BYTES = 1 << 47  # all addresses of a process


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Let this process, and forks of it, start no further thread within the block: none has room."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
