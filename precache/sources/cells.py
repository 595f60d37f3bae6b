"""Values of text cells, as in a CSV: whole numbers, other numbers, lists, or the text itself.

Lists are read as JSON, Python and NumPy write them, see `parse_list`.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from precache.dataset.columns import ValueOfRowError

# Only what a program writes is a number: 007 and +49 are names, and so are 19 digits, which may not fit into
# 64 bits.
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
NUMBER = re.compile(r"-?((0|[1-9][0-9]{0,17})(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?|nan|NaN|-?inf")
"""Pattern of a number as a program writes it."""
_MAX_LENGTH = 60  # characters of a value in a message

_CONSTRUCTOR = re.compile(
    r"(?:(?:np|numpy|torch)\.)?(?:array|tensor|list|tuple|set|frozenset|bool_?|u?int[0-9]+|float[0-9]+|str_)"
)
_LIST = re.compile(rf"\s*(\[.*\]|\(.*\)|\{{.*\}}|{_CONSTRUCTOR.pattern}\(.*\))\s*", re.DOTALL)
_ESCAPE = r"\\(?:[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
_TOKEN = re.compile(
    rf"""\s*('(?:[^'\\\n]|{_ESCAPE})*'|"(?:[^"\\\n]|{_ESCAPE})*"|[\[\](){{}},]|[^\s,\[\](){{}}'"]+)\s*"""
)
NOT_A_LIST = 'is not a list as JSON has it, ["a", "b"] or [1, 2]'
"""Phrase for a text that looks like a list and cannot be read as one."""


def looks_like_list(text: str) -> bool:
    """Return whether the text has the brackets of a list."""
    return _LIST.fullmatch(text) is not None


def parse_cells(cells: Sequence[str]) -> Sequence[Any]:
    """Parse the cells of a CSV column, if all are integers, numbers or lists; else return them as they are.

    Whole numbers beside fractions stay text if float64 cannot hold them: two ids would become equal.

    Raises:
        ValueOfRowError: a cell is empty where the others are numbers, or no list where the others are.
    """
    filled = [cell for cell in cells if cell]
    parse: Any = None
    if filled and all(_WHOLE.fullmatch(cell) for cell in filled):
        parse = int
    elif filled and all(NUMBER.fullmatch(cell) and _fits_float(cell) for cell in filled):
        parse = float
    elif filled and all(map(looks_like_list, filled)) and any(map(is_list, filled)):
        parse = parse_list
    if parse is None:
        return cells
    values = []
    for row, cell in enumerate(cells):
        try:
            values.append(parse(cell))
        except ValueError as error:
            reason = f"{short_repr(cell)} {error}" if cell else "is empty (a list of nothing is [])"
            example = next(other for other in filled if parse is not parse_list or is_list(other))
            raise ValueOfRowError(row, f"{reason}; other rows look like {short_repr(example)}") from None
    return values


def _fits_float(cell: str) -> bool:
    """Return whether float64 holds the number in a cell exactly, if it is a whole number."""
    return _WHOLE.fullmatch(cell) is None or int(float(cell)) == int(cell)


def is_list(cell: str) -> bool:
    """Return whether the cell is a list, or one that NumPy cut short, which must not pass for text."""
    try:
        parse_list(cell)
    except _CutShortError:
        return True
    except ValueError:
        return False
    return True


class _CutShortError(ValueError):
    """NumPy printed three dots for the middle of a long array."""


def parse_list(cell: str) -> list[Any]:
    """Return the list in a text, as JSON, Python or NumPy writes it; tuples and sets become lists, too.

        ["cat", "dog"]  ['cat', 'dog']  ['cat' 'dog']  ('cat', 'dog')  {'cat'}  [np.str_('cat')]
        [1, 0, 0]       [1. 0. 0.]      [ True False]  array([1, 0])   tensor([1, 0])

    Raises:
        ValueError: the text is no list; the message is a phrase.
    """
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        value = _parse_printed(cell)
    if not isinstance(value, list):
        raise ValueError(NOT_A_LIST)
    return value


def _parse_printed(cell: str) -> Any:
    """Return the value that Python or NumPy has printed as this text."""
    tokens: list[str] = []
    position = 0
    while position < len(cell):
        token = _TOKEN.match(cell, position)
        if token is None:
            raise ValueError(NOT_A_LIST)
        follows_value = bool(tokens) and tokens[-1][-1] not in "[({,="
        is_call = token[1] == "(" and bool(tokens) and _CONSTRUCTOR.fullmatch(tokens[-1]) is not None
        if follows_value and token[1] not in "])}," and not is_call:
            tokens.append(",")  # NumPy writes none between values: [1. 0.], ['a' 'b']
        tokens.append(token[1])
        position = token.end()
    try:
        return _evaluate(ast.parse("".join(tokens), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(NOT_A_LIST) from None


def _evaluate(node: ast.expr) -> Any:
    """Return the value of a literal, or the first argument of a call such as array([1, 0], dtype=int8)."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_evaluate(part) for part in node.elts]
    if isinstance(node, ast.Call) and _CONSTRUCTOR.fullmatch(ast.unparse(node.func)):
        return _evaluate(node.args[0]) if node.args else []
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.True_", "np.False_"):
        return node.attr == "True_"
    if isinstance(node, ast.Constant) and node.value is ...:
        raise _CutShortError("was cut short by numpy ('...'); write the whole list, as JSON")
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    raise ValueError(NOT_A_LIST)


def short_repr(value: Any) -> str:
    """Return the `repr` of a value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
