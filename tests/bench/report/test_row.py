"""Rows as JSON: what is written is read back; what is damaged is refused in one line."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.report.row import Result, Row, by_key, read_result, typed
from precache.errors import SettingError
from tests.bench.rich_result import altered, rich_result, waiting_row
from tests.command import ROOT

RESULTS = ROOT / "bench/results"
KEPT = sorted(path for path in RESULTS.glob("*.json") if not path.name.startswith("gpu-"))


def written(result: Result) -> Any:
    return json.loads(json.dumps(result.to_json(), allow_nan=False))


def test_a_result_with_everything_and_those_that_documents_show_survive_json() -> None:
    result = rich_result()
    assert Result.from_json(written(result)) == result
    assert KEPT
    for file in KEPT:
        result = read_result(file)
        assert Result.from_json(written(result)) == result
        names = {row["backend"] for row in json.loads(file.read_text())["rows"]}
        assert names == {row.backend for row in result.rows}


def test_a_key_that_is_not_known_is_left_out_and_one_that_is_not_there_is_what_was_not_measured() -> None:
    read = typed(Row, {**written(rich_result())["rows"][1], "monitor": {}, "of_tomorrow": 3})
    assert read.monitor is None
    needed = {"backend": "shards", "data": "shards", "trainer_name": "none"}
    assert typed(Row, {**needed, "loader": {"median": 1, "low": 1, "high": 1}}).together is None


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each value in JSON, by what holds it and where; of lists the first."""
    for where in list(value) if isinstance(value, dict) else range(min(1, len(value))):
        yield value, where
        if isinstance(value[where], (dict, list)):
            yield from places(value[where])


def test_a_value_of_another_type_is_refused_in_one_line() -> None:
    content = written(rich_result())
    content["rows"] = [content["rows"][0]]
    checked = {"batch_size", "workers", "size", "repeats", "trainers", "peers"}
    free = {"version", *content["settings"]} - checked
    count = 0
    for holder, where in places(content):
        before = copy.copy(holder[where])
        for other in ([None], 3, "x"):
            alike = isinstance(before, (int, float)) and other == 3
            if alike or type(before) is type(other) or where in free or before in (None, [], {}):
                continue
            holder[where] = other
            with pytest.raises(SettingError, match=r"^not a result of 'bench loaders' \(.*\)$"):
                Result.from_json(content)
            count += 1
        holder[where] = before
    assert count > 200
    Result.from_json(content)


def test_rows_that_are_alike_are_told_apart_by_their_rank() -> None:
    row = waiting_row()
    keys = list(by_key([row, altered(row, trainer_name="resnet50"), row]))
    assert [key.loader for key in keys] == ["pytorch on raw tree"] * 2 + ["pytorch on raw tree (2)"]
    assert [key.trainer for key in keys] == ["emulated:2480", "resnet50", "emulated:2480"]
