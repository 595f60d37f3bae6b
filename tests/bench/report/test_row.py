"""Rows as JSON: what was written stays readable, and is written as it was."""

import json
from pathlib import Path

import pytest

from bench.report.result import Result
from tests.bench.rich_result import rich_result
from tests.command import ROOT

KEPT = sorted((ROOT / "bench/results").glob("caltech101-*.json")) + sorted(
    (ROOT / "bench/results").glob("loaders-*.json")
)
KEYS = (
    "backend", "data", "trainer_name", "loader", "trainer", "together", "ratio", "first_batch_s",
    "batch_s_median", "batch_s_p95", "peer", "of_limit", "over", "epoch_gap_s", "cold", "data_wait",
    "utilisation", "first_step_s", "stalls", "stages", "predicted", "binds", "advice", "changes", "wait_s",
    "step_s", "epoch_starts", "spikes", "monitor", "image_bytes",
)  # fmt: skip
"""Of a row in version 1, which other programs read."""


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_a_result_that_was_kept_is_written_as_it_was(file: Path) -> None:
    content = json.loads(file.read_text())
    again = json.loads(json.dumps(Result.from_json(content).to_json()))
    assert again.keys() == content.keys()
    for before, after in zip(content["rows"], again["rows"], strict=True):
        assert {name: after[name] for name in before} == before
        assert all(after[name] in (None, []) for name in after.keys() - before.keys())
    assert {**again, "rows": content["rows"]} == content


def test_every_key_of_a_row_is_there_whether_measured_or_not() -> None:
    for row in rich_result().rows:
        assert set(row.to_json()) == set(KEYS)


def test_a_row_with_everything_survives_json() -> None:
    result = rich_result()
    text = json.dumps(result.to_json(), allow_nan=False)
    assert Result.from_json(json.loads(text)) == result
