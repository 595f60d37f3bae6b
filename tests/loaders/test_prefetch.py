"""A thread that reads ahead: how far, and that nothing keeps it from ending."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from operator import length_hint

import pytest

from loaders.threads import Pool, Prefetch


def wait_until(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.005)
    assert condition()  # type: ignore[operator]


def test_prefetch_keeps_the_order_and_its_depth() -> None:
    assert list(Prefetch(iter(range(100)), 3)) == list(range(100))
    coming = iter(range(100))
    ahead = Prefetch(coming, 3)
    assert next(ahead) == 0
    wait_until(lambda: length_hint(coming) == 95)  # one taken, three queued, one in hand
    time.sleep(0.05)
    assert length_hint(coming) == 95
    ahead.close()


def test_ctrl_c_ends_the_wait_for_a_reading_thread() -> None:
    reads_on = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        reads_on.wait(30)
        yield 1

    threads = threading.active_count()
    ahead = Prefetch(source(), 2)
    assert next(ahead) == 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        start_s = time.monotonic()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ahead.close()
        assert time.monotonic() < start_s + 5
    finally:
        signal.signal(signal.SIGINT, before)
        reads_on.set()
    wait_until(lambda: threading.active_count() == threads)


@pytest.mark.parametrize("where", ["own", "helper"])
def test_a_prefetch_collected_in_its_own_thread_ends(where: str) -> None:
    """A cycle is collected by whichever thread happens to; none may wait for itself."""
    dropped, collected = threading.Event(), threading.Event()

    def collect() -> None:
        dropped.wait()
        gc.collect()
        collected.set()

    def source() -> Iterator[int]:
        with closing(Pool(1, "helper")) as pool:
            yield 0
            pool.submit(collect).result() if where == "helper" else collect()
            yield 1

    before = threading.active_count()
    gc.disable()
    try:
        ahead = Prefetch(source(), 2)
        assert next(ahead) == 0
        cycle: list[object] = [ahead]
        cycle.append(cycle)
        del ahead, cycle
        dropped.set()
        assert collected.wait(10)
        wait_until(lambda: threading.active_count() == before)
    finally:
        gc.enable()
