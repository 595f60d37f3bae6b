"""What is known of every sample, in columns."""

import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from precache.dataset import columns
from precache.dataset.columns import Column, Pieces, ValueOfRowError, select, values_of
from precache.dataset.index import columns_of

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
    arrays = columns_of({name: column})
    stored = Column(arrays[name], arrays.get(f"ends:{name}"))
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


@pytest.mark.parametrize("name", VALUES)
def test_a_column_in_pieces_is_what_it_is_in_memory(name: str) -> None:
    """However it is cut, and whatever is asked for, and only pieces with what is asked for are read."""
    whole = Column.of(VALUES[name][0] * 5)
    random = np.random.default_rng(len(name))
    for _ in range(20):
        starts = np.unique([0, *random.integers(0, len(whole), 3), len(whole)])
        parts = [whole.select(slice(*bounds)) for bounds in pairwise(starts.tolist())]
        reads: list[int] = []

        def read(number: int, parts: list[Column] = parts, reads: list[int] = reads) -> Column:
            reads.append(number)
            return parts[number]

        empty = whole.select(np.empty(0, np.int64))
        column = Column(empty.values, empty.ends, Pieces(starts, read))
        rows = random.integers(-len(whole), len(whole), 6)
        assert (column.kind, len(column), column.row_shape) == (whole.kind, len(whole), whole.row_shape)
        assert column.select(rows).content() == whole.select(rows % len(whole)).content()
        wanted = np.searchsorted(starts, rows % len(whole), side="right") - 1
        assert sorted(reads) == np.unique(wanted).tolist()
        some = random.permutation(len(whole))[:7]
        assert column.at(some).select(np.arange(1, 5)).content() == whole.select(some[1:5]).content()
        assert [column.value(row) for row in range(3)] == VALUES[name][0]
        for asked in (slice(None), slice(2, 9), random.random(len(whole)) < 0.5):
            assert column.select(asked).content() == whole.select(asked).content()
        twice = Column.concatenate((whole, whole)).content()
        assert Column.concatenate((column, whole)).content() == twice
        with pytest.raises(IndexError):
            column.select(np.array([len(whole)]))


def test_columns_are_compared_as_arrays_are() -> None:
    for values in ([3, 0, 3], [[1.0, 2.0], [3.0, 4.0], [1.0, 5.0]]):
        whole, array = Column.of(values), np.array(values)
        parts = [whole.select(slice(2)), whole.select(slice(2, 3))]
        pieces = Column(array[:0], None, Pieces(np.array([0, 2, 3]), parts.__getitem__))
        for column in (whole, pieces):
            for other in (3, array, array[0], whole, pieces):
                expected = array == (np.asarray(other) if isinstance(other, Column) else other)
                assert np.array_equal(column == other, expected)
                assert np.array_equal(column != other, ~expected)
    texts = Column.of(["a", "b"])
    with pytest.raises(TypeError, match="use select"):
        assert texts == "a"


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
        ([[1], ["a"]], 1, "is not a list of numbers"),
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
