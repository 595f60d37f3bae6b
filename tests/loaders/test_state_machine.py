"""Whatever a training does with its loaders: each step is that of the order, and nothing is left behind.

A rule for each thing that training code does: take batches, leave the loop, raise in it, validate in its
midst, make an iterator and not use it, name an epoch, change the size, go back to a state, go on from it with
other workers in another world. What all ranks are served at a step is compared with what one rank alone
would be. Below is what no history shows: what a hundred loaders leave.
"""

import gc
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain
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
from tests.conftest import IMAGES, STORED_SIZE
from tests.loader_contract import new_threads_and_processes, threads_and_processes
from tests.loaders.cases import MAIN_CASES

GLOBAL_BATCH = 12
WORLDS = (1, 2, 3)
SIZES = (STORED_SIZE, STORED_SIZE // 2)
TRAININGS = {"shards": 50}
"""By backend, else 4: most of one, since epochs are the loader's business."""
Steps = list[list[int]]
"""Ids of each global batch of an epoch, sorted."""


class Training(RuleBasedStateMachine):
    """The ranks of one training, all in this process."""

    def __init__(self, build: Callable[..., loaders.Loader], expected: Callable[[int], Steps]) -> None:
        super().__init__()
        self._build, self._expected, self._steps = build, expected, len(expected(0))
        self._before, self._files = threads_and_processes(), open_files()
        self._ranks: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        """What loaders that were just built know."""
        self._iterators: list[Any] = []
        self._at: list[int] | None = None  # epoch and step of `_iterators`; None: they have not begun
        self._latest = False  # whether no other iteration has begun since
        self._served = (0, 0)  # what a state says of which nothing else is said
        self._coming = 0  # the epoch of an iteration of which nothing is said
        self._asked: tuple[int, int, bool] | None = None  # of the next one: epoch, step, from a state
        self._resized = False

    @initialize(world=st.sampled_from(WORLDS), workers=st.integers(0, 2), size=st.sampled_from(SIZES))
    def start(self, world: int, workers: int, size: int) -> None:
        settings = {"batch_size": GLOBAL_BATCH // world, "workers": workers, "size": size}
        self._ranks = [self._build(rank=rank, world_size=world, **settings) for rank in range(world)]
        self._size = size

    @precondition(lambda self: not self._iterators)
    @rule()
    def make(self) -> None:
        """Iterators that are not asked yet, as Lightning does; they take nothing away."""
        self._iterators, self._at = [iter(rank) for rank in self._ranks], None

    @rule(most=st.integers(1, 8))
    def take(self, most: int) -> None:
        """Some batches of the iteration that runs, or of a new one."""
        if not self._iterators:
            self.make()
        self._serve(most)

    @precondition(lambda self: self._iterators)
    @rule()
    def leave(self) -> None:
        """As `break` does."""
        self._iterators, self._at = [], None

    @precondition(lambda self: self._at is not None)
    @rule(most=st.integers(1, 8))
    def validate(self, most: int) -> None:
        """Another iteration, in the midst of the one that runs."""
        outer = self._iterators, self._at
        self.make()
        self._serve(most)
        self._iterators, self._at = outer
        self._latest = False

    @rule()
    def fail(self) -> None:
        """An exception in the loop, on every rank; it reaches the caller as it is."""
        self.leave()
        epoch, step = self._begin()
        for rank in self._ranks:
            with pytest.raises(KeyError, match="of the training") if step < self._steps else nullcontext():
                _fail_in_the_loop(rank)
        self._served = (epoch, step + 1) if step < self._steps else (epoch + 1, 0)

    @rule(named=st.sampled_from(["running", "next", 0, 1, 2, 3]))
    def set_epoch(self, named: Any) -> None:
        """Holds for the next iteration; said of a state that was loaded, the state stays."""
        epoch = {"running": self._served[0], "next": self._next()[0]}.get(named, named)
        for rank in self._ranks:
            rank.set_epoch(epoch)
        if self._asked is None or not self._asked[2] or self._asked[0] != epoch:
            self._asked = (epoch, 0, False)

    @rule(size=st.sampled_from([*SIZES, 0, (0, 5)]))
    def set_size(self, size: Any) -> None:
        """Between epochs, to what can be served; else nothing changes."""
        refused = self._at is not None or size not in SIZES
        for rank in self._ranks:
            if refused:
                with pytest.raises(SettingError, match="size"):
                    rank.set_size(size)
            else:
                rank.set_size(size)
        if not refused:
            self._size, self._resized = size, True

    @precondition(lambda self: self._at is None or not self._resized)
    @rule(further=st.integers(0, 2))
    def go_back(self, further: int) -> None:
        """To a state of this training, which an iteration that runs does not end at."""
        state = self._state()
        if self._iterators and self._at is not None:
            self._serve(further)
        for rank in self._ranks:
            rank.load_state_dict(state)
        self._asked = (state["epoch"], state["served_batches"], True)

    @rule(world=st.sampled_from(WORLDS), workers=st.integers(0, 2), closes=st.booleans(), names=st.booleans())
    def restart(self, world: int, workers: int, closes: bool, names: bool) -> None:
        """From a state, in a world of another size: what is left of the epoch, also where that is named."""
        state, size, iterators = self._state(), self._size, self._iterators
        self._end(closes)
        for iterator in iterators if closes else []:
            with pytest.raises(SettingError, match="is closed"):
                next(iterator)
        self._forget()
        self.start(world, workers, SIZES[0] if "size" in state else size)
        for rank in self._ranks:
            rank.load_state_dict(state)
        self._asked = (state["epoch"], state["served_batches"], True)
        self._size, self._resized = size, "size" in state
        assert {rank.size for rank in self._ranks} == {size}
        if names:
            self.set_epoch("next")

    @invariant()
    def says_where_it_is(self) -> None:
        if self._ranks:
            self._state()

    def teardown(self) -> None:
        closed = repr(self._ranks)  # not they themselves: each has its mapped index open until it goes
        self._end(closes=True)
        gc.collect()
        tidy = settles(lambda: not new_threads_and_processes(self._before) and open_files() <= self._files)
        assert tidy, (closed, new_threads_and_processes(self._before), open_files() - self._files)

    def _next(self) -> tuple[int, int]:
        return (self._coming, 0) if self._asked is None else self._asked[:2]

    def _begin(self) -> tuple[int, int]:
        begins, self._asked = self._next(), None
        self._served, self._coming = begins, begins[0] + 1
        return begins

    def _serve(self, most: int) -> None:
        """So many batches of `_iterators`, which begin if they have not."""
        for _ in range(most):
            batches = [next(iterator, None) for iterator in self._iterators]
            if self._at is None:
                self._at, self._latest = list(self._begin()), True
            epoch, step = self._at
            if step == self._steps:
                assert batches == [None] * len(batches)
                self._served = (self._coming, 0)
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
        """As JSON; any rank may save it."""
        states = {json.dumps(rank.state_dict()) for rank in self._ranks}
        (state,) = map(json.loads, states)
        asked = self._asked
        runs = self._at is not None and self._latest and self._served[0] == self._at[0]
        # what was said of the epoch that runs is about the iteration after this one
        said = asked is not None and (asked[2] or not runs or asked[0] != self._served[0])
        assert (state["epoch"], state["served_batches"]) == (asked[:2] if said else self._served)
        assert ("size" in state) == self._resized
        return state

    def _end(self, closes: bool) -> None:
        """Closed, or thrown away: both end what the loaders have started."""
        self._iterators = []
        for rank in self._ranks if closes else []:
            rank.close()
        self._ranks = []


def _fail_in_the_loop(loader: Any) -> None:
    for _ in loader:
        raise KeyError("of the training")


def open_files() -> int:
    """But sockets: of those Ray, where tests of it ran before in this process, opens some when it likes."""
    process = psutil.Process()
    return int(process.num_fds() - len(process.net_connections("all")))


def settles(holds: Callable[[], bool]) -> bool:
    """Whether it does within ten seconds."""
    deadline_s = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return holds()


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize(("backend", "kind"), [*MAIN_CASES, pytest.param("auto", "mixture", id="mixture")])
def test_any_training_gets_the_batches_of_the_order(
    backend: str, kind: str, times: int, raw_tree: Path, converted: dict[str, Path]
) -> None:
    paths = {"raw": raw_tree, "mixture": [converted["shards"], converted["webdataset"]], **converted}
    build = partial(build_loader, paths[kind], backend=backend)
    epochs: dict[int, Steps] = {}

    def expected(epoch: int) -> Steps:
        if epoch not in epochs:
            with build(batch_size=GLOBAL_BATCH, size=STORED_SIZE, workers=1) as alone:
                alone.set_epoch(epoch)
                epochs[epoch] = [sorted(batch.ids.tolist()) for batch in alone]
            assert sorted(chain(*epochs[epoch])) == sorted([*range(IMAGES)] * (2 if kind == "mixture" else 1))
        return epochs[epoch]

    run_state_machine_as_test(
        partial(Training, build, expected),
        settings=settings(
            max_examples=TRAININGS.get(backend, 4) * times,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a shorter history would take minutes to find
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(("backend", "kind"), MAIN_CASES[1:3])
def test_a_hundred_loaders_leave_no_memory(backend: str, kind: str, converted: dict[str, Path]) -> None:
    """Each step of 20 would leave 20 batches; allocators grow now and then, not at every step."""
    batch_bytes, taken = 32 * 40 * 40 * 3, []
    for number in range(100):
        next(iter(build_loader(converted[kind], backend=backend, size=40, batch_size=32, workers=1)))
        if number % 20 == 19:
            gc.collect()
            taken.append(psutil.Process().memory_info().rss)
    assert median_low(np.diff(taken).tolist()) < 20 * batch_bytes / 2, taken
