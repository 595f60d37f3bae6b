"""The notebooks: what they tell to type exists, and what is saved reads on its own anywhere."""

import ast
import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench.notebook import NOTEBOOK
from precache.example_data.sample_tree import make_sample
from tests.command import ROOT, check_bad_input, run
from tests.test_guides import RECORD, command_of

NOTEBOOKS = (NOTEBOOK, ROOT / "bench" / "sagemaker" / "launch.ipynb")
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:home|tmp|root|Users|work|usr|var|opt|mnt|private|data)/")
SMALL = {
    "BATCH, SIZE, EPOCHS = 64, 224, 3": "BATCH, SIZE, EPOCHS = 8, 32, 2",
    "TRAIN_SIZE, TRAIN_EPOCHS = 64, 5": "TRAIN_SIZE, TRAIN_EPOCHS = 16, 2",
    "bench recommend data/raw --trainer emulated:a100": "echo once is enough",
    "recommend data/raw": "recommend data/raw --size 32 --format shards",
}
"""What is changed in the notebook, for a small tree and a minute."""


def code(path: Path) -> list[dict[str, Any]]:
    """The cells of code."""
    cells = json.loads(path.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells if cell["cell_type"] == "code"]


def commands(path: Path) -> Iterator[list[str]]:
    """Calls of ours in the shell's cells, whether those before them fail or not."""
    for cell in code(path):
        if cell["source"].startswith("%%bash\n"):
            script = cell["source"].replace("set -e\n", "")
            for failing in ("", "record() { printf '%s\\x1f' \"$@\"; printf '\\n'; false; }\n"):
                ended = subprocess.run(
                    ["bash", "-c", RECORD + failing + script], capture_output=True, text=True, check=False
                )
                for line in ended.stdout.splitlines():
                    if line.startswith(("precache\x1f", "bench\x1f")):
                        yield line.split("\x1f")[:-1]


def texts(cell: dict[str, Any]) -> Iterator[str]:
    """What a cell has printed."""
    for output in cell["outputs"]:
        yield "".join(output.get("text", output.get("data", {}).get("text/plain", "")))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_is_python_or_commands_that_there_are(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "TRAINER": "emulated:h100-vit-s",
        "DATA": "data/shards",
        "PREFIX": "s3://b/p",
    }.items():
        monkeypatch.setenv(name, value)
    for cell in code(path):
        if not cell["source"].startswith("%%bash\n"):
            check_imports(ast.parse(re.sub(r"^%.*$", "", cell["source"], flags=re.MULTILINE)))
    found = list(commands(path))
    assert found
    for program, name, *words in found:
        command_of(program, name).make_context(name, words)


def check_imports(tree: ast.Module) -> None:
    """That what is imported of our packages is there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in (
            "bench",
            "precache",
            "loaders",
        ):
            module = import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_notebook_is_saved_with_its_plots_and_says_where_they_were_measured() -> None:
    cells = code(NOTEBOOK)
    numbers = [cell["execution_count"] for cell in cells]
    assert numbers == list(range(1, len(cells) + 1))  # run from top to bottom
    printed = "".join(text for cell in cells for text in texts(cell))
    assert re.search(r"\d+ CPUs, \d+ GiB, accelerator .*, 20\d\d-\d\d-\d\d\n.*torch \d", printed)
    pictures = [
        output["data"]["image/png"]
        for cell in cells
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 4
    assert all(base64.b64decode("".join(picture)).startswith(b"\x89PNG") for picture in pictures)
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_saved_names_a_folder_of_the_machine(path: Path) -> None:
    text = "\n".join(text for cell in code(path) for text in texts(cell))
    assert not ABSOLUTE.findall(text)
    assert "\x1b" not in text
    assert set(json.loads(path.read_text())["metadata"]) <= {"kernelspec", "language_info"}


def small_notebook(path: Path, **changes: str) -> Path:
    notebook = json.loads(NOTEBOOK.read_text())
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        for asked, instead in {**SMALL, **changes}.items():
            text = text.replace(asked, instead)
        cell["source"] = text
    path.write_text(json.dumps(notebook))
    return path


def notebook(path: Path, *cells: str) -> Path:
    """A notebook of these cells of code."""
    made = [
        {"cell_type": "code", "metadata": {}, "source": text, "outputs": [], "execution_count": None}
        for text in cells
    ]
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}))
    return path


def kernel() -> None:
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel()
    source = NOTEBOOK.read_text()
    assert all(json.dumps(asked)[1:-1] in source for asked in SMALL)
    make_sample(tmp_path / "data/raw", images=64, classes=2, workers=0)
    path = small_notebook(tmp_path / "small.ipynb")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("precache", "bench"):  # where this Python has no commands beside it
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {name} "$@"\n')
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "bench.notebook", path, "--home", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    cells = code(path)
    printed = "".join(text for cell in cells for text in texts(cell))
    assert "64 pictures in 2 classes" in printed
    assert "every byte is as written" in printed
    assert "epoch 2:" in printed
    assert "times as many" in printed
    assert str(tmp_path) not in printed


@pytest.mark.slow
def test_a_cell_that_fails_leaves_the_notebook_as_it_was(tmp_path: Path) -> None:
    kernel()
    path = notebook(tmp_path / "broken.ipynb", "1", "%%bash\necho no room on the disk >&2\nexit 2")
    before = path.read_bytes()
    check_bad_input(run("bench.notebook", path, cwd=tmp_path), "broken.ipynb: a cell failed")
    assert path.read_bytes() == before
