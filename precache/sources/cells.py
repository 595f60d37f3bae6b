"""What text in a table stands for: whole numbers, other numbers, lists, or the text itself.

Lists are read as JSON, Python and numpy write them, see `parse_list`.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from precache.dataset.columns import ValueOfRowError

# As a program writes numbers: 007, +49 and numbers of 19 digits are names. 18 digits fit into 64 bits.
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
NUMBER = re.compile(r"-?((0|[1-9][0-9]{0,17})(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?|nan|NaN|-?inf")
"""A number as a program writes it."""
_SHOWN = 60

_CALLED = re.compile(
    r"(?:(?:np|numpy|torch)\.)?(?:array|tensor|list|tuple|set|frozenset|bool_?|u?int[0-9]+|float[0-9]+|str_)"
)
_LIST = re.compile(rf"\s*(\[.*\]|\(.*\)|\{{.*\}}|{_CALLED.pattern}\(.*\))\s*", re.DOTALL)
_ESCAPE = r"\\(?:[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
_TOKEN = re.compile(
    rf"""\s*('(?:[^'\\\n]|{_ESCAPE})*'|"(?:[^"\\\n]|{_ESCAPE})*"|[\[\](){{}},]|[^\s,\[\](){{}}'"]+)\s*"""
)
NO_LIST = 'is not a list as JSON has it, ["a", "b"] or [1, 2]'
"""The phrase for what looks like a list and cannot be read."""


def looks_like_list(text: str) -> bool:
    """Whether the text has the brackets of a list."""
    return _LIST.fullmatch(text) is not None


def typed(cells: Sequence[str]) -> Sequence[Any]:
    """What the cells of a CSV column hold: integers, numbers or lists, all of them; else text as it is.

    Whole numbers that float64 cannot hold, among others that are not whole, are text: ids would become equal.

    Raises:
        ValueOfRowError: one is empty where the others are numbers, or no list where the others are.
    """
    filled = [cell for cell in cells if cell]
    parse: Any = None
    if filled and all(map(_WHOLE.fullmatch, filled)):
        parse = int
    elif filled and all(map(NUMBER.fullmatch, filled)) and all(map(_fits_float, filled)):
        parse = float
    elif filled and all(map(_LIST.fullmatch, filled)) and any(map(is_list, filled)):
        parse = parse_list
    if parse is None:
        return cells
    values = []
    for row, cell in enumerate(cells):
        try:
            values.append(parse(cell))
        except ValueError as error:
            what = f"{shown(cell)} {error}" if cell else "is empty (a list of nothing is [])"
            like = next(other for other in filled if parse is not parse_list or is_list(other))
            raise ValueOfRowError(row, f"{what}; other rows look like {shown(like)}") from None
    return values


def _fits_float(cell: str) -> bool:
    return _WHOLE.fullmatch(cell) is None or int(float(cell)) == int(cell)


def is_list(cell: str) -> bool:
    """Whether it is one that can be read, or one that numpy has cut short, which must not pass for text."""
    try:
        parse_list(cell)
    except _CutShortError:
        return True
    except ValueError:
        return False
    return True


class _CutShortError(ValueError):
    """numpy prints three dots for most of a long array."""


def parse_list(cell: str) -> list[Any]:
    """The list that a text holds, as JSON, Python or numpy writes it; tuples and sets are lists, too.

        ["cat", "dog"]  ['cat', 'dog']  ['cat' 'dog']  ('cat', 'dog')  {'cat'}  [np.str_('cat')]
        [1, 0, 0]       [1. 0. 0.]      [ True False]  array([1, 0])   tensor([1, 0])

    Raises:
        ValueError: it holds none; a phrase.
    """
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        value = _printed(cell)
    if not isinstance(value, list):
        raise ValueError(NO_LIST)
    return value


def _printed(cell: str) -> Any:
    """The value that Python or numpy prints so."""
    tokens: list[str] = []
    at = 0
    while at < len(cell):
        token = _TOKEN.match(cell, at)
        if token is None:
            raise ValueError(NO_LIST)
        ends_value = bool(tokens) and tokens[-1][-1] not in "[({,="
        is_call = token[1] == "(" and bool(tokens) and _CALLED.fullmatch(tokens[-1]) is not None
        if ends_value and token[1] not in "])}," and not is_call:
            tokens.append(",")  # numpy writes none: [1. 0.], ['a' 'b']
        tokens.append(token[1])
        at = token.end()
    try:
        return _evaluate(ast.parse("".join(tokens), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(NO_LIST) from None


def _evaluate(node: ast.expr) -> Any:
    """The value of a literal; that of a call, as in array([1, 0], dtype=int8), is its first argument."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_evaluate(part) for part in node.elts]
    if isinstance(node, ast.Call) and _CALLED.fullmatch(ast.unparse(node.func)):
        return _evaluate(node.args[0]) if node.args else []
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.True_", "np.False_"):
        return node.attr == "True_"
    if isinstance(node, ast.Constant) and node.value is ...:
        raise _CutShortError("was cut short by numpy ('...'); write the whole list, as JSON")
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    raise ValueError(NO_LIST)


def shown(value: Any) -> str:
    """The value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
