"""Notebook bench/caltech256.ipynb: its commands exist, and its saved outputs name no folder of a machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from precache.example_data.sample_tree import make_sample
from tests.command import ROOT
from tests.test_guides import RECORD, command_of

NOTEBOOK = ROOT / "bench/caltech256.ipynb"
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:home|tmp|root|Users|work|usr|var|opt|mnt|private|data)/")
SMALL = {
    "BATCH, SIZE, EPOCHS = 64, 224, 3": "BATCH, SIZE, EPOCHS = 8, 32, 2",
    "TRAIN_SIZE, TRAIN_EPOCHS = 64, 5": "TRAIN_SIZE, TRAIN_EPOCHS = 16, 2",
    "bench recommend data/raw --trainer emulated:a100": "echo once is enough",
    "recommend data/raw": "recommend data/raw --size 32 --format shards",
}
"""Text of the notebook, and its replacement, with which it runs on a small tree in a minute."""


def code_cells(path: Path) -> list[dict[str, Any]]:
    """Return the cells of code, with their sources as one text each."""
    cells = json.loads(path.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells if cell["cell_type"] == "code"]


def printed_text(path: Path) -> str:
    """Return the text that the cells have printed."""
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    return "".join(
        "".join(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs
    )


def test_every_command_of_the_notebook_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER", "emulated:h100-vit-s")
    sources = [cell["source"] for cell in code_cells(NOTEBOOK)]
    lines = [line for source in sources for line in re.findall(r"^ *!(.*)", source, re.MULTILINE)]
    lines += [source.removeprefix("%%bash\n") for source in sources if source.startswith("%%bash")]
    script = RECORD + "\n".join(lines).replace("set -e\n", "")  # so that each command runs
    ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    commands = [line.split("\x1f")[:-1] for line in ended.stdout.splitlines() if "\x1f" in line]
    assert {tuple(command[:2]) for command in commands} == {
        ("precache", "sample"),
        ("precache", "convert"),
        ("precache", "verify"),
        ("bench", "recommend"),
    }
    for program, name, *words in commands:
        command_of(program, name).make_context(name, words)


def test_the_notebook_is_saved_with_its_plots_and_its_machine() -> None:
    numbers = [cell["execution_count"] for cell in code_cells(NOTEBOOK)]
    assert numbers == list(range(1, len(numbers) + 1))  # run from top to bottom
    printed = printed_text(NOTEBOOK)
    assert re.search(r"\d+ CPUs, \d+ GiB, accelerator .*, 20\d\d-\d\d-\d\d\n.*torch \d", printed)
    outputs = [output for cell in code_cells(NOTEBOOK) for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    assert not any(output["output_type"] == "error" for output in outputs)
    assert not ABSOLUTE.findall(printed), "a folder of the machine"
    assert "\x1b" not in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_make_notebook_runs_it_and_keeps_it_where_a_cell_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nbconvert")
    pytest.importorskip("matplotlib")
    make_sample(tmp_path / "data/raw", images=64, classes=2, workers=0)
    notebook, path = NOTEBOOK.read_text(), tmp_path / "small.ipynb"
    for text, replacement in SMALL.items():
        text_in_json, replacement_in_json = json.dumps(text)[1:-1], json.dumps(replacement)[1:-1]
        assert text_in_json in notebook
        notebook = notebook.replace(text_in_json, replacement_in_json)
    path.write_text(notebook)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("precache", "bench"):  # where this Python has no commands beside it
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {name} "$@"\n')
    (commands / "jupyter").write_text(f'#!/bin/sh\nshift; exec {sys.executable} -m nbconvert "$@"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = make_recipe("notebook", BIN=str(commands), NOTEBOOK=path.name)
    ended = subprocess.run(command, cwd=tmp_path, shell=True, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    printed = printed_text(path)
    for mention in ("64 pictures in 2 classes", "every byte is as written", "epoch 2:", "times as many"):
        assert mention in printed
    assert str(tmp_path) not in printed
    failing = json.loads(path.read_text())
    failing["cells"] = [{**failing["cells"][0], "cell_type": "code", "source": "%%bash\nexit 2"}]
    failing["cells"][0] |= {"outputs": [], "execution_count": None}
    path.write_text(json.dumps(failing))
    before = path.read_bytes()
    failed = subprocess.run(command, cwd=tmp_path, shell=True, capture_output=True, check=False)
    assert failed.returncode != 0
    assert path.read_bytes() == before
    assert list(tmp_path.glob("*.partial")) == []


def make_recipe(target: str, **variables: str) -> str:
    """Return the last command that `make TARGET` runs."""
    assignments = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "--dry-run", "--no-print-directory", target, *assignments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return ended.stdout.replace("\\\n", " ").strip().splitlines()[-1]
