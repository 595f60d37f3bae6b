"""Calls in several threads: results in order, the error of the first item, and an end when it is told."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.storage.retries import Check, call_for_each


@settings(max_examples=50, deadline=None)
@given(failing=st.sets(st.integers(0, 30)), count=st.integers(0, 30), threads=st.integers(1, 8))
def test_call_for_each_returns_all_results_or_raises_the_first_error(
    failing: set[int], count: int, threads: int
) -> None:
    called: list[int] = []

    def square(number: int, check: Check) -> int:
        check()
        called.append(number)
        if number in failing:
            raise LookupError(number)
        return number * number

    expected = min((number for number in failing if number < count), default=None)
    if expected is None:
        assert call_for_each(square, range(count), threads) == [number * number for number in range(count)]
        return
    with pytest.raises(LookupError) as raised:
        call_for_each(square, range(count), threads)
    assert raised.value.args == (expected,)
    assert len(called) == len(set(called))


def test_call_for_each_ends_all_calls_as_its_check_raises() -> None:
    is_closed = threading.Event()

    def check_open() -> None:
        if is_closed.is_set():
            raise ConnectionError

    def wait(number: int, check: Check) -> None:
        if number == 3:
            is_closed.set()
        while True:
            check()

    with pytest.raises(ConnectionError):
        call_for_each(wait, range(8), 4, check_open)
