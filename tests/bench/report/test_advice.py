"""Advice on a change: the argument by the name that it has where it is given."""

from dataclasses import replace
from typing import Any

import pytest

from bench.report.advice import advise
from bench.report.change import Basis, Change, ChangeKind
from bench.report.stats import Estimate
from tests.bench.report.test_waiting import waiting_stream

RATE = Estimate(1.0, 1.0, 1.0)
WORKERS = Change(ChangeKind.WORKERS, RATE, Basis.PREDICTED, {"num_workers": 2, "persistent_workers": True})


def advice(change: Change = WORKERS, *, remade: bool = False, **info: Any) -> str:
    stream = waiting_stream(remade=remade)
    return " ".join(advise(replace(stream, info={**stream.info, **info}), change))


@pytest.mark.parametrize(
    ("library", "given", "taker"),
    [
        (None, "num_workers=2, persistent_workers=True", "the DataLoader made at train.py:7"),
        ("transformers", "dataloader_num_workers=2, dataloader_persistent_workers=True", "TrainingArguments"),
        ("timm", "num_workers=2, persistent_workers=True", "create_loader"),
        ("fastai", "num_workers=2, persistent_workers=True", "the call that makes the DataLoaders"),
        ("ultralytics", "workers=2", "train(...)"),
        ("another", "num_workers=2, persistent_workers=True", "another"),
    ],
)
def test_argument_has_the_name_that_its_library_gives_it(library: str, given: str, taker: str) -> None:
    text = advice(libraries=[library] if library else [])
    assert text.startswith(f"Give {given} to {taker}")
    assert "train.py:7" in text


def test_library_that_takes_no_such_argument_gets_no_advice() -> None:
    change = Change(ChangeKind.PIN_MEMORY, RATE, Basis.PREDICTED, {"pin_memory": True})
    assert advice(change, libraries=["ultralytics"]) == ""


def test_loader_that_is_made_anew_cannot_keep_its_workers() -> None:
    assert "before the first epoch" in advice(remade=True)
    assert "before the first epoch" not in advice()


@pytest.mark.parametrize(("start", "is_needed"), [("fork", False), ("spawn", True), ("forkserver", True)])
def test_first_workers_need_a_guard_where_they_are_not_forked(start: str, is_needed: bool) -> None:
    assert ("__name__" in advice(start=start)) == is_needed
