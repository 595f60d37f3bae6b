"""The packages depend on one another in one direction; read from the code's own imports."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT


def imports(path: Path) -> set[str]:
    """Dotted names that the file imports when it runs, `from a import b` as 'a.b'."""
    tree = ast.parse(path.read_text())
    only_for_types: set[ast.AST] = set()
    for statement in tree.body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            only_for_types.update(ast.walk(statement))
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in only_for_types:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def files(package: str) -> list[Path]:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    return paths


FLOORS = {
    "precache": "errors | packages reporting | storage | pictures | formats page | recipe | dataset"
    " | sources | plan engines | example_data sharing | conversion | cli",
    "loaders": "settings batch threads device | order augment | dataset | sampling | read | transfer"
    " | concatenation first_use frameworks | image_dataset | loader | building | examples",
    "bench": "report | machine | watch | measure | commands lab",
}
"""Folders of a package and files beside them, from the bottom up: each imports only those on floors below."""
ABOVE = {"precache": {"loaders", "bench", "torch", "torchvision"}, "loaders": {"bench"}, "bench": set[str]()}
"""Packages that each package never imports."""


@pytest.mark.parametrize("package", FLOORS)
def test_packages_and_their_folders_import_only_those_below(package: str) -> None:
    floor_of: dict[str, int] = {}
    for number, floor in enumerate(FLOORS[package].split("|")):
        floor_of.update(dict.fromkeys(floor.split(), number))
    for path in files(package):
        names = imports(path)
        assert not ABOVE[package] & {name.split(".")[0] for name in names}, path
        own = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if own not in floor_of:
            assert path.parent == ROOT / package, f"{path}: on which floor?"
            continue
        imported = {name.split(".")[1] for name in names if name.startswith(f"{package}.")} - {own}
        assert [name for name in imported if floor_of.get(name, -1) >= floor_of[own]] == [], path


def test_bench_loaders_imports_no_code_that_measures_or_draws() -> None:
    program = "import sys, bench.commands.loaders; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    modules = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    absent = {
        "bench.measure.trial",
        "bench.measure.ranks",
        "bench.report.page",
        "loaders.read",
        "loaders.loader",
    }
    assert not {*absent, "loaders.examples", "torchvision", "plotly"} & {*modules}
