"""Docstrings, names and words are those of the field; a reviewer reads what no list can hold."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.command import ROOT

PACKAGES = ("precache", "loaders", "bench", "tests")
DOCUMENTS = [*ROOT.glob("*.md"), *(path for package in PACKAGES for path in (ROOT / package).rglob("*.md"))]

FIRST_WORDS = """
after against all also always and another any are as at be because before being between both but by did do
does else every for from had has have her his how if in instead into is it its let like more most neither
never no none nor not nothing of on one only or other otherwise over same she since so some something such
than that their then there these they this those through to too under unless until upon us was we were what
whatever when where which while who whoever whom whose why with without you your
"""
"""Words that begin no docstring: it begins with a verb, a noun, an article, a number or 'Whether'."""
NAMES = """
asked each found gone held how kept lent of one ours said steadily taken theirs there told unseen what
"""
"""Names that no function, class, argument or variable has: they do not say what it holds."""
WORDS = "arm arms binds hereby hitherto mend mended mends thereof whence wherein"
"""Words that no document, docstring or message has; with NAMES they are at most 40."""
MOST_TEST_NAME = 70


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def where(path: Path, line: int, word: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {word}"


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings, those below constants and fields too."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        owner = None if isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)) else node
        for above, statement in pairwise([owner, *body]):
            described = above is node or isinstance(above, (ast.Assign, ast.AnnAssign))
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if described:
                    yield statement.lineno, text


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
def test_docstrings_begin_with_a_verb_or_a_noun(package: str) -> None:
    wrong = []
    for path in files(package):
        for line, text in docstrings(ast.parse(path.read_text())):
            word = text.split()[0].strip("`'\".,:;()")
            if word.lower() in FIRST_WORDS.split():
                wrong.append(where(path, line, word))
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_names_say_what_they_stand_for(package: str) -> None:
    wrong = []
    for path in files(package):
        for line, name in names(ast.parse(path.read_text())):
            if name.strip("_") in NAMES.split():
                wrong.append(where(path, line, name))
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_class_name_is_used_once_in_a_package(package: str) -> None:
    places: dict[str, list[str]] = {}
    for path in files(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(where(path, node.lineno, node.name))
    assert [place for place in places.values() if len(place) > 1] == []


def test_no_text_has_a_word_that_only_this_project_uses() -> None:
    assert len(WORDS.split()) + len(NAMES.split()) <= 40
    pattern = re.compile(rf"\b({'|'.join(WORDS.split())})\b", re.IGNORECASE)
    wrong = []
    for path in [file for package in PACKAGES for file in files(package)] + DOCUMENTS:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if path != Path(__file__) and (match := pattern.search(line)):
                wrong.append(where(path, number, match[0]))
    assert wrong == []


def test_names_of_tests_have_at_most_70_characters() -> None:
    wrong = []
    for path in files("tests"):
        for line, name in names(ast.parse(path.read_text())):
            if name.startswith("test_") and len(name) > MOST_TEST_NAME:
                wrong.append(where(path, line, name))
    assert wrong == []
