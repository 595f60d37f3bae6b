"""Names say what they hold, and a class name is used once in a package."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import ROOT

PACKAGES = ("precache", "loaders", "bench", "tests")

NAMES = """
asked each found gone held how kept lent of one ours said steadily taken theirs there told unseen what
"""
"""Names that no function, class, argument or variable has: they do not say what it holds."""
MAX_TEST_NAME = 70


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def where(path: Path, line: int, word: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {word}"


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each function, class, argument and variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name


@pytest.mark.parametrize("package", PACKAGES)
def test_names_say_what_they_stand_for(package: str) -> None:
    wrong = []
    for path in files(package):
        for line, name in names(ast.parse(path.read_text())):
            if name.strip("_") in NAMES.split():
                wrong.append(where(path, line, name))
    assert wrong == []


@pytest.mark.parametrize("package", ["precache", "bench"])
def test_only_loaders_have_places_which_are_those_of_an_epoch(package: str) -> None:
    wrong = []
    for path in files(package):
        for line, name in names(ast.parse(path.read_text())):
            if {"place", "places"} & set(name.split("_")):
                wrong.append(where(path, line, name))
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_class_name_is_used_once_in_a_package(package: str) -> None:
    lines: dict[str, list[str]] = {}
    for path in files(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                lines.setdefault(node.name, []).append(where(path, node.lineno, node.name))
    assert [line for line in lines.values() if len(line) > 1] == []


def test_every_name_of_a_module_is_used_by_the_product() -> None:
    paths = [path for package in PACKAGES[:-1] for path in files(package)]
    words = Counter(word for path in paths for word in re.findall(r"\w+", path.read_text()))
    wrong = []
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node)
            name = getattr(target, "id", getattr(target, "name", "__"))
            is_command = getattr(node, "decorator_list", [])
            if words[name] < 2 and not name.endswith("__") and not is_command:
                wrong.append(where(path, node.lineno, name))
    assert wrong == []


def test_names_of_tests_have_at_most_70_characters() -> None:
    wrong = []
    for path in files("tests"):
        for line, name in names(ast.parse(path.read_text())):
            if name.startswith("test_") and len(name) > MAX_TEST_NAME:
                wrong.append(where(path, line, name))
    assert wrong == []
