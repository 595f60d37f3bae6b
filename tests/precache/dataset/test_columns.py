"""What is known of every sample, in columns."""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from precache.dataset.columns import Column, Pieces

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
def test_a_column_in_pieces_is_what_it_is_in_memory(name: str) -> None:
    """However it is cut, and whatever is asked for, and only pieces with what is asked for are read."""
    (values, kind), random = VALUES[name], np.random.default_rng(len(name))
    many, rows = Column.of(values * 1000), random.permutation(3000)  # they are gathered some at a time
    assert values_in(many.select(rows)) == [values[row % 3] for row in rows]
    whole = Column.of(values * 5)
    assert (whole.kind, values_in(whole)) == (kind, values * 5)
    for _ in range(20):
        starts = np.unique([0, *random.integers(0, len(whole), 3), len(whole)])
        parts = [whole.select(slice(*bounds)) for bounds in pairwise(starts.tolist())]
        reads: list[int] = []
        empty = whole.select(np.empty(0, np.int64))
        read = partial(_read, parts, reads)
        column, rows = Column(empty.values, empty.ends, Pieces(starts, read)), random.integers(-15, 15, 6)
        assert (column.kind, len(column), column.row_shape) == (whole.kind, len(whole), whole.row_shape)
        assert column.select(rows).content() == whole.select(rows % len(whole)).content()
        wanted = np.searchsorted(starts, rows % len(whole), side="right") - 1
        assert sorted(reads) == np.unique(wanted).tolist()
        some = random.permutation(len(whole))[:7]
        assert column.at(some).select(np.arange(1, 5)).content() == whole.select(some[1:5]).content()
        assert values_in(column) == values_in(whole)
        for asked in (slice(2, 9), random.random(len(whole)) < 0.5):
            assert column.select(asked).content() == whole.select(asked).content()
        with pytest.raises(IndexError):
            column.select(np.array([len(whole)]))


@pytest.mark.parametrize("name", VALUES)
def test_values_are_the_same_row_by_row_also_of_no_rows(name: str) -> None:
    column = Column.of(VALUES[name][0])
    assert column.same(column).tolist() == [True] * 3
    assert column.same(column.select(np.array([1, 1, 1]))).tolist() == [False, True, False]
    none = column.select(np.empty(0, np.int64))
    assert none.same(none).tolist() == []


def _read(parts: list[Column], reads: list[int], number: int) -> Column:
    reads.append(number)
    return parts[number]
