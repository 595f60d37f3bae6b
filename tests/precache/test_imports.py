"""Files in the working folder that have the name of a module: not imported by commands, named in errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from precache.dataset.manifest import is_converted
from precache.errors import MissingDependencyError
from precache.packages import check_package
from tests.command import ROOT, check_bad_input, run

NAMES = ("loaders", "precache", "psutil", "random", "secrets", "tokenize", "torch")
_EXIT = "raise SystemExit(f'{__file__} was imported')"
_CONVERT_BESIDE_A_THREAD = """
import sys, threading
if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # so that workers are not forked
    from precache import Recipe, convert
    convert(sys.argv[1], sys.argv[2], Recipe(format="shards", size=32), workers=1)
"""


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A working folder with the user's own modules."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(_EXIT)
    return folder


def test_bench_imports_nothing_of_the_working_folder(raw_tree: Path, users_folder: Path) -> None:
    words = "--backend pytorch --trainer none --batches 1 --warmup 1 --repeats 1 --batch-size 4 --size 32"
    result = run("bench", "loaders", raw_tree, *words.split(), cwd=users_folder)
    assert (result.returncode, "was imported" in result.stderr) == (0, False), result.stderr


def test_spawned_workers_import_nothing_of_the_working_folder(
    raw_tree: Path, users_folder: Path, tmp_path: Path
) -> None:
    program = tmp_path / "programs/convert.py"
    program.parent.mkdir()
    program.write_text(_CONVERT_BESIDE_A_THREAD)
    subprocess.run(
        [sys.executable, program, raw_tree, tmp_path / "out"],
        cwd=users_folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert is_converted(tmp_path / "out")


def test_bench_names_the_file_that_hides_loaders(tmp_path: Path) -> None:
    (tmp_path / "loaders.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", str(ROOT)])}
    command = [
        sys.executable,
        "-c",
        "from bench.__main__ import entry_point; entry_point()",
        "loaders",
        "photos",
    ]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    check_bad_input(result, str(tmp_path / "loaders.py"), "rename it")


def test_an_import_error_names_a_folder_that_hides_a_package_on_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable installation may be on no path: a hook finds it, after the paths."""
    (tmp_path / "loaders").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    error = ImportError("cannot import name 'build' from 'loaders' (unknown location)", name="loaders")
    with pytest.raises(MissingDependencyError, match=str(tmp_path / "loaders")):
        check_package(error, "bench")


def test_an_import_error_names_the_hiding_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xxhash.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    error = ModuleNotFoundError("No module named 'xxhash.x'; 'xxhash' is not a package", name="xxhash.x")
    with pytest.raises(MissingDependencyError, match=r"xxhash\.py") as raised:
        check_package(error, "precache")
    assert "rename it" in raised.value.remedy


@pytest.mark.parametrize("name", ["random", "xxhash", "loaders"])
def test_an_import_error_of_what_is_installed_names_no_file(name: str) -> None:
    error = ImportError(f"cannot import name 'x' from {name!r}", name=name)
    if name == "loaders":  # not a package to install
        check_package(error, "precache")
        return
    with pytest.raises(MissingDependencyError) as raised:
        check_package(error, "precache")
    assert "hides" not in str(raised.value)
