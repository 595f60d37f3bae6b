"""Which epoch an iteration serves, and what a state says of it; see test_backends.py for every backend."""

import logging
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import loaders
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE
from tests.loader_contract import ids_of

BATCHES = 5


@pytest.fixture(scope="module")
def epochs(converted: dict[str, Path]) -> list[list[list[int]]]:
    """Ids of each batch of the first four epochs."""
    with build_loader(converted["shards"], batch_size=16) as loader:
        return [[batch.ids.tolist() for batch in loader] for _ in range(4)]


@pytest.fixture
def loader(converted: dict[str, Path]) -> Iterator[loaders.Loader]:
    with build_loader(converted["shards"], batch_size=16) as built:
        yield built


def some(iterator: Any, count: int) -> list[list[int]]:
    return [next(iterator).ids.tolist() for _ in range(count)]


def place(loader: loaders.Loader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["served_batches"]


def test_an_iterator_that_is_never_asked_takes_none(loader: Any, epochs: Any) -> None:
    iter(loader)
    unused = iter(loader)
    assert place(loader) == (0, 0)
    assert ids_of(loader) == list(chain(*epochs[0]))
    assert some(unused, 1) == epochs[1][:1], "it begins when it is asked"


def test_set_epoch_after_iter_holds_for_that_iteration(loader: Any, epochs: Any) -> None:
    """Lightning does it in this order."""
    iterator = iter(loader)
    loader.set_epoch(3)
    assert [batch.ids.tolist() for batch in iterator] == epochs[3]


def test_set_epoch_of_the_epoch_that_runs_leaves_its_state_alone(loader: Any, epochs: Any) -> None:
    iterator = iter(loader)
    some(iterator, 2)
    loader.set_epoch(0)
    assert place(loader) == (0, 2)
    assert some(iterator, 1) == epochs[0][2:3]
    assert place(loader) == (0, 3)
    del iterator
    assert place(loader) == (0, 0)
    assert ids_of(loader) == list(chain(*epochs[0]))


def test_a_state_that_is_loaded_while_an_iteration_runs_holds_for_the_next(loader: Any, epochs: Any) -> None:
    iterator = iter(loader)
    some(iterator, 3)
    state = loader.state_dict()
    some(iterator, 1)
    loader.load_state_dict(state)
    assert some(iterator, 1) == epochs[0][4:], "it is not ended"
    assert place(loader) == (0, 3)
    assert [batch.ids.tolist() for batch in loader] == epochs[0][3:]


def test_an_epoch_served_to_its_last_batch_is_over(loader: Any, epochs: Any) -> None:
    """Who knows `len()` need not ask for more, as Lightning does not."""
    iterator = iter(loader)
    assert some(iterator, BATCHES) == epochs[0]
    assert place(loader) == (0, BATCHES)
    assert ids_of(loader) == list(chain(*epochs[1]))
    assert next(iterator, None) is None


def test_iterations_side_by_side_both_get_their_epoch_and_a_warning_what_it_costs(
    loader: Any, epochs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="loaders"):
        pairs = [(one.ids.tolist(), two.ids.tolist()) for one, two in zip(loader, loader, strict=True)]
    assert [list(served) for served in zip(*pairs, strict=True)] == epochs[:2]
    assert [record.message for record in caplog.records if "build one loader for each" in record.message]
    assert place(loader) == (2, 0)


def test_an_iterator_of_a_closed_loader_says_so(loader: Any) -> None:
    iterator = iter(loader)
    some(iterator, 1)
    loader.close()
    with pytest.raises(SettingError, match="is closed; build another one"):
        next(iterator)


def test_throwing_an_iterator_away_runs_no_python(loader: Any) -> None:
    """Ctrl-C would raise its KeyboardInterrupt there, where nobody can catch it, and be lost."""
    iterator = iter(loader)
    next(iterator)
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del iterator
    finally:
        sys.setprofile(None)
    assert called == []


def test_a_size_that_cannot_be_served_changes_nothing(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], workers=1, batch_size=16) as loader:
        assert "size" not in loader.state_dict(), "a state of a loader that keeps its size says none"
        for size, message in (((0, 5), "height of size must be"), (0, "size must be")):
            with pytest.raises(SettingError, match=message):
                loader.set_size(size)
        assert loader.size == STORED_SIZE
        assert len(ids_of(loader)) == IMAGES
    with pytest.raises(SettingError, match="is closed"):
        loader.set_size(16)
