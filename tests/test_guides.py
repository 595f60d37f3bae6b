"""What the documents tell people to type works as it stands there."""

import os
import re
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest

from bench.cli import COMMANDS
from bench.cli import main as bench
from precache import commandline
from precache.cli import main as precache
from precache.sample_tree import make_sample
from tests.command import ROOT

GUIDES = ("README.md", "precache/README.md", "loaders/README.md", "bench/README.md", "bench/results/README.md")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {"precache": precache, "bench": bench}
# In the shell they print what they were given, so that its variables, loops and quotes are the shell's work.
RECORD = 'precache() { record precache "$@"; }; bench() { record bench "$@"; }; pip() { :; }; make() { :; }\n'
RECORD += "record() { printf '%s\\x1f' \"$@\"; printf '\\n'; }; mkdir() { :; }; tar() { :; }\n"
SMALL = {
    "--batches": "2", "--warmup": "1", "--repeats": "1", "--batch-size": "8", "--size": "64", "--pictures": "16",
    "--seconds": "0.1", "--workers": "1", "--steps": "2", "--trainer": "emulated:2000",
}  # fmt: skip
"""Options of `bench` that make a command quick, where the guide does not give them."""


def blocks(guide: str, kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall((ROOT / guide).read_text()) if found == kind]


def commands(guide: str) -> Iterator[list[str]]:
    """Each call of ours in the shell's blocks, in their order."""
    for block in blocks(guide, "sh"):
        ended = subprocess.run(["bash", "-c", RECORD + block], capture_output=True, text=True, check=False)
        for line in ended.stdout.splitlines():
            if line.startswith(("precache\x1f", "bench\x1f")):
                yield line.split("\x1f")[:-1]


def command_of(program: str, name: str) -> click.Command:
    group = PROGRAMS[program]
    found = group.get_command(click.Context(group), name)
    assert found is not None, f"{program} {name}"
    return found


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_sample(tmp_path / "photos", images=64, classes=4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("guide", GUIDES)
def test_every_command_of_a_guide_is_one_that_its_program_takes(guide: str) -> None:
    found = list(commands(guide))
    assert found
    for program, name, *words in found:
        if name != "--version":
            command_of(program, name).make_context(name, words)


@pytest.mark.parametrize("guide", ["precache/README.md", "loaders/README.md"])
def test_the_commands_of_a_guide_run_and_so_does_its_python(guide: str, photos: Path) -> None:
    for program, *words in commands(guide):
        if program == "precache" and words[0] not in ("doctor", "sample"):
            assert commandline.run(precache, "precache", words) == 0, words
    found = blocks(guide, "python")
    assert found
    for text in found:
        exec(compile(text, guide, "exec"), {"__name__": "__main__"})


def test_the_training_loop_of_the_readme_trains(photos: Path) -> None:
    (loop,) = (text for text in blocks("README.md", "python") if "optimizer" in text)
    quick = loop.replace("resnet50", "resnet18").replace("range(90)", "range(2)").replace('"cuda"', '"cpu"')
    assert quick.count('"cpu"') and "range(2)" in quick and "resnet18" in quick
    for program, *words in commands("README.md"):
        if words[0] == "convert":
            assert commandline.run(PROGRAMS[program], program, words) == 0
    quick = quick.replace("batch_size=256", "batch_size=16").replace("size=224", "size=64")
    assert "batch_size=16" in quick and "size=64" in quick
    exec(compile(quick, "README.md", "exec"), {"__name__": "__main__"})
    assert (photos / "checkpoint.pt").exists()


@pytest.mark.slow
def test_the_commands_of_bench_run(photos: Path) -> None:
    for program, name, *words in commands("bench/README.md"):
        if program == "precache":
            assert commandline.run(precache, "precache", [name, *words]) == 0
            continue
        takes = {option for parameter in command_of(program, name).params for option in parameter.opts}
        given = {word.split("=")[0] for word in words}
        small = [part for option, value in SMALL.items() if option in takes - given for part in (option, value)]
        small += [] if name != "evidence" else ["--smoke"]
        ended = subprocess.run(
            ["python", "-m", "bench", name, *words, *small], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
        )
        assert ended.returncode == 0, (name, words, small)


def test_each_command_of_bench_is_in_its_guide() -> None:
    named = {name for program, name, *_ in commands("bench/README.md") if program == "bench"}
    assert {name for name in COMMANDS if import_module(COMMANDS[name])} - named <= {"quickstart", "evidence"}
