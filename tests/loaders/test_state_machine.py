"""Loaders serve the batches of the order, and leave nothing behind, whatever a training does with them.

The state machine has a rule for each thing that training code does: take batches, leave the loop, raise in
it, validate in the middle of it, make an iterator and not use it, set an epoch, change the size, go back to a
state, go on from it with other workers in another world. The batches of all ranks at a step are compared with
the batch of a single rank. Then each row of the table in the docstring of `Loader` is held. The last test
measures the memory that a hundred loaders leave.
"""

import gc
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import loaders
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import IMAGES, OTHER_IMAGES, STORED_SIZE
from tests.loader_contract import new_threads_and_processes, threads_and_processes
from tests.loaders.cases import MAIN_CASES

GLOBAL_BATCH = 12
WORLDS = (1, 2, 3)
SIZES = (STORED_SIZE, STORED_SIZE // 2)
TRAININGS = {"shards": 50}
"""Number of trainings by backend, else 4; the code of epochs is the same for all backends."""
Steps = list[list[int]]
"""Ids of each global batch of an epoch, sorted."""


@dataclass(frozen=True)
class Start:
    """Start that was set for the next iteration, by `set_epoch` or by a loaded state."""

    epoch: int
    step: int = 0
    is_from_state: bool = False


class Training(RuleBasedStateMachine):
    """Ranks of one training, all in this process."""

    def __init__(self, build: Callable[..., loaders.Loader], expected: Callable[[int], Steps]) -> None:
        super().__init__()
        self._build, self._expected, self._steps = build, expected, len(expected(0))
        self._before, self._files = threads_and_processes(), open_files()
        self._ranks: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        """Set the model to loaders that were just built."""
        self._iterators: list[Any] = []
        self._at: list[int] | None = None  # epoch and step of `_iterators`; None: they have not begun
        self._latest = False  # whether no other iteration has begun since
        self._served = (0, 0)  # epoch and step of a state, unless another start is set
        self._next_epoch = 0  # epoch of the next iteration, unless another start is set
        self._start: Start | None = None
        self._resized = False

    @initialize(world=st.sampled_from(WORLDS), workers=st.integers(0, 2), size=st.sampled_from(SIZES))
    def start(self, world: int, workers: int, size: int) -> None:
        settings = {"batch_size": GLOBAL_BATCH // world, "workers": workers, "size": size}
        self._ranks = [self._build(rank=rank, world_size=world, **settings) for rank in range(world)]
        self._size = size

    @precondition(lambda self: not self._iterators)
    @rule()
    def make(self) -> None:
        """Make iterators without taking a batch, as Lightning does; that begins no iteration."""
        self._iterators, self._at = [iter(rank) for rank in self._ranks], None

    @rule(count=st.integers(1, 8))
    def take(self, count: int) -> None:
        """Take some batches of the running iteration, or of a new one."""
        if not self._iterators:
            self.make()
        self._serve(count)

    @precondition(lambda self: self._iterators)
    @rule()
    def leave(self) -> None:
        """Drop the iterators, as `break` does."""
        self._iterators, self._at = [], None

    @precondition(lambda self: self._at is not None)
    @rule(count=st.integers(1, 8))
    def validate(self, count: int) -> None:
        """Run another iteration in the middle of the running one."""
        outer = self._iterators, self._at
        self.make()
        self._serve(count)
        self._iterators, self._at = outer
        self._latest = False

    @rule()
    def fail(self) -> None:
        """Raise an exception in the loop on every rank; it reaches the caller unchanged."""
        self.leave()
        epoch, step = self._begin()
        for rank in self._ranks:
            with pytest.raises(KeyError, match="of the training") if step < self._steps else nullcontext():
                _fail_in_the_loop(rank)
        self._served = (epoch, step + 1) if step < self._steps else (epoch + 1, 0)

    @rule(named=st.sampled_from(["running", "next", 0, 1, 2, 3]))
    def set_epoch(self, named: Any) -> None:
        """Set the epoch of the next iteration; a loaded state in the same epoch stays."""
        epoch = {"running": self._served[0], "next": self._next()[0]}.get(named, named)
        for rank in self._ranks:
            rank.set_epoch(epoch)
        if self._start is None or not self._start.is_from_state or self._start.epoch != epoch:
            self._start = Start(epoch)

    @rule(size=st.sampled_from([*SIZES, 0, (0, 5)]))
    def set_size(self, size: Any) -> None:
        """Change the size; that is refused in an iteration and for a wrong size, and changes nothing then."""
        is_refused = self._at is not None or size not in SIZES
        for rank in self._ranks:
            if is_refused:
                with pytest.raises(SettingError, match="size"):
                    rank.set_size(size)
            else:
                rank.set_size(size)
        if not is_refused:
            self._size, self._resized = size, True

    @precondition(lambda self: self._at is None or not self._resized)
    @rule(count=st.integers(0, 2))
    def go_back(self, count: int) -> None:
        """Load a state that was taken some batches ago; the running iteration goes on."""
        state = self._state()
        if self._iterators and self._at is not None:
            self._serve(count)
        for rank in self._ranks:
            rank.load_state_dict(state)
        self._start = Start(state["epoch"], state["served_batches"], is_from_state=True)

    @rule(world=st.sampled_from(WORLDS), workers=st.integers(0, 2), closes=st.booleans(), names=st.booleans())
    def restart(self, world: int, workers: int, closes: bool, names: bool) -> None:
        """Go on from a state in a world of another size, perhaps after setting the state's own epoch."""
        state, size, iterators = self._state(), self._size, self._iterators
        self._end(closes)
        for iterator in iterators if closes else []:
            with pytest.raises(SettingError):
                next(iterator)
        self._reset()
        self.start(world, workers, SIZES[0] if "size" in state else size)
        for rank in self._ranks:
            rank.load_state_dict(state)
        self._start = Start(state["epoch"], state["served_batches"], is_from_state=True)
        self._size, self._resized = size, "size" in state
        assert {rank.size for rank in self._ranks} == {size}
        if names:
            self.set_epoch("next")

    @invariant()
    def says_where_it_is(self) -> None:
        if self._ranks:
            self._state()

    def teardown(self) -> None:
        # not the loaders themselves: each has its index mapped until it is collected
        ranks = repr(self._ranks)
        self._end(closes=True)
        gc.collect()
        is_tidy = becomes_true(
            lambda: not new_threads_and_processes(self._before) and open_files() <= self._files
        )
        assert is_tidy, (ranks, new_threads_and_processes(self._before), open_files() - self._files)

    def _next(self) -> tuple[int, int]:
        """Return epoch and step at which the next iteration starts."""
        return (self._next_epoch, 0) if self._start is None else (self._start.epoch, self._start.step)

    def _begin(self) -> tuple[int, int]:
        """Begin an iteration, and return its epoch and step."""
        epoch, step = self._next()
        self._start = None
        self._served, self._next_epoch = (epoch, step), epoch + 1
        return epoch, step

    def _serve(self, count: int) -> None:
        """Take batches of `_iterators`, which begin if they have not."""
        for _ in range(count):
            batches = [next(iterator, None) for iterator in self._iterators]
            if self._at is None:
                self._at, self._latest = list(self._begin()), True
            epoch, step = self._at
            if step == self._steps:
                assert batches == [None] * len(batches)
                self._served = (self._next_epoch, 0)
                self._iterators, self._at = [], None
                return
            self._check(batches, self._expected(epoch)[step])
            self._at = [epoch, step + 1]
            self._served = (epoch, step + 1)

    def _check(self, batches: list[Any], expected: list[int]) -> None:
        assert all(batch is not None for batch in batches)
        assert sorted(i for batch in batches for i in batch.ids[~batch.padding].tolist()) == expected
        sizes = [len(batch.ids) for batch in batches]
        assert max(sizes) - min(sizes) <= 1
        assert {batch.images.shape[2:] for batch in batches} == {(self._size, self._size)}

    def _state(self) -> dict[str, Any]:
        """Check that all ranks have the state of the model, as JSON, and return it."""
        states = {json.dumps(rank.state_dict()) for rank in self._ranks}
        (state,) = map(json.loads, states)
        epoch, step = self._served
        is_running = self._at is not None and self._latest and epoch == self._at[0]
        # `set_epoch` with the running epoch is for the iteration after the running one
        if self._start is not None and (
            self._start.is_from_state or not is_running or self._start.epoch != epoch
        ):
            epoch, step = self._start.epoch, self._start.step
        assert (state["epoch"], state["served_batches"]) == (epoch, step)
        assert ("size" in state) == self._resized
        return state

    def _end(self, closes: bool) -> None:
        """Close the loaders, or drop them; both end what they have started."""
        self._iterators = []
        for rank in self._ranks if closes else []:
            rank.close()
        self._ranks = []


def _fail_in_the_loop(loader: Any) -> None:
    for _ in loader:
        raise KeyError("of the training")


def open_files() -> int:
    """Return the number of open files without sockets, which Ray opens at any time after its tests."""
    process = psutil.Process()
    return int(process.num_fds() - len(process.net_connections("all")))


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Return whether `condition()` is true within ten seconds."""
    deadline_s = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize(("backend", "kind"), [*MAIN_CASES, pytest.param("auto", "list", id="list")])
def test_any_training_gets_the_batches_of_the_order(
    backend: str,
    kind: str,
    times: int,
    raw_tree: Path,
    converted: dict[str, Path],
    other: dict[str, Path],
) -> None:
    paths = {"raw": raw_tree, "list": [converted["shards"], other["shards"]], **converted}
    samples = IMAGES
    if kind == "list":
        samples += OTHER_IMAGES
    build = partial(build_loader, paths[kind], backend=backend)
    epochs: dict[int, Steps] = {}

    def expected(epoch: int) -> Steps:
        if epoch not in epochs:
            with build(batch_size=GLOBAL_BATCH, size=STORED_SIZE, workers=1) as alone:
                alone.set_epoch(epoch)
                epochs[epoch] = [sorted(batch.ids.tolist()) for batch in alone]
            assert sorted(chain(*epochs[epoch])) == [*range(samples)]
        return epochs[epoch]

    run_state_machine_as_test(
        partial(Training, build, expected),
        settings=settings(
            max_examples=TRAININGS.get(backend, 4) * times,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # shrinking a failing history would take minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


STATES = [
    re.split(r"\s{2,}", line.strip())
    for line in (loaders.Loader.__doc__ or "").partition("STATE ")[2].partition("\n\n")[0].splitlines()[1:]
]
"""Rows of the table of states in the docstring of `Loader`."""


class History:
    """A loader of 3 batches an epoch to which something has happened.

    Args:
        steps: what happens to it, in the words of the table.
    """

    def __init__(self, path: Path, steps: str) -> None:
        self.loader = build_loader(path, batch_size=-(-IMAGES // 3), size=STORED_SIZE)
        self.iterator: Any = None
        self.is_forked = False
        for step in steps.split(", ") if steps != "-" else []:
            name, *numbers = step.split()
            getattr(self, name)(*map(int, numbers))

    def iter(self) -> None:
        self.iterator = iter(self.loader)

    def take(self, count: int) -> None:
        self.iter()
        assert len([*islice(self.iterator, count)]) == min(count, 3)

    def other(self, count: int) -> None:
        self._other = iter(self.loader)
        assert len([*islice(self._other, count)]) == count

    def drop(self) -> None:
        self.iterator = None

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def load(self, epoch: int, served: int) -> None:
        state = {**self.loader.state_dict(), "epoch": epoch, "served_batches": served}
        self.loader.load_state_dict(state)

    def set_size(self, size: int) -> None:
        self.loader.set_size(size)

    def close(self) -> None:
        self.loader.close()

    def fork(self) -> None:
        self.is_forked = True

    def go_on(self, orders: list[Steps]) -> list[str]:
        """Return the state and the next batch of the iterator, as the table writes them."""
        state = self.loader.state_dict()
        return [f"{state['epoch']} {state['served_batches']}", _next_step(lambda: self.iterator, orders)]

    def iterate_anew(self, orders: list[Steps]) -> list[str]:
        """Return the first batch of a new iteration, and whether the size can be set."""
        size = "yes"
        try:
            self.loader.set_size(self.loader.size)
        except SettingError:
            size = "refused"
        return [_next_step(lambda: iter(self.loader), orders), size]


def _next_step(make_iterator: Callable[[], Any], orders: list[Steps]) -> str:
    """Return epoch and number of the next batch of an iterator, as the table writes them.

    Args:
        orders: ids of each batch of each epoch.
    """
    try:
        if (iterator := make_iterator()) is None:
            return "-"
        ids = next(iterator).ids.tolist()
    except StopIteration:
        return "end"
    except SettingError:
        return "refused"
    return next(f"{epoch} {order.index(ids)}" for epoch, order in enumerate(orders) if ids in order)


def _in_fork(function: Callable[[], list[str]]) -> list[str]:
    """Return what `function` returns in a process that is a fork of this one."""
    read_end, write_end = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(write_end, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with open(read_end) as pipe:
        return list(json.load(pipe))


def test_a_loader_goes_on_as_the_table_of_its_states_says(converted: dict[str, Path]) -> None:
    path = converted["shards"]
    fresh = History(path, "-").loader
    orders = [[batch.ids.tolist() for batch in fresh] for _ in range(6)]
    for state, steps, *cells in STATES:
        outcomes = []
        for event in (History.go_on, History.iterate_anew):
            history = History(path, steps)
            with history.loader:
                call = partial(event, history, orders)
                outcomes += _in_fork(call) if history.is_forked else call()
        assert outcomes == cells, state


@pytest.mark.parametrize(("backend", "kind"), MAIN_CASES[1:3])
def test_a_hundred_loaders_leave_no_memory(backend: str, kind: str, converted: dict[str, Path]) -> None:
    """20 loaders would leave 20 batches; allocators grow now and then, but not every 20 loaders."""
    batch_bytes, memory_bytes = 32 * 40 * 40 * 3, []
    for number in range(100):
        next(iter(build_loader(converted[kind], backend=backend, size=40, batch_size=32, workers=1)))
        if number % 20 == 19:
            gc.collect()
            memory_bytes.append(psutil.Process().memory_info().rss)
    assert median_low(np.diff(memory_bytes).tolist()) < 20 * batch_bytes / 2, memory_bytes
