import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing

import pytest

from loaders.deliver import threads
from loaders.deliver.threads import EndingThread, Pool, Prefetch


def count_up(started: list[int]) -> Iterator[int]:
    for value in range(100):
        started.append(value)
        yield value


def wait_until(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.005)
    assert condition()  # type: ignore[operator]


def test_order_is_kept_and_it_runs_ahead_by_depth_and_no_further() -> None:
    assert list(Prefetch(count_up([]), 3)) == list(range(100))
    started: list[int] = []
    ahead = Prefetch(count_up(started), 3)
    assert next(ahead) == 0
    wait_until(lambda: len(started) == 5)  # one taken, three queued, one in hand
    time.sleep(0.05)
    assert len(started) == 5
    ahead.close()


def test_what_was_closed_before_it_began_holds_nothing() -> None:
    """Ctrl-C may come before the first element is asked for: what the source has open goes with it."""
    event = threading.Event()
    gone = weakref.ref(event)
    ahead = Prefetch(iter([event]), 2)
    ahead.close()
    del event, ahead
    assert gone() is None


def test_an_exception_comes_where_it_occurred() -> None:
    def fail() -> Iterator[int]:
        yield 1
        raise OSError("disk on fire")

    ahead = Prefetch(fail(), 2)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="disk on fire"):
        next(ahead)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_closing_or_dropping_ends_the_thread_and_closes_the_source(how: str) -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.set()

    before = threading.active_count()
    ahead = Prefetch(source(), 2)
    assert next(ahead) == 0
    if how == "close":
        ahead.close()
        assert closed.is_set()
        assert threading.active_count() == before
    del ahead
    wait_until(lambda: threading.active_count() == before)
    assert closed.is_set()


def test_ctrl_c_while_it_is_closed_is_raised_when_the_thread_has_ended() -> None:
    ended = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        time.sleep(0.3)
        ended.set()
        yield 1

    def close() -> None:
        ahead = Prefetch(source(), 2)
        assert next(ahead) == 0
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        ahead.close()
        assert ended.is_set()
        time.sleep(10)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        start_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            close()
        assert time.monotonic() < start_s + 5, "it ends a sleep, too"
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_a_handler_raises_while_threads_start_and_end_leaves_them_whole() -> None:
    """As Ctrl-C does, and what torch raises for a dead worker: at any time, again and again."""
    guarded: list[bool] = []

    def interrupt(number: int, frame: object) -> None:
        if guarded:
            raise InterruptedError

    before = signal.signal(signal.SIGUSR1, interrupt)
    running, caught = threading.active_count(), 0
    try:
        for turn in range(300):
            ahead = Prefetch(count_up([]), 2)
            timer = threading.Timer(1e-6 * turn, os.kill, (os.getpid(), signal.SIGUSR1))
            try:
                timer.start()
                guarded.append(True)
                next(ahead)
                guarded.clear()
            except InterruptedError:
                caught += 1
            finally:
                guarded.clear()
            timer.join()
            ahead.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert threading.active_count() == running
    assert caught > 10


@pytest.mark.parametrize("where", ["own", "helper"])
def test_an_iterator_that_its_own_threads_collect_ends_them(where: str) -> None:
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


def test_at_the_end_each_thread_of_a_pool_ends_whichever_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was just started is not asked to, as it was not there yet when the end began."""
    for name in ("late_0", "late_1") * 3:
        with closing(Pool(2, "late")) as pool:
            pool.map(abs, [1, 2])
            asked = next(t for t in threading.enumerate() if isinstance(t, EndingThread) and t.name == name)
            with monkeypatch.context() as patch:
                patch.setattr(threads, "_exiting", True)
                asked.ask_to_stop()
                asked.wait(5)
            assert asked.has_ended()
