"""Programs that start workers: without a main block, interactive ones, with torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from precache.dataset.converted import open_dataset
from precache.dataset.manifest import is_converted
from tests.command import ROOT
from tests.conftest import IMAGES

_SOURCE = "sys.argv[1]"
_DATASET = """
class Pictures:
    def __len__(self):
        return 4
    def __getitem__(self, row):
        return Image.new("RGB", (32, 32), (row, 0, 0)), row % 2
"""
_START = f"""
import os, sys, multiprocessing
from PIL import Image
import precache
print("begins")
recipe = precache.Recipe(format="shards", size=32)
settings = dict(os.environ), multiprocessing.get_start_method(allow_none=True)
{_DATASET}
"""
_END = """
assert settings == (dict(os.environ), multiprocessing.get_start_method(allow_none=True))
print("ends")
"""


def convert_line(source: str) -> str:
    return f"precache.convert({source}, sys.argv[2], recipe, workers=2)\n"


def run_program(form: str, text: str, tree: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a program in one of its forms: a script, a module, `python -c`, standard input."""
    script = folder / "program.py"
    script.write_text(text)
    start = {"script": [script.name], "module": ["-m", "program"], "-c": ["-c", text], "stdin": ["-"]}[form]
    return subprocess.run(
        [sys.executable, *start, tree, folder / "out"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=text if form == "stdin" else "",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("form", ["script", "module", "-c", "stdin"])
def test_a_program_without_a_main_block_converts_a_tree(form: str, raw_tree: Path, tmp_path: Path) -> None:
    """Workers do not import the program, and nothing of it is changed."""
    ended = run_program(form, _START + convert_line(_SOURCE) + _END, raw_tree, tmp_path)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["begins", "ends"], "")
    assert open_dataset(tmp_path / "out").manifest.samples == IMAGES


@pytest.mark.parametrize("form", ["script", "module"])
def test_a_dataset_defined_in_a_program_needs_its_main_block(
    form: str, raw_tree: Path, tmp_path: Path
) -> None:
    ended = run_program(form, _START + convert_line("Pictures()") + _END, raw_tree, tmp_path)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "An attempt has been made to start a new process before" in last
    assert 'if __name__ == "__main__":' in last
    assert not is_converted(tmp_path / "out")
    guarded = f"{_START}if __name__ == '__main__':\n    {convert_line('Pictures()')}"
    ended = run_program(form, guarded, raw_tree, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert open_dataset(tmp_path / "out").manifest.samples == 4


@pytest.mark.parametrize("form", ["-c", "stdin"])
def test_a_dataset_defined_interactively_is_refused_in_a_line(
    form: str, raw_tree: Path, tmp_path: Path
) -> None:
    ended = run_program(form, _START + convert_line("Pictures()"), raw_tree, tmp_path)
    assert ended.returncode == 1
    assert "SettingError: the source cannot be sent to worker processes" in ended.stderr.splitlines()[-1]
    assert "workers=0" in ended.stderr.splitlines()[-1]


def test_workers_have_the_flags_of_the_program_and_its_path(raw_tree: Path, tmp_path: Path) -> None:
    """The dataset's module is found by '', although the program has changed its working folder."""
    (tmp_path / "pictures.py").write_text(f"from PIL import Image\nassert False\n{_DATASET}")
    text = f"import pictures\nos.chdir('/')\n{convert_line('pictures.Pictures()')}"
    environment = {**os.environ, "PYTHONHOME": "/nonexistent"}  # -E ignores it, -O the assertion
    path = f"import sys; sys.path.insert(1, {str(ROOT)!r})"
    ended = subprocess.run(
        [sys.executable, "-E", "-O", "-c", f"{path}\n{_START}{text}", raw_tree, tmp_path / "out"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert open_dataset(tmp_path / "out").manifest.samples == 4


def test_a_dataset_of_the_program_converts_in_its_spawned_process(raw_tree: Path, tmp_path: Path) -> None:
    convert = f"def work():\n    {convert_line('Pictures()')}"
    start = "multiprocessing.get_context('spawn').Process(target=work).start()"
    text = f"{_START}{convert}if __name__ == '__main__':\n    {start}\n"
    ended = run_program("script", text, raw_tree, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert open_dataset(tmp_path / "out").manifest.samples == 4


def test_workers_import_no_torch_that_the_program_has_imported(raw_tree: Path, tmp_path: Path) -> None:
    watch = """
import torch, threading, time, psutil
seen = []
def watch():
    while True:
        for child in psutil.Process().children():
            try:
                if "-c" in child.cmdline():  # before that it is a fork of this program
                    seen.append(any("torch" in part.path for part in child.memory_maps()))
            except psutil.Error:
                pass
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
"""
    text = watch + _START + convert_line(_SOURCE) + "assert seen and not any(seen), seen\n" + _END
    ended = run_program("script", text, raw_tree, tmp_path)
    assert (ended.returncode, ended.stdout.split()) == (0, ["begins", "ends"]), ended.stderr


def test_conversion_on_first_use_needs_no_main_block(raw_tree: Path, tmp_path: Path) -> None:
    text = """
import sys
import loaders
print("begins")
loaders.build(sys.argv[1], precache=sys.argv[2]).close()
print("ends")
"""
    ended = run_program("script", text, raw_tree, tmp_path)
    assert (ended.returncode, ended.stdout.split()) == (0, ["begins", "ends"]), ended.stderr
