"""A thread that reads ahead keeps its depth, and ends in every case."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from operator import length_hint

import pytest

from loaders.threads import Ending, Pool, Prefetch, stop_check
from precache.errors import WorkerError
from tests.limits import no_more_threads


def wait_until(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.005)
    assert condition()  # type: ignore[operator]


def read_ahead(source: Iterator[int], depth: int) -> Prefetch[int]:
    prefetch = Prefetch[int](depth)
    prefetch.restart(source)
    return prefetch


def test_prefetch_keeps_the_order_and_its_depth() -> None:
    assert list(read_ahead(iter(range(100)), 3)) == list(range(100))
    source = iter(range(100))
    prefetch = read_ahead(source, 3)
    assert next(prefetch) == 0
    wait_until(lambda: length_hint(source) == 96)  # one was taken, three wait
    time.sleep(0.05)
    assert length_hint(source) == 96
    prefetch.close()


def test_one_thread_reads_one_source_after_the_other() -> None:
    """What was read of a source is not served once another is set; it is closed before that one begins."""
    events: list[str] = []

    def source(name: str, first: int) -> Iterator[int]:
        check = stop_check()
        try:
            yield first
            with suppress(Ending):
                while True:
                    check()
                    time.sleep(0.001)
            events.append(f"{name} is told")
            yield -1
        finally:
            events.append(f"{name} is closed")

    threads = threading.active_count()
    prefetch = Prefetch[int](2)
    for number in range(20):
        prefetch.restart(source(f"source {number}", number))
        events.append(f"source {number} begins")
        assert next(prefetch) == number
        assert threading.active_count() == threads + 1
    prefetch.close()
    assert threading.active_count() == threads
    # the last two of a source may come when the next one has begun in this thread, never in the reading one
    for number in range(20):
        first, last = (events.index(f"source {number} is {event}") for event in ("told", "closed"))
        assert first < last
    assert [event for event in events if "closed" in event] == [f"source {n} is closed" for n in range(20)]
    with pytest.raises(StopIteration):
        next(prefetch)


def test_ctrl_c_ends_the_wait_for_a_reading_thread() -> None:
    may_go_on = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        may_go_on.wait(30)
        yield 1

    threads = threading.active_count()
    prefetch = read_ahead(source(), 2)
    assert next(prefetch) == 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        start_s = time.monotonic()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            prefetch.close()
        assert time.monotonic() < start_s + 5
    finally:
        signal.signal(signal.SIGINT, before)
        may_go_on.set()
    wait_until(lambda: threading.active_count() == threads)


def test_a_pool_that_starts_no_thread_raises_and_starts_them_later() -> None:
    with closing(Pool(2, "helper")) as pool:
        for _ in range(2):
            with no_more_threads(), pytest.raises(WorkerError, check=lambda error: "ulimit" in error.remedy):
                pool.submit(abs, -1)
        assert pool.map(abs, [-1, -2]) == [1, 2]


@pytest.mark.parametrize("where", ["own", "helper"])
def test_a_prefetch_collected_in_its_own_thread_ends(where: str) -> None:
    """The garbage collector may run in any thread, which must not wait for itself."""
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
        prefetch = read_ahead(source(), 2)
        assert next(prefetch) == 0
        cycle: list[object] = [prefetch]
        cycle.append(cycle)
        del prefetch, cycle
        dropped.set()
        assert collected.wait(10)
        wait_until(lambda: threading.active_count() == before)
    finally:
        gc.enable()
