"""Finds a call in the text of somebody's script and changes it, so that the rest stays as it was written."""

import ast
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

DATALOADER = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")
"""Parameters of torch's DataLoader that are given by position."""
IMAGE_FOLDER = ("root", "transform", "target_transform", "loader", "is_valid_file")
_ALIASES = ("loaders", "image_loaders", "precache_loaders")
_NAMES = ("train_loader", "train_batches", "batches_of_train")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Lines of a file, and those to write in their place.

    Attributes:
        path: of the file.
        line: the first one, from 1; where there are no old ones, the new ones come before it.
        old, new: whole lines, without their ends.
    """

    path: str
    line: int
    old: tuple[str, ...]
    new: tuple[str, ...]


class Script:
    """The text of a script, with its calls.

    Attributes:
        path: of the file.
        text, content: what it holds, decoded and in bytes, in which columns are counted.
        line_starts: where each line begins, in bytes.
        tree: what Python makes of it.

    Raises:
        OSError, SyntaxError, UnicodeDecodeError: the file is no script that can be read.
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

    def find_call(self, place: Mapping[str, Any]) -> ast.Call | None:
        """The call at a place, see `bench.watch.describe`; by the line alone where it has no columns."""
        calls = self.calls
        if place["column"] is not None:
            wanted = tuple(place[name] for name in ("line", "column", "end_line", "end_column"))
            calls = [call for call in calls if _position(call) == wanted]
        else:
            calls = [call for call in calls if call.lineno == place["line"]]
        return calls[0] if calls else None

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call of the script."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]

    def imported_names(self) -> set[str]:
        """The last names of the modules that it imports: params of `from my.params import parse`."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.rpartition(".")[2] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {alias.name for alias in node.names}
                found.add((node.module or "").rpartition(".")[2])
        return found

    def find_class(self, name: str) -> ast.ClassDef | None:
        """The class of this name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        return None

    def text_of(self, node: ast.AST) -> str:
        """A part of the script as it is written."""
        begin, end = self.span(node)
        return self.content[begin:end].decode()

    def option_for(self, value: ast.expr | None) -> str | None:
        """The option of the command line, `--workers`, that gives `args.workers`; None: there is none."""
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
        """What `**options` of the call give as `name`, where the script says it in one place alone."""
        dicts = {
            keyword.value.id
            for keyword in call.keywords
            if keyword.arg is None and isinstance(keyword.value, ast.Name)
        }
        found: list[ast.expr] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"{each}.update" for each in dicts}:
                return None
            if not isinstance(node, ast.Assign) or not dicts & {ast.unparse(each) for each in node.targets}:
                continue
            if isinstance(node.value, ast.Call) and function_name(node.value) == "dict":
                found += [keyword.value for keyword in node.value.keywords if keyword.arg == name]
            elif isinstance(node.value, ast.Dict):
                keys = [key.value if isinstance(key, ast.Constant) else None for key in node.value.keys]
                found += [value for key, value in zip(keys, node.value.values, strict=True) if key == name]
        return found[0] if len(found) == 1 else None

    def is_shared(self, call: ast.Call, dataset: ast.expr | None) -> bool:
        """Whether one call is for several datasets: in a comprehension, or a function that is given them."""
        for node in self._above(call):
            if isinstance(node, _COMPREHENSIONS):
                return True
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                parameters = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
                is_given = isinstance(dataset, ast.Name) and dataset.id in parameters
                return is_given and sum(function_name(one) == node.name for one in self.calls) > 1
        return False

    def is_repeated(self, call: ast.Call) -> bool:
        """Whether the call is within a loop."""
        return bool(self._loops(call))

    def loop_to_leave(self, call: ast.Call) -> ast.stmt | None:
        """The outermost loop before which the call can be made as well; None: it needs what a loop sets."""
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
        """What to call the module `loaders` in the script, and whether it has to be imported."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import) and any(_imports_loaders(alias) for alias in node.names):
                return "loaders", False
        return next(name for name in _ALIASES if name not in self._names), True

    def free_name(self) -> str:
        """A name for a loader, that the script does not have."""
        return next(name for name in _NAMES if name not in self._names)

    @cached_property
    def _names(self) -> set[str]:
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
        return found

    def _above(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self._parents:
            node = self._parents[node]
            yield node

    def _loops(self, call: ast.Call) -> list[ast.stmt]:
        """Loops of the same function whose body the call is in, the innermost first."""
        found: list[ast.stmt] = []
        child: ast.AST = call
        for node in self._above(call):
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                break
            once = (node.iter, node.target) if isinstance(node, (ast.For, ast.AsyncFor)) else ()
            if isinstance(node, _LOOPS) and child not in once:
                found.append(node)
            child = node
        return found

    def span(self, node: Any) -> tuple[int, int]:
        """Where a part begins and ends, in bytes."""
        begin = self.line_starts[node.lineno - 1] + node.col_offset
        return begin, self.line_starts[node.end_lineno - 1] + node.end_col_offset


class Changes:
    """Changes of one script, which become edits of whole lines."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._parts: list[tuple[int, int, str]] = []

    def replace(self, node: ast.AST, text: str) -> None:
        """Write `text` in the place of a part."""
        begin, end = self._script.span(node)
        self._parts.append((begin, end, text))

    def insert_before(self, statement: ast.stmt, line: str) -> None:
        """Write a line before that of a statement, and as far to the right."""
        decorators = getattr(statement, "decorator_list", [])
        start = self._script.line_starts[min(node.lineno for node in [statement, *decorators]) - 1]
        indent = self._script.content[start : start + statement.col_offset].decode()
        self._parts.append((start, start, f"{indent}{line}\n"))

    def import_loaders(self) -> str:
        """Import `loaders` in the script, and return the name that it has there."""
        name, is_missing = self._script.module_name()
        if is_missing:
            line = "import loaders" if name == "loaders" else f"import loaders as {name}"
            body = self._script.tree.body
            after = [node for node in body if not _is_heading(node)] or body
            self.insert_before(after[0], line)
        return name

    def set_arguments(self, call: ast.Call, values: Mapping[str, str], positions: tuple[str, ...]) -> None:
        """Give the call these arguments, each a name and the text of its value.

        What several `**options` give is put together in one, so they have to follow each other.
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
        if unpacked:  # which may hold it
            options = [keyword.value for keyword in unpacked]
            merged = [f"**{self._script.text_of(each)}" for each in options]
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
            end += _closing(self._script.content[end : self._script.span(call)[1]])
            self._parts.append((end, end, f", {more}"))

    def move_before(self, loop: ast.stmt, call: ast.Call, name: str) -> None:
        """Make the call, with the changes in it, in a line of its own before a loop, and call it `name`."""
        begin, end = self._script.span(call)
        inside = [part for part in self._parts if begin <= part[0] and part[1] <= end]
        self._parts = [part for part in self._parts if part not in inside]
        moved = self._script.content[begin:end]
        for first, last, text in sorted(inside, key=lambda part: part[:2], reverse=True):
            moved = moved[: first - begin] + text.encode() + moved[last - begin :]
        self.insert_before(loop, f"{name} = {ast.unparse(ast.parse(moved.decode().strip()))}")
        self.replace(call, name)

    def edits(self) -> tuple[Edit, ...]:
        """What the changes make of the script's lines; SyntaxError where that is no script any more."""
        text = self._script.content
        for begin, end, new in sorted(self._parts, key=lambda part: part[:2], reverse=True):
            text = text[:begin] + new.encode() + text[end:]
        ast.parse(text)
        before, after = self._script.text.splitlines(), text.decode().splitlines()
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        return tuple(
            Edit(path=self._script.path, line=a + 1, old=tuple(before[a:b]), new=tuple(after[c:d]))
            for kind, a, b, c, d in matcher.get_opcodes()
            if kind != "equal"
        )


