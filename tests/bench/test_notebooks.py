"""The notebook: what it tells to type exists, and what is saved reads on its own anywhere."""

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
"""What is changed in the notebook, for a small tree and a minute."""


def code(path: Path) -> list[dict[str, Any]]:
    """The cells of code."""
    cells = json.loads(path.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells if cell["cell_type"] == "code"]


def texts(path: Path) -> str:
    """What the cells have printed."""
    outputs = [output for cell in code(path) for output in cell["outputs"]]
    return "".join(
        "".join(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs
    )


def test_every_command_of_the_notebook_is_one_that_its_program_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER", "emulated:h100-vit-s")
    script = RECORD + "\n".join(
        cell["source"] for cell in code(NOTEBOOK) if cell["source"].startswith("%%bash")
    )
    for asked, instead in (("set -e\n", ""), ("%%bash\n", ""), ("||", ";")):  # each command runs
        script = script.replace(asked, instead)
    ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [line.split("\x1f")[:-1] for line in ended.stdout.splitlines() if "\x1f" in line]
    assert {program for program, *_ in found} == {"precache", "bench"}
    for program, name, *words in found:
        command_of(program, name).make_context(name, words)


def test_the_notebook_is_saved_with_its_plots_and_says_where_they_were_measured() -> None:
    numbers = [cell["execution_count"] for cell in code(NOTEBOOK)]
    assert numbers == list(range(1, len(numbers) + 1))  # run from top to bottom
    printed = texts(NOTEBOOK)
    assert re.search(r"\d+ CPUs, \d+ GiB, accelerator .*, 20\d\d-\d\d-\d\d\n.*torch \d", printed)
    outputs = [output for cell in code(NOTEBOOK) for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    assert not any(output["output_type"] == "error" for output in outputs)
    assert not ABSOLUTE.findall(printed), "a folder of the machine"
    assert "\x1b" not in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_make_notebook_runs_it_and_keeps_it_as_it_was_where_a_cell_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nbconvert")
    pytest.importorskip("matplotlib")
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
    (commands / "jupyter").write_text(f'#!/bin/sh\nshift; exec {sys.executable} -m nbconvert "$@"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = recipe("notebook", BIN=str(commands), NOTEBOOK=path.name)
    ended = subprocess.run(command, cwd=tmp_path, shell=True, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    printed = texts(path)
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


def recipe(target: str, **variables: str) -> str:
    """The last command that `make TARGET` runs."""
    given = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "--dry-run", "--no-print-directory", target, *given]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return ended.stdout.replace("\\\n", " ").strip().splitlines()[-1]
