"""Columns select their rows like lists of the same values."""

from typing import Any

import numpy as np
import pytest

from precache.dataset.columns import Column, Rows, rows_at

VALUES: dict[str, tuple[list[Any], str]] = {
    "width": ([3, 0, -7], "int"),
    "weight": ([1, 2.5, float("-inf")], "float"),
    "embedding": ([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "vector"),
    "boxes": ([[[1, 2, 3, 4]], [], [[5, 6, 7, 8], [9, 9, 9, 9]]], "ragged"),
    "tags": ([[1], [2, 3], []], "ragged"),
    "caption": (["", "ein Schäfchen 🐑", "a\0b"], "text"),
}


def values_in(column: Column) -> list[Any]:
    return [column.row_value(row) for row in range(len(column))]


@pytest.mark.parametrize("name", VALUES)
def test_from_values_keeps_kind_and_values(name: str) -> None:
    values, kind = VALUES[name]
    column = Column.from_values(values)
    assert (column.kind, values_in(column)) == (kind, values)


@pytest.mark.parametrize("name", VALUES)
def test_select_gathers_more_rows_than_one_block(name: str) -> None:
    values, _ = VALUES[name]
    rows = np.random.default_rng(len(name)).permutation(3000)
    selected = Column.from_values(values * 1000).select(rows)
    assert values_in(selected) == [values[row % 3] for row in rows]


@pytest.mark.parametrize("name", VALUES)
def test_rows_of_a_column_are_those_of_a_list_with_the_same_index(name: str) -> None:
    (values, kind), random = VALUES[name], np.random.default_rng(len(name))
    whole, values = Column.from_values(values * 5), values * 5
    for _ in range(20):
        first, last = sorted(random.integers(0, 16, 2).tolist())
        subsets: list[Rows] = [range(first, last), random.permutation(15)[: last - first]]
        for rows in subsets:
            column, expected = whole.view_rows(rows), [values[row] for row in rows]
            assert (column.kind, len(column), column.row_shape) == (kind, last - first, whole.row_shape)
            assert values_in(column) == values_in(Column(column.values, column.ends)) == expected
            if not len(rows):
                assert values_in(column.select(np.arange(0))) == []
                continue
            positions = random.integers(-len(rows), len(rows), 6)
            assert values_in(column.select(positions)) == [expected[row] for row in positions]
            positions %= len(rows)
            nested = column.view_rows(positions)
            assert values_in(nested) == values_in(nested.view_rows(range(6)))
            assert values_in(nested.view_rows(np.array([5, 0]))) == [
                expected[positions[5]],
                expected[positions[0]],
            ]
            for part in (slice(1, 4), slice(None, None, -2)):
                assert values_in(column.select(part)) == expected[part]
            mask = random.random(len(rows)) < 0.5
            assert values_in(column.select(mask)) == [expected[row] for row in np.flatnonzero(mask)]


@pytest.mark.parametrize("position", [3, -4])
@pytest.mark.parametrize("rows", [range(3), range(5, 8), np.array([9, 2, 7])], ids=["start", "range", "rows"])
@pytest.mark.parametrize("name", VALUES)
def test_select_raises_index_error_outside_of_the_column(
    name: str, rows: range | np.ndarray, position: int
) -> None:
    """The arrays behind the three rows hold 15."""
    column = Column.from_values(VALUES[name][0] * 5).view_rows(rows)
    with pytest.raises(IndexError):
        column.select(np.array([position]))


def test_rows_at_of_a_range_from_0_returns_the_positions_uncopied() -> None:
    positions = np.array([3, 1])
    assert rows_at(range(9), positions) is positions


@pytest.mark.parametrize("rows", [None, range(1, 3), np.array([2, 0])])
def test_array_of_a_column_copies_as_asked(rows: Rows | None) -> None:
    """True copies, None copies where it has to, and False raises there."""
    whole = np.array([3, 0, -7])
    column = Column(whole, rows=rows)
    expected = whole if rows is None else whole[rows]
    for copy in (None, True):
        assert np.array_equal(column.__array__(copy=copy), expected)
    assert not np.shares_memory(column.__array__(copy=True), whole)
    assert column.__array__(np.float32).dtype == np.float32
    if isinstance(rows, np.ndarray):
        with pytest.raises(ValueError, match="copy"):
            column.__array__(copy=False)
        return
    for copy in (None, False):
        assert np.shares_memory(column.__array__(copy=copy), whole)
    with pytest.raises(ValueError, match="copy"):
        column.__array__(np.float32, copy=False)
