"""What is known of every sample, in columns."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from precache.dataset import columns
from precache.dataset.columns import Column, ValueOfRowError, from_arrays, select, to_arrays, values_of

VALUES: dict[str, tuple[list[Any], str]] = {
    "width": ([3, 0, -7], "int"),
    "weight": ([1, 2.5, float("-inf")], "float"),
    "embedding": ([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "vector"),
    "boxes": ([[[1, 2, 3, 4]], [], [[5, 6, 7, 8], [9, 9, 9, 9]]], "ragged"),
    "tags": ([[1], [2, 3], []], "ragged"),
    "caption": (["", "ein Schäfchen 🐑", "a\0b"], "text"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_went_in(name: str) -> None:
    values, kind = VALUES[name]
    column = Column.of(values)
    assert column.kind == kind
    assert len(column) == len(values)
    assert [column.value(row) for row in range(3)] == values
    stored = from_arrays(to_arrays(name, column))[name]
    assert [stored.value(row) for row in range(3)] == values
    assert stored.kind == kind


@pytest.mark.parametrize("name", VALUES)
def test_rows_are_selected_by_number_and_by_mask(name: str) -> None:
    values, _ = VALUES[name]
    columns = {name: Column.of(values)}
    assert [values_of(select(columns, np.array([2, 0, 2])), row)[name] for row in range(3)] == [
        values[2],
        values[0],
        values[2],
    ]
    masked = select(columns, np.array([False, True, True]))[name]
    assert [masked.value(row) for row in range(2)] == values[1:]


@pytest.mark.parametrize("at_once", [1, 2, 7, 64])
def test_many_rows_are_selected_a_few_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(at_once)
    texts = ["\u00e9" * length for length in random.integers(0, 4, 50)]
    boxes = [[[row, number, 0, 1] for number in range(row % 3)] for row in range(50)]
    monkeypatch.setattr(columns, "_GATHERED", at_once)
    for values in (texts, boxes):
        for rows in (random.permutation(50), random.integers(0, 50, 7), np.empty(0, np.int64)):
            chosen = Column.of(values).select(rows)
            assert [chosen.value(row) for row in range(len(chosen))] == [values[row] for row in rows]


def test_selecting_text_takes_little_more_memory_than_the_text() -> None:
    rows, width = 50_000, 100
    column = Column(np.zeros(rows * width, np.uint8), np.arange(1, rows + 1) * width)
    tracemalloc.start()
    try:
        column.select(np.arange(rows))
        assert tracemalloc.get_traced_memory()[1] < 3 * rows * width
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("values", "row", "words"),
    [
        ([1, "a"], 0, "expected numbers"),
        ([[1], None], 1, "is empty"),
        ([[1], ["a"]], 1, "is no list of numbers"),
        ([[[1, 2]], [[1, 2, 3]]], 1, "has shape"),
        ([1, 2**63], 1, "64 bits"),
        (["a", "\udcff"], 1, "UTF-8"),
        ([], 0, "there is none"),
        ([{"a": 1}], 0, "is dict"),
    ],
)
def test_values_that_do_not_fit_are_named_by_row(values: list[Any], row: int, words: str) -> None:
    with pytest.raises(ValueOfRowError, match=words) as caught:
        Column.of(values)
    assert caught.value.row == row


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        (np.zeros(3, np.int64), np.array([1, 2])),
        (np.zeros(3, np.int64), np.array([2, 1, 3])),
        (np.zeros(3, np.float32), None),
        (np.zeros(3, np.uint8), None),
        (np.zeros((2, 2, 2)), None),
    ],
)
def test_arrays_that_are_no_column_are_refused(values: Any, ends: Any) -> None:
    with pytest.raises(ValueError, match=r"values of|ends that"):
        Column(values, ends)
