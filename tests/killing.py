"""Kill a conversion at its N-th call of the system, for every N. Run as a script: it forks.

    python -m tests.killing fresh|overwrite|discard TREE FOLDER [FIRST STEP]

Prints how many moments there were; an AssertionError says at which one something was lost.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from precache import Recipe, convert
from precache.dataset.converted import is_converted

CALLS = (
    "open", "write", "fsync", "ftruncate", "close", "fstat", "rename", "replace", "unlink", "mkdir", "rmdir",
    "scandir", "listdir",
)  # fmt: skip


def recipe(size: int, name: str = "webdataset") -> Recipe:
    return Recipe(format=name, size=size, fit="crop", shard_bytes=4 * size**2 * 3)


def make(tree: Path, out: Path, size: int, name: str = "webdataset", overwrite: bool = False) -> None:
    convert(tree, out, recipe(size, name), workers=0, overwrite=overwrite)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _no_fsync(descriptor: int) -> None:
    """What is killed loses no page of the system's cache."""


def in_a_fork(work: Callable[[], None], kill_at: int = 0) -> bool:
    """Whether `work` ended; it is killed before its call `kill_at` of the system."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _arm(kill_at)
            work()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"call {kill_at}: exit status {status}"
    return status == 0


def _arm(kill_at: int) -> None:
    left = kill_at

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in CALLS if kill_at else ():
        setattr(os, name, counted(getattr(os, name)))


def attack(kind: str, tree: Path, folder: Path, first: int = 1, step: int = 1) -> int:
    """Kill at each call, or each `step`th from `first` on, then run the same command; the last call."""
    out = folder / "out"
    mine = folder / "out.old" / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    make(tree, folder / "expected", 24)
    make(tree, folder / "before", 16, "shards")
    expected, before = contents(folder / "expected"), contents(folder / "before")
    names = {"out", "out.old", "expected", "before"}
    for moment in range(first, 10_000, step):
        if kind == "overwrite":
            make(tree, out, 16, "shards")
        elif kind == "discard":  # an unfinished conversion of other settings
            in_a_fork(lambda: make(tree, out, 16, "shards"), 60)
            assert not is_converted(out)
        again = partial(make, tree, out, 24, overwrite=kind != "fresh")
        whole = in_a_fork(again, moment)
        if is_converted(out):
            kept = {name: data for name, data in contents(out).items() if name in expected or name in before}
            assert kept in (before, expected), f"call {moment}: {sorted(kept)}"
        elif kind == "overwrite":  # the old one is beside, for a moment
            assert any(contents(path) == before for path in folder.glob(".out.*.precache")), f"call {moment}"
        assert whole or in_a_fork(again)
        assert contents(out) == expected, f"call {moment}: {sorted(contents(out))}"
        assert {path.name for path in folder.iterdir()} == names, f"call {moment}"
        assert mine.read_text() == "mine"
        for path in out.iterdir():
            path.unlink()
        out.rmdir()
        if whole:
            return moment
    raise AssertionError("it does not end")


if __name__ == "__main__":
    os.fsync = _no_fsync
    print(attack(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:])))
