"""The packages depend on one another in one direction; read from the code's own imports."""

import ast
from pathlib import Path

import pytest

from bench.cli import COMMANDS
from loaders import BACKENDS
from precache.cli.main import OF_BENCH
from tests.command import ROOT


def imports(path: Path) -> set[str]:
    """Dotted names that the file imports when it runs, `from a import b` as 'a.b'."""
    tree = ast.parse(path.read_text())
    for_types = [
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    left_out = {inner for node in for_types for inner in ast.walk(node)}
    nodes = [node for node in ast.walk(tree) if node not in left_out]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return plain | {f"{node.module}.{alias.name}" for node in named for alias in node.names}


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("precache", {"loaders", "bench", "torch", "torchvision"}), ("loaders", {"bench"})],
)
def test_imports_go_one_way(package: str, forbidden: set[str]) -> None:
    for path in files(package):
        used = {name.split(".")[0] for name in imports(path)}
        assert not used & forbidden, path


FLOORS = {
    "precache": [
        {"errors"},
        {"packages", "reporting"},
        {"storage"},
        {"pictures"},
        {"recipe", "page"},
        {"formats"},
        {"dataset"},
        {"sources"},
        {"plan", "engines"},
        {"example_data"},
        {"conversion"},
        {"sharing"},
        {"cli"},
    ],
    "loaders": [
        {"settings", "batch", "deliver"},
        {"order", "augment"},
        {"dataset"},
        {"fields", "sampling"},
        {"read", "transfer"},
        {"converting", "mixture"},
        {"image_dataset"},
        {"loader"},
        {"build"},
        {"examples"},
    ],
    "bench": [
        {"report"},
        {"machine", "watch"},
        {"peers"},
        {"measure"},
        {"commands", "lab", "sagemaker"},
    ],
}
"""Folders of a package and files beside them, from the bottom up: each imports only those on floors below."""


@pytest.mark.parametrize("package", FLOORS)
def test_folders_import_only_those_below(package: str) -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS[package]) for room in rooms}
    for path in files(package):
        room = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if room not in floor:
            assert path.parent == ROOT / package, f"{path}: on which floor?"
            continue
        used = {name.split(".")[1] for name in imports(path) if name.startswith(f"{package}.")} - {room}
        assert {other for other in used & set(floor) if floor[other] >= floor[room]} == set(), path


def test_what_is_drawn_knows_no_torch() -> None:
    used = imports(ROOT / "loaders/augment/draw.py")
    assert not [name for name in used if name.startswith(("torch", "loaders"))]


def test_each_backend_is_a_file_of_its_name() -> None:
    assert set(BACKENDS) <= {path.stem for path in files("loaders/read")}
    assert {module.__module__ for module in BACKENDS.values()} == {f"loaders.read.{b}" for b in BACKENDS}


def test_each_command_is_a_file_of_its_name() -> None:
    names = {path.stem for path in files("bench/commands")} - {"__init__", "options"}
    assert {name: f"bench.commands.{name}" for name in names} == {**COMMANDS, **OF_BENCH}


def test_commands_that_precache_lends_are_named_and_not_imported() -> None:
    """They are all of `bench` that `precache` knows, as text that is imported when the command is called."""
    for path in files("precache"):
        named = [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and str(node.value).startswith(("bench.", "loaders."))
        ]
        assert named == (list(OF_BENCH.values()) if path.match("cli/main.py") else []), path


def test_findings_are_pure() -> None:
    """They get the machine's and the data's figures passed, and open nothing."""
    opening = {"psutil", "loaders", "torch", "subprocess"}
    for path in files("bench/report"):
        assert not opening & {name.split(".")[0] for name in imports(path)}, path
