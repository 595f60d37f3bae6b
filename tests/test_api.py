"""The API is what `__all__` names: the page lists it; guides, examples and errors use nothing else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import loaders
import loaders.examples
import precache
from tests.command import ROOT

API = {module.__name__: set(module.__all__) for module in (precache, loaders, loaders.examples)}
GUIDES = ("README.md", "precache/README.md", "loaders/README.md", "bench/README.md")
SCRIPTS = ("train", "train_accelerate", "train_lightning", "timm_adapter")
"""Examples that are made to be copied."""


def is_inner(module: str, name: str) -> bool:
    """Return whether code that takes this name from this module needs more of the packages than the API."""
    package, _, rest = module.partition(".")
    if package not in API or f"{module}.{name}" in API:
        return False
    if rest.startswith("examples."):
        module, name = "loaders.examples", rest.removeprefix("examples.")
    return name not in API.get(module, ())


def names_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield module and name for all that Python code takes from the packages."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


def test_the_page_lists_the_api_a_line_for_each_name() -> None:
    sections = re.split(r"^## `([\w.]+)`.*$", (ROOT / "API.md").read_text(), flags=re.MULTILINE)[1:]
    listed = {
        package: re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
        for package, text in zip(sections[::2], sections[1::2], strict=True)
    }
    assert {package: sorted(names) for package, names in listed.items()} == {
        package: sorted(names) for package, names in API.items()
    }


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_use_the_api_alone(guide: str) -> None:
    text = (ROOT / guide).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    used = {name for block in blocks for name in names_in(block)}
    prose = re.sub(r"^```.*?^```$|\]\([^)]*\)", "", text, flags=re.MULTILINE | re.DOTALL)
    used |= set(re.findall(r"`[^`\n]*?(?<![/\w])(precache|loaders)\.([A-Za-z]\w*)(?![\w./])", prose))
    used |= set(re.findall(r"`(loaders\.examples)\.(\w+)", prose))
    assert [name for name in used if is_inner(*name) and name[1] not in SCRIPTS] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_examples_to_copy_import_the_api_alone(script: str) -> None:
    used = set(names_in((ROOT / f"loaders/examples/{script}.py").read_text()))
    assert [name for name in used if is_inner(*name)] == []


@pytest.mark.parametrize("package", ["precache", "loaders", "bench"])
def test_errors_name_the_api_alone(package: str) -> None:
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for line, text in messages(path):
            for module, name in re.findall(r"\b(precache|loaders)\.([A-Za-z]\w*)", text):
                if is_inner(module, name):
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {module}.{name}")
    assert wrong == []


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the strings in errors that a file makes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).lower().endswith("error"):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value
