"""The stage that takes longest is the one that the verdict names, by the real trials.

The trials run here, one after the other. What a trial takes is not what this machine takes for it, but what
the stages take that it was seen to pass: no stage is found because the machine is busy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from bench.measure.candidates import Candidate
from bench.measure.comparison import compare
from bench.measure.settings import Settings
from bench.measure.trainers import EmulatedTrainer
from bench.measure.trial import Trial
from bench.report.row import Row
from loaders.deliver.devices import Lane
from precache.pictures import images
from tests.bench.settings import quick

PICTURE_S = 0.008
"""Of each stage, per picture, unless it is slowed down."""
STAGES = {
    "storage": (images, "read_bytes"),
    "decode": (images, "decode_for"),
    "transfer": (Lane, "mark"),
    "compute": (EmulatedTrainer, "step"),
}


@contextmanager
def watched() -> Iterator[list[str]]:
    """The stages that are passed while the block runs, in their order."""
    passed: list[str] = []

    def noting(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            passed.append(stage)
            return function(*given, **named) if stage != "compute" else None

        return noted

    patches = [patch.object(*at, noting(stage, getattr(*at))) for stage, at in STAGES.items()]
    for each in patches:
        each.start()
    yield passed
    for each in patches:
        each.stop()


def measured(tree: Path, picture_s: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> Row:
    def timed(function: Callable[..., Any], settings: Settings, *given: Any) -> Any:
        with watched() as passed:
            found = function(settings, *given)
        if not isinstance(found, Trial):
            assert passed == sorted(passed, reverse=True), "what is read is not timed with what is decoded"
            return {"read": 1 / picture_s["storage"], "decode": 1 / picture_s["decode"]}
        # a loader does its stages one after the other, and the trainer computes beside it
        loader_s = sum(picture_s[stage] for stage in set(passed) - {"compute"})
        step_s = picture_s["compute"] if "compute" in passed else 0.0
        batch_s = settings.batch_size * max(loader_s, step_s)
        count = len(found.batch_s)
        wait_s = batch_s - settings.batch_size * step_s
        times = {"wait_s": (wait_s,) * count, "step_s": (batch_s - wait_s,) * count}
        return replace(found, batch_s=(batch_s,) * count, **times)

    monkeypatch.setattr("bench.measure.comparison.run_fresh", timed)
    settings = quick(trainer="emulated:1000", repeats=2, workers=0)  # in no process but this one
    (row,) = compare([Candidate("pytorch", tree)], settings).rows
    return row


@pytest.mark.parametrize("slowed", STAGES)
def test_the_stage_that_is_slowed_down_is_named(
    raw_tree: Path, slowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    factor = 8 if slowed == "compute" else 4
    picture_s = {**dict.fromkeys(STAGES, PICTURE_S), slowed: factor * PICTURE_S}
    row = measured(raw_tree, picture_s, monkeypatch)
    assert row.binds == slowed, row.advice
    assert row.stages[slowed] == pytest.approx(1 / (factor * PICTURE_S))
    assert row.stages[slowed] == min(row.stages.values())
    assert row.together is not None
    assert row.predicted == pytest.approx(row.together.median)