def apply(edits: tuple[Edit, ...], text: str) -> str:
    """The text of a file with the edits in it."""
    lines = text.splitlines()
    for edit in sorted(edits, key=lambda edit: edit.line, reverse=True):
        lines[edit.line - 1 : edit.line - 1 + len(edit.old)] = edit.new
    return "".join(f"{line}\n" for line in lines)


def function_name(call: ast.Call) -> str:
    """The last name of the function that is called: DataLoader of `torch.utils.data.DataLoader(...)`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def argument(call: ast.Call, name: str, positions: tuple[str, ...]) -> ast.expr | None:
    """What the call gives as `name`, by keyword or by position; None where it does not, or not openly."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name not in positions or len(call.args) <= positions.index(name):
        return None
    before = call.args[: positions.index(name) + 1]
    return None if any(isinstance(value, ast.Starred) for value in before) else before[-1]


def is_open(call: ast.Call) -> bool:
    """Whether no arguments by position are hidden in `*values`."""
    return not any(isinstance(value, ast.Starred) for value in call.args)


def _position(node: ast.expr) -> tuple[int, int, int | None, int | None]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _closing(rest: bytes) -> int:
    """How many bytes of the parentheses that an argument is written in follow it; the last is the call's."""
    count = rest.count(b")") - 1
    if count < 1 or b"#" in rest:
        return 0
    place = 0
    for _ in range(count):
        place = rest.index(b")", place) + 1
    return place


def _imports_loaders(alias: ast.alias) -> bool:
    return alias.name == "loaders" and alias.asname is None


def _is_heading(node: ast.stmt) -> bool:
    """Whether it has to come first: the docstring, and imports of the future."""
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
