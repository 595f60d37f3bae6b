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
    given = {"TRAINER": "emulated:h100-vit-s", "DATA": "data/shards", "PREFIX": "s3://b/p"}
    for name, value in given.items():
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
    for path in NOTEBOOKS:
        text = "\n".join(text for cell in code(path) for text in texts(cell))
        assert not ABSOLUTE.findall(text), "a folder of the machine"
        assert "\x1b" not in text
        assert set(json.loads(path.read_text())["metadata"]) <= {"kernelspec", "language_info"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_top_to_bottom_and_stays_as_it_was_where_a_cell_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package)
    make_sample(tmp_path / "data/raw", images=64, classes=2, workers=0)
    text, path = NOTEBOOK.read_text(), tmp_path / "small.ipynb"
    for pair in SMALL.items():
        asked, instead = (json.dumps(each)[1:-1] for each in pair)
        assert asked in text
        text = text.replace(asked, instead)
    path.write_text(text)
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
    printed = "".join(text for cell in code(path) for text in texts(cell))
    for mention in ("64 pictures in 2 classes", "every byte is as written", "epoch 2:", "times as many"):
        assert mention in printed
    assert str(tmp_path) not in printed
    failing = json.loads(path.read_text())
    failing["cells"] = [{**failing["cells"][0], "cell_type": "code", "source": "%%bash\nexit 2"}]
    failing["cells"][0] |= {"outputs": [], "execution_count": None}
    path.write_text(json.dumps(failing))
    before = path.read_bytes()
    check_bad_input(run("bench.notebook", path, cwd=tmp_path), "small.ipynb: a cell failed")
    assert path.read_bytes() == before
