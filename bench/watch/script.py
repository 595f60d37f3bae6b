"""Search and change of calls in the text of a user's script; everything else stays as it was written."""

import ast
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

DATALOADER = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")
"""Parameters of torch's DataLoader in the order of positional arguments."""
IMAGE_FOLDER = ("root", "transform", "target_transform", "loader", "is_valid_file")
"""Parameters of torchvision's ImageFolder in the order of positional arguments."""
_ALIASES = ("loaders", "image_loaders", "precache_loaders")
"""Names for the module `loaders`, of which the script gets the first that it does not have."""
_NAMES = ("train_loader", "train_batches", "batches_of_train")
"""Names for a loader, of which the script gets the first that it does not have."""
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Lines of a file, and the lines to write in their place.

    Attributes:
        path: path of the file.
        line: number of the first old line, from 1; without old lines, the new lines come before this one.
        old, new: whole lines, without line ends.
    """

    path: str
    line: int
    old: tuple[str, ...]
    new: tuple[str, ...]


class Script:
    """Text and syntax tree of a script.

    Attributes:
        path: path of the file.
        text, content: content of the file as text and as bytes; Python counts columns in bytes.
        line_starts: byte at which each line begins.
        tree: syntax tree.

    Raises:
        OSError, SyntaxError, UnicodeDecodeError: the file cannot be read as a script.
    """

    def __init__(self, path: str) -> None:
        with open(path, encoding="utf-8", newline="") as file:
            self.path, self.text = path, file.read()
        self.content = self.text.encode()
        self.line_starts = [0]
        for line in self.content.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.tree = ast.parse(self.text)

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def find_call(self, position: Mapping[str, Any]) -> ast.Call | None:
        """Find the call at a position; None: there is none.

        Args:
            position: position by `bench.watch.describe`; without columns, the line alone is compared.
        """
        calls = self.calls
        if position["column"] is not None:
            wanted = tuple(position[name] for name in ("line", "column", "end_line", "end_column"))
            calls = [call for call in calls if _position(call) == wanted]
        else:
            calls = [call for call in calls if call.lineno == position["line"]]
        return calls[0] if calls else None

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Calls of the script."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]

    def imported_names(self) -> set[str]:
        """Names that may be modules beside the script: params, parse of `from my.params import parse`."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.rpartition(".")[2] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
                names.add((node.module or "").rpartition(".")[2])
        return names

    def find_class(self, name: str) -> ast.ClassDef | None:
        """Find the class of a name; None: there is none."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        return None

    def text_of(self, node: ast.AST) -> str:
        """Text of a node, as it is written."""
        begin, end = self.span(node)
        return self.content[begin:end].decode()

    def option_for(self, value: ast.expr | None) -> str | None:
        """Find the option, like `--workers`, whose value is the expression `args.workers`; None: none is."""
        if not isinstance(value, ast.Attribute) or not isinstance(value.value, ast.Name):
            return None
        for call in self.calls:
            if function_name(call) != "add_argument":
                continue
            flags = [flag.value for flag in call.args if isinstance(flag, ast.Constant)]
            names = [flag for flag in flags if isinstance(flag, str) and flag.startswith("--")]
            given = argument(call, "dest", ())
            dest = given.value if isinstance(given, ast.Constant) else "".join(names[:1]).lstrip("-")
            if names and str(dest).replace("-", "_") == value.attr:
                return names[0]
        return None

    def unpacked_value(self, call: ast.Call, name: str) -> ast.expr | None:
        """Find the expression that `**options` of a call give for an argument.

        Returns:
            The expression; None unless the script sets it in exactly one place.
        """
        dicts = {
            keyword.value.id
            for keyword in call.keywords
            if keyword.arg is None and isinstance(keyword.value, ast.Name)
        }
        updates = {f"{options}.update" for options in dicts}
        values: list[ast.expr] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in updates:
                return None
            if not isinstance(node, ast.Assign):
                continue
            if not dicts & {ast.unparse(target) for target in node.targets}:
                continue
            if isinstance(node.value, ast.Call) and function_name(node.value) == "dict":
                values += [keyword.value for keyword in node.value.keywords if keyword.arg == name]
            elif isinstance(node.value, ast.Dict):
                keys = [key.value if isinstance(key, ast.Constant) else None for key in node.value.keys]
                values += [value for key, value in zip(keys, node.value.values, strict=True) if key == name]
        return values[0] if len(values) == 1 else None

    def is_shared(self, call: ast.Call, dataset: ast.expr | None) -> bool:
        """Whether a call is made for several datasets.

        It is in a comprehension, or in a function that gets the dataset and is called more than once.
        """
        for node in self._ancestors(call):
            if isinstance(node, _COMPREHENSIONS):
                return True
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                parameters = {child.arg for child in ast.walk(node.args) if isinstance(child, ast.arg)}
                is_parameter = isinstance(dataset, ast.Name) and dataset.id in parameters
                calls = [other for other in self.calls if function_name(other) == node.name]
                return is_parameter and len(calls) > 1
        return False

    def is_repeated(self, call: ast.Call) -> bool:
        """Whether the call is within a loop."""
        return bool(self._loops(call))

    def loop_to_leave(self, call: ast.Call) -> ast.stmt | None:
        """Find the outermost loop around a call, before which the call can stand as well.

        Returns:
            The loop; None: the call is in no loop, or needs a variable that the loop sets.
        """
        names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
        loops = self._loops(call)
        for loop in loops:
            set_in_it = {
                node.id
                for node in ast.walk(loop)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            if names & set_in_it:
                return None
        return loops[-1] if loops else None

    def module_name(self) -> tuple[str, bool]:
        """Name for the module `loaders` in the script, and whether it still has to be imported."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import) and any(_imports_loaders(alias) for alias in node.names):
                return "loaders", False
        return next(name for name in _ALIASES if name not in self._names), True

    def free_name(self) -> str:
        """Name for a loader that the script does not have yet."""
        return next(name for name in _NAMES if name not in self._names)

    @cached_property
    def _names(self) -> set[str]:
        """Names of variables, parameters, functions, classes and modules of the script."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
        return names

    def _ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the innermost first."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def _loops(self, call: ast.Call) -> list[ast.stmt]:
        """List the loops of the same function whose body a call is in, the innermost first."""
        loops: list[ast.stmt] = []
        child: ast.AST = call
        for node in self._ancestors(call):
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                break
            head = (node.iter, node.target) if isinstance(node, (ast.For, ast.AsyncFor)) else ()
            if isinstance(node, _LOOPS) and child not in head:  # the head of a for loop is evaluated once
                loops.append(node)
            child = node
        return loops

    def span(self, node: Any) -> tuple[int, int]:
        """Bytes at which a node begins and ends."""
        begin = self.line_starts[node.lineno - 1] + node.col_offset
        return begin, self.line_starts[node.end_lineno - 1] + node.end_col_offset


class Changes:
    """Collected changes of one script, which become edits of whole lines."""

    def __init__(self, script: Script) -> None:
        self._script = script
        # (first byte, byte behind the last, new text) of each part of the script that is replaced
        self._parts: list[tuple[int, int, str]] = []

    def replace(self, node: ast.AST, text: str) -> None:
        """Replace a node by a text."""
        begin, end = self._script.span(node)
        self._parts.append((begin, end, text))

    def insert_before(self, statement: ast.stmt, line: str) -> None:
        """Insert a line before a statement, with the same indentation."""
        decorators = getattr(statement, "decorator_list", [])
        start = self._script.line_starts[min(node.lineno for node in [statement, *decorators]) - 1]
        indent = self._script.content[start : start + statement.col_offset].decode()
        self._parts.append((start, start, f"{indent}{line}\n"))

    def import_loaders(self) -> str:
        """Import `loaders` in the script, unless it does so itself, and return its name there."""
        name, is_missing = self._script.module_name()
        if is_missing:
            line = "import loaders" if name == "loaders" else f"import loaders as {name}"
            body = self._script.tree.body
            statements = [node for node in body if not _is_heading(node)] or body
            self.insert_before(statements[0], line)
        return name

    def set_arguments(self, call: ast.Call, values: Mapping[str, str], positions: tuple[str, ...]) -> None:
        """Set arguments of a call.

        Args:
            call: call in the script; several `**options` in it have to follow each other.
            values: text of the value of each argument, by name.
            positions: names of the function's positional arguments, in order.
        """
        unpacked = [keyword for keyword in call.keywords if keyword.arg is None]
        added = []
        for name, text in values.items():
            given = argument(call, name, positions) or self._script.unpacked_value(call, name)
            if given is not None:
                self.replace(given, text)
            else:
                added.append((name, text))
        if not added:
            return
        if unpacked:  # they may hold the argument already, so they are merged with it in one dict
            options = [keyword.value for keyword in unpacked]
            merged = [f"**{self._script.text_of(value)}" for value in options]
            merged += [f'"{name}": {text}' for name, text in added]
            begin, end = self._script.span(options[0])[0], self._script.span(options[-1])[1]
            self._parts.append((begin, end, f"{{{', '.join(merged)}}}"))
            return
        more = ", ".join(f"{name}={text}" for name, text in added)
        last = max([*call.args, *(keyword.value for keyword in call.keywords)], key=_end, default=None)
        if last is None:
            end = self._script.span(call)[1] - 1
            self._parts.append((end, end, more))
        else:
            end = self._script.span(last)[1]
            end += _closing_bytes(self._script.content[end : self._script.span(call)[1]])
            self._parts.append((end, end, f", {more}"))

    def move_before(self, loop: ast.stmt, call: ast.Call, name: str) -> None:
        """Move a call, with the changes in it, before a loop, and assign it to a name, which replaces it."""
        begin, end = self._script.span(call)
        inside = [part for part in self._parts if begin <= part[0] and part[1] <= end]
        self._parts = [part for part in self._parts if part not in inside]
        moved = self._script.content[begin:end]
        for part_begin, part_end, text in sorted(inside, key=lambda part: part[:2], reverse=True):
            moved = moved[: part_begin - begin] + text.encode() + moved[part_end - begin :]
        self.insert_before(loop, f"{name} = {ast.unparse(ast.parse(moved.decode().strip()))}")
        self.replace(call, name)

    def edits(self) -> tuple[Edit, ...]:
        """Make the edits of the script's lines; SyntaxError where the result cannot be parsed."""
        text = self._script.content
        for begin, end, new in sorted(self._parts, key=lambda part: part[:2], reverse=True):
            text = text[:begin] + new.encode() + text[end:]
        ast.parse(text)
        before, after = self._script.text.splitlines(), text.decode().splitlines()
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        return tuple(
            Edit(
                path=self._script.path,
                line=old_begin + 1,
                old=tuple(before[old_begin:old_end]),
                new=tuple(after[new_begin:new_end]),
            )
            for kind, old_begin, old_end, new_begin, new_end in matcher.get_opcodes()
            if kind != "equal"
        )


