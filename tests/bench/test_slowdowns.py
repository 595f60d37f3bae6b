"""A stage that is slowed down on purpose is the one that the verdict names, by the real trials.

Each stage of the base takes as long as any other, by sleeping: no stage is the narrowest. The sleeps are
far longer than the work, so that a busy machine does not change what is found.
"""

from functools import partial
from pathlib import Path

import pytest

from bench.measure.candidates import Candidate
from bench.measure.comparison import compare
from bench.measure.settings import Settings
from bench.report.row import Row
from tests.bench.slowed import BATCH, make_tree, slow

PICTURE_S = 0.008
"""Of each stage of the base, per picture."""
STAGES = ("storage", "decode", "transfer", "compute")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("small") / "tree")


def measure(tree: Path, picture_s: dict[str, float]) -> Row:
    settings = Settings(
        trainer="emulated:1000", batch_size=BATCH, workers=1, size=32, warmup=0, batches=4, repeats=2,
        around=partial(slow, picture_s),
    )  # fmt: skip
    (row,) = compare([Candidate("pytorch", tree)], settings).rows
    return row


@pytest.mark.parametrize(
    "slowed",
    ["decode", *(pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES if stage != "decode")],
)
def test_the_stage_that_is_slowed_down_is_named(tree: Path, slowed: str) -> None:
    # compute runs beside the three others, which a worker does one after the other
    factor = 8 if slowed == "compute" else 4
    base = {**dict.fromkeys(STAGES, PICTURE_S), slowed: factor * PICTURE_S}
    row = measure(tree, base)
    assert row.binds == slowed, row.advice
    assert row.stages[slowed] == pytest.approx(1 / (factor * PICTURE_S), rel=0.2)
    assert row.stages[slowed] == min(row.stages.values())
    assert row.predicted is not None
    assert row.together is not None
    assert row.predicted == pytest.approx(row.together.median, rel=0.25)


def test_no_stage_is_named_where_none_is_slowed_down(tree: Path) -> None:
    row = measure(tree, dict.fromkeys(STAGES, PICTURE_S))
    assert row.binds is None, row.advice
    assert "within noise" in row.advice
