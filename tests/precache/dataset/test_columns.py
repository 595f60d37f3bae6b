"""What is known of every sample, in columns."""

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
    return [column.value(row) for row in range(len(column))]


@pytest.mark.parametrize("name", VALUES)
def test_rows_of_a_column_are_those_of_a_list_whatever_is_asked_for(name: str) -> None:
    (values, kind), random = VALUES[name], np.random.default_rng(len(name))
    many, rows = (
        Column.from_values(values * 1000),
        random.permutation(3000),
    )  # they are gathered some at a time
    assert values_in(many.select(rows)) == [values[row % 3] for row in rows]
    whole, listed = Column.from_values(values * 5), values * 5
    assert (whole.kind, values_in(whole)) == (kind, listed)
    for _ in range(20):
        first, last = sorted(random.integers(0, 16, 2).tolist())
        chosen: list[Rows] = [range(first, last), random.permutation(15)[: last - first]]
        for rows in chosen:
            column, expected = whole.at(rows), [listed[row] for row in rows]
            assert (column.kind, len(column), column.row_shape) == (kind, last - first, whole.row_shape)
            assert values_in(column) == values_in(Column(column.values, column.ends)) == expected
            if not len(rows):
                assert values_in(column.select(np.arange(0))) == []
                continue
            some = random.integers(-len(rows), len(rows), 6)
            assert values_in(column.select(some)) == [expected[row] for row in some]
            some %= len(rows)
            assert values_in(column.at(some)) == values_in(column.at(some).at(range(6)))
            assert values_in(column.at(some).at(np.array([5, 0]))) == [expected[some[5]], expected[some[0]]]
            for asked in (slice(1, 4), slice(None, None, -2)):
                assert values_in(column.select(asked)) == expected[asked]
            picked = random.random(len(rows)) < 0.5
            assert values_in(column.select(picked)) == [expected[row] for row in np.flatnonzero(picked)]
            for wrong in ([len(rows)], [-len(rows) - 1]):
                with pytest.raises(IndexError):
                    column.select(np.array(wrong))


def test_rows_of_a_range_from_0_on_are_the_array_itself() -> None:
    """All columns of a choice share it."""
    positions = np.array([3, 1])
    assert rows_at(range(9), positions) is positions


@pytest.mark.parametrize("name", VALUES)
def test_values_are_the_same_row_by_row_also_of_no_rows(name: str) -> None:
    column = Column.from_values(VALUES[name][0])
    assert column.equal_rows(column).tolist() == [True] * 3
    assert column.equal_rows(column.select(np.array([1, 1, 1]))).tolist() == [False, True, False]
    none = column.select(np.empty(0, np.int64))
    assert none.equal_rows(none).tolist() == []