def apply(edits: tuple[Edit, ...], text: str) -> str:
    """Apply edits to the text of a file, and return the new text."""
    lines = text.splitlines()
    for edit in sorted(edits, key=lambda edit: edit.line, reverse=True):
        lines[edit.line - 1 : edit.line - 1 + len(edit.old)] = edit.new
    return "".join(f"{line}\n" for line in lines)


def function_name(call: ast.Call) -> str:
    """Last name of the function that is called: DataLoader of `torch.utils.data.DataLoader(...)`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def argument(call: ast.Call, name: str, positions: tuple[str, ...]) -> ast.expr | None:
    """Find the expression that a call gives for an argument, by keyword or by position.

    Args:
        call: call in a script.
        name: name of the argument.
        positions: names of the function's positional arguments, in order.

    Returns:
        The expression; None where the call gives none, or hides it in `*values`.
    """
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name not in positions or len(call.args) <= positions.index(name):
        return None
    before = call.args[: positions.index(name) + 1]
    return None if any(isinstance(value, ast.Starred) for value in before) else before[-1]


def has_plain_positions(call: ast.Call) -> bool:
    """Whether no positional arguments are hidden in `*values`."""
    return not any(isinstance(value, ast.Starred) for value in call.args)


def _position(node: ast.expr) -> tuple[int, int, int | None, int | None]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _closing_bytes(rest: bytes) -> int:
    """Count the bytes from the end of an argument to the end of the parentheses around it.

    Args:
        rest: text from the end of the last argument to the end of the call, with the call's parenthesis.
    """
    count = rest.count(b")") - 1
    if count < 1 or b"#" in rest:
        return 0
    position = 0
    for _ in range(count):
        position = rest.index(b")", position) + 1
    return position


def _imports_loaders(alias: ast.alias) -> bool:
    return alias.name == "loaders" and alias.asname is None


def _is_heading(node: ast.stmt) -> bool:
    """Whether a statement has to come first: the docstring, or an import from `__future__`."""
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
