"""Fixtures of the tests of bench: a working folder, commands run in it, trials run in this process."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.cli import main
from precache.cli import commandline

Bench = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def trials_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trials in this process: a new process imports torch for a second or two."""
    for module in ("measure.comparison", "lab.peers", "lab.object_storage"):
        monkeypatch.setattr(
            f"bench.{module}.run_in_process", lambda function, *arguments: function(*arguments)
        )


@pytest.fixture
def data(raw_tree: Path, converted: dict[str, Path], tmp_path: Path) -> Path:
    """Return a working folder with data/raw, data/shards, ... as the commands leave them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/raw").symlink_to(raw_tree)
    for name, path in converted.items():
        (tmp_path / "data" / name).symlink_to(path)
    return tmp_path


@pytest.fixture
def bench(data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Bench:
    """Return a function that runs `bench` in the folder `data`, in this process: importing torch is slow."""
    monkeypatch.chdir(data)

    def run_here(*words: object) -> "subprocess.CompletedProcess[str]":
        capfd.readouterr()
        code = commandline.run(main, "bench", list(map(str, words)))
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run_here
