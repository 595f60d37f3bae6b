"""The packages depend on one another in one direction; read from the code's own imports."""

import ast
from pathlib import Path

import pytest

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


FLOORS = {
    "precache": "errors | imports | packages reporting | storage | pictures | recipe page | formats | dataset"
    " | sources | plan engines | example_data sharing | conversion | cli",
    "loaders": "settings batch threads device | order augment | dataset | sampling | read | transfer"
    " | converting mixture frameworks | image_dataset | loader | build | examples",
    "bench": "report | machine | watch | peers | measure | commands lab sagemaker",
}
"""Folders of a package and files beside them, from the bottom up: each imports only those on floors below."""
ABOVE = {"precache": {"loaders", "bench", "torch", "torchvision"}, "loaders": {"bench"}, "bench": set[str]()}
"""What a package never imports."""


@pytest.mark.parametrize("package", FLOORS)
def test_packages_and_their_folders_import_only_those_below(package: str) -> None:
    floors = FLOORS[package].split("|")
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms.split()}
    for path in files(package):
        assert not ABOVE[package] & {name.split(".")[0] for name in imports(path)}, path
        room = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if room not in floor:
            assert path.parent == ROOT / package, f"{path}: on which floor?"
            continue
        used = {name.split(".")[1] for name in imports(path) if name.startswith(f"{package}.")} - {room}
        assert {other for other in used & set(floor) if floor[other] >= floor[room]} == set(), path
