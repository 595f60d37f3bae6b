"""Memory that processes share, and a Ctrl-C while it is opened."""

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from loaders.read import host_memory


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """KeyboardInterrupt before the bytecode instruction of this number of `host_memory`."""
    left = step

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != host_memory.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("joins", [False, True])
def test_ctrl_c_at_any_step_leaves_no_file_open(joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = uuid.uuid4().hex
    kept = host_memory.share_memory(name, lambda promised: 8192) if joins else None
    found = list(host_memory._find())  # once: it looks at every process, and opens nothing
    monkeypatch.setattr(host_memory, "_find", lambda: found)
    before = os.listdir("/proc/self/fd")
    memory, steps, leaks = None, 0, []
    while memory is None:
        with suppress(KeyboardInterrupt), interrupted_at(steps):
            memory = host_memory.share_memory(name, lambda promised: 8192)
        steps += 1
        if memory is None and os.listdir("/proc/self/fd") != before:
            leaks.append(steps)
            before = os.listdir("/proc/self/fd")
    assert steps > 100
    assert not leaks
    if kept is not None:
        kept[0] = 7
        assert memory[0] == 7, "it is the same"
