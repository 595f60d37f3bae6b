"""Whatever a training does with its loaders: each step is that of the order, and nothing is left behind.

A rule for each thing that training code does: take batches, leave the loop, raise in it, validate in its
midst, name an epoch, change the size, go on from a state with other workers in another world. What all ranks
are served at a step is compared with what one rank alone would be.
"""

import gc
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import loaders
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import STORED_SIZE
from tests.loader_contract import left, running

GLOBAL_BATCH = 12
WORLDS = (1, 2, 3)
SIZES = (STORED_SIZE, STORED_SIZE // 2)
ARMS = [("pytorch", "raw", 4), ("shards", "shards", 50), ("webdataset", "webdataset", 4), ("dali", "dali", 4)]
"""Backend, what it reads, how many trainings: most of one backend, since epochs are the loader's business."""
Steps = list[list[int]]
"""Ids of each global batch of an epoch, sorted."""


class Training(RuleBasedStateMachine):
    """The ranks of one training, all in this process."""

    def __init__(self, build: Callable[..., loaders.Loader], expected: Callable[[int], Steps]) -> None:
        super().__init__()
        self._build, self._expected = build, expected
        self._before = running()
        self._ranks: list[Any] = []
        self._iterators: list[Any] = []
        self._epoch = self._step = 0  # of the iteration that runs, or ran last
        self._next = (0, 0)  # epoch and step at which the next one begins
        self._validated = False  # in the midst of it
        self._size = STORED_SIZE

    @initialize(world=st.sampled_from(WORLDS), workers=st.integers(0, 2))
    def start(self, world: int, workers: int) -> None:
        self._ranks = [
            self._build(
                rank=rank,
                world_size=world,
                batch_size=GLOBAL_BATCH // world,
                workers=workers,
                size=self._size,
            )
            for rank in range(world)
        ]

    @rule(most=st.integers(1, 7))
    def take(self, most: int) -> None:
        """Some batches of the iteration that runs, or of a new one."""
        if not self._iterators:
            self._iterators, (self._epoch, self._step) = self._begin()
            self._validated = False
        for _ in range(most):
            batches = [next(iterator, None) for iterator in self._iterators]
            if self._step == len(self._expected(self._epoch)):
                assert batches == [None] * len(batches)
                self._iterators = []
                return
            self._check(batches, self._epoch, self._step)
            self._step += 1

    @precondition(lambda self: self._iterators)
    @rule()
    def leave(self) -> None:
        """As `break` does."""
        self._iterators = []

    @rule()
    def validate(self) -> None:
        """A whole iteration, in the midst of another if one runs."""
        iterators, (epoch, first) = self._begin()
        self._validated = True
        for step in count(first):
            batches = [next(iterator, None) for iterator in iterators]
            if step == len(self._expected(epoch)):
                assert batches == [None] * len(batches)
                break
            self._check(batches, epoch, step)

    @rule()
    def fail(self) -> None:
        """An exception in the loop, on every rank; it reaches the caller as it is."""
        self._iterators = []
        epoch, step = self._next
        for rank in self._ranks:
            with pytest.raises(KeyError, match="of the training"):
                _fail_in_the_loop(rank)
        self._epoch, self._step = epoch, step + (step < len(self._expected(epoch)))
        self._next = (epoch + 1, 0)

    @rule(named=st.integers(0, 3) | st.none())
    def set_epoch(self, named: int | None) -> None:
        """Holds for the next iteration; said of a state that was loaded, the state stays."""
        epoch = self._next[0] if named is None else named
        for rank in self._ranks:
            rank.set_epoch(epoch)
        if self._iterators or self._next[0] != epoch:
            self._next = (epoch, 0)

    @rule(size=st.sampled_from(SIZES))
    def set_size(self, size: int) -> None:
        """Between epochs."""
        for rank in self._ranks:
            if self._iterators:
                with pytest.raises(SettingError, match="in the middle of an epoch"):
                    rank.set_size(size)
            else:
                rank.set_size(size)
        if not self._iterators:
            self._size = size

    @rule(world=st.sampled_from(WORLDS), workers=st.integers(0, 2), closes=st.booleans())
    def restart(self, world: int, workers: int, closes: bool) -> None:
        """From a state, as JSON, in a world of another size: what is left of the epoch, and nothing else."""
        states = [json.dumps(rank.state_dict()) for rank in self._ranks]
        assert len(set(states)) == 1, "any rank may save it"
        state = json.loads(states[0])
        if self._iterators and not self._validated:  # a state is of the iteration that began last
            assert (state["epoch"], state["served_batches"]) == (self._epoch, self._step)
        self._end(closes)
        self.start(world, workers)
        for rank in self._ranks:
            rank.load_state_dict(state)
        self._next = (state["epoch"], state["served_batches"])
        self._size = self._ranks[0].size

    def teardown(self) -> None:
        self._end(closes=True)
        gc.collect()
        deadline_s = time.monotonic() + 10
        while left(self._before) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not left(self._before)

    def _begin(self) -> tuple[list[Any], tuple[int, int]]:
        begins, self._next = self._next, (self._next[0] + 1, 0)
        return [iter(rank) for rank in self._ranks], begins

    def _check(self, batches: list[Any], epoch: int, step: int) -> None:
        assert all(batch is not None for batch in batches), (epoch, step)
        served = [i for batch in batches for i in batch.ids[~batch.padding].tolist()]
        assert sorted(served) == self._expected(epoch)[step]
        sizes = [len(batch.ids) for batch in batches]
        assert max(sizes) - min(sizes) <= 1
        assert {batch.images.shape[2:] for batch in batches} == {(self._size, self._size)}

    def _end(self, closes: bool) -> None:
        """Closed, or thrown away: both end what the loaders have started."""
        self._iterators = []
        for rank in self._ranks if closes else []:
            rank.close()
        self._ranks = []


def _fail_in_the_loop(loader: Any) -> None:
    for _ in loader:
        raise KeyError("of the training")


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize(("backend", "kind", "trainings"), ARMS, ids=[arm[0] for arm in ARMS])
def test_any_training_is_served_what_it_asks_for(
    backend: str, kind: str, trainings: int, times: int, raw_tree: Path, converted: dict[str, Path]
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    build = partial(build_loader, raw_tree if kind == "raw" else converted[kind], backend=backend)
    epochs: dict[int, Steps] = {}
    with build(batch_size=GLOBAL_BATCH, size=STORED_SIZE, workers=1) as alone:

        def expected(epoch: int) -> Steps:
            if epoch not in epochs:
                alone.set_epoch(epoch)
                epochs[epoch] = [sorted(batch.ids.tolist()) for batch in alone]
                assert sorted(chain(*epochs[epoch])) == sorted(chain(*epochs[min(epochs)]))
            return epochs[epoch]

        expected(0)
        run_state_machine_as_test(
            partial(Training, build, expected),
            settings=settings(
                max_examples=trainings * times,
                stateful_step_count=12,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
