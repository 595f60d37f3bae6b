"""Programs that end without closing their loaders, fork, are killed or interrupted."""

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from loaders.read import decoding
from precache.errors import SettingError
from tests.building import build_loader
from tests.command import ROOT
from tests.loader_contract import ids_of
from tests.loaders.arms import MAIN

# Imports once and forks for each run, which then ends as a program does that was started by itself. The
# augmentation is inside torch whenever the program ends.
ENDING = """
import gc, json, os, sys, tempfile, threading, time
import loaders
import precache.formats
import torch

EXPECTED = {"exit": 3, "error": 1}


def augment(images, ids, epoch):
    deadline, small = time.monotonic() + 0.03, torch.zeros(8)
    while time.monotonic() < deadline:
        small = small + 1
    return images[:, :40, :40]


def supervise(runs):
    running, failed = {}, []
    while runs or running:
        while runs and len(running) < 2:
            run = runs.pop()
            said = tempfile.TemporaryFile()
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                os.dup2(said.fileno(), 2)
                return run
            running[child] = run, said, time.monotonic()
        for child, (run, said, start_s) in list(running.items()):
            if time.monotonic() - start_s > 60:
                os.killpg(child, 9)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del running[child]
                said.seek(0)
                text, code = said.read().decode(), os.waitstatus_to_exitcode(status)
                said = sum(map(text.count, ("Traceback", "Exception ignored", "terminate", "did not stop")))
                if code != EXPECTED.get(run[2], 0) or said != (run[2] == "error"):
                    failed.append([run, code, text[-2000:]])
        time.sleep(0.002)
    print(json.dumps(failed))


def consume(loader):
    assert sum(len(batch.ids) for _ in range(2) for batch in loader) == 140


gc.collect()
gc.freeze()  # what was imported: going through it at each end would take most of the time
run = supervise(json.load(sys.stdin))
if run is not None:
    backend, path, ending = run
    reading = loaders.Reading(workers=2)
    settings = {"backend": backend, "size": 40, "batch_size": 16, "reading": reading}
    loader = loaders.build(path, augment=augment, **settings)
    if ending == "kept":
        iterator = iter(loader)
        batch = next(iterator)
    elif ending == "two":
        other = loaders.build(path, serving=loaders.Serving(dtype=torch.float32), **settings)
        pairs = zip(loader, other)
        next(pairs)
    elif ending == "cycle":
        cycle = [loader, iter(loader)]
        cycle.append(cycle)
        next(cycle[1])
        del loader, cycle
    elif ending == "thread":
        threading.Thread(target=consume, args=(loader,)).start()
    elif ending == "forked":
        iterator = iter(loader)
        first = next(iterator)
        if backend == "dali":  # in a copy, locks that its threads hold are never released
            time.sleep(1)
        child = os.fork()
        if child != 0:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert len(first.ids) + sum(len(batch.ids) for batch in iterator) == 70
    else:
        for batch in loader:
            if ending == "break":
                break
            if ending == "exit":
                sys.exit(3)
            if ending == "error":
                raise ValueError("of the training")
"""
ENDINGS = ["kept", "whole", "break", "exit", "error", "cycle", "two", "thread", "forked"]
QUICK = {"dali": ["kept", "forked"]}  # which costs a second more: it is imported by each


@pytest.fixture
def arms(raw_tree: Path, converted: dict[str, Path]) -> list[tuple[str, str]]:
    """(backend, path) of each that can run here."""
    folders = {"raw": raw_tree, **converted}
    here = [arm.values for arm in MAIN if not any(mark.args[0] for mark in arm.marks)]
    return [(backend, str(folders[kind])) for backend, kind in here]


def start(program: str, folder: Path, *arguments: object) -> "subprocess.Popen[str]":
    file = folder / "program.py"
    file.write_text(program)
    return subprocess.Popen(
        [sys.executable, str(file), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "times", [1, pytest.param(200, marks=[pytest.mark.faults, pytest.mark.timeout(7200)])]
)
def test_a_program_that_closes_nothing_ends_with_its_own_exit_code(
    times: int, arms: list[tuple[str, str]], tmp_path: Path
) -> None:
    few = ["kept", "whole", "error", "thread", "forked"]
    runs = [(*arm, ending) for arm in arms for ending in QUICK.get(arm[0], few)]
    if times > 1:
        runs = [(*arm, ENDINGS[number % len(ENDINGS)]) for number in range(times) for arm in arms]
    process = start(ENDING, tmp_path)
    said, errors = process.communicate(json.dumps(runs), timeout=7200 if times > 1 else 280)
    assert process.returncode == 0, errors
    assert json.loads(said) == [], "run, exit code, what it said"


MIDWAY = """
import atexit, sys, time

end_s = time.monotonic()
atexit.register(lambda: print(time.monotonic() - end_s))  # the first is called last

import loaders

if __name__ == "__main__":
    import signal, torch.multiprocessing

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    torch.multiprocessing.set_start_method(sys.argv[2])
    reading = loaders.Reading(workers=2)
    loader = loaders.build(sys.argv[1], backend="pytorch", size=40, batch_size=4, reading=reading)
    assert sorted(i for batch in loader for i in batch.ids.tolist()) == list(range(70))
    iterator = iter(loader)
    batch = next(iterator)
    print("running", flush=True)
    sys.stdin.readline()
    end_s = time.monotonic()
"""


def start_midway(tree: Path, folder: Path, method: str = "fork") -> "tuple[subprocess.Popen[str], list[Any]]":
    """A program that is in the midst of an epoch of a raw tree, and its workers."""
    process = start(MIDWAY, folder, tree, method)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    return process, children


@pytest.mark.parametrize(
    ("by", "method"),
    [
        (signal.SIGINT, "fork"),
        pytest.param(signal.SIGTERM, "fork", marks=pytest.mark.slow),  # torch's workers look each 5 s
        pytest.param(signal.SIGKILL, "spawn", marks=pytest.mark.slow),
    ],
)
def test_workers_end_with_a_program_that_is_stopped(
    by: signal.Signals, method: str, raw_tree: Path, tmp_path: Path
) -> None:
    """Ctrl-C goes to the workers too: one traceback, no orphans."""
    process, children = start_midway(raw_tree, tmp_path, method)
    (os.killpg if by == signal.SIGINT else os.kill)(process.pid, by)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -by, errors
    if by != signal.SIGKILL:  # a worker may say that who asked it is gone
        assert errors.count("Traceback") == (by == signal.SIGINT), errors
    assert psutil.wait_procs(children, timeout=15)[1] == []


def test_the_end_waits_for_no_batch(raw_tree: Path, tmp_path: Path) -> None:
    """Worker processes may be long in the middle of one: they are stopped here, and would never finish it."""
    process, children = start_midway(raw_tree, tmp_path)
    for child in children:
        child.suspend()
    seconds, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert float(seconds) < 4, "torch alone waits 5 s for each"


HUNG = """
import itertools, os, sys, threading
import loaders, loaders.read.decoding, loaders.deliver.threads

never, hanging = os.pipe()[0], threading.Event()
read, numbers = loaders.read.decoding.read, itertools.count()


def load(*arguments):
    if next(numbers) >= 4:  # the first batch is read
        hanging.set()
        os.read(never, 1)
    return read(*arguments)


loaders.read.decoding.read = load
reading = loaders.Reading(workers=0, threads=2)
loader = loaders.build(sys.argv[1], backend="pytorch", size=40, batch_size=4, reading=reading)
iterator = iter(loader)
next(iterator)
hanging.wait()
loaders.deliver.threads._READERS_S = 0.3
sys.exit(7)
"""


def test_a_disk_that_does_not_answer_does_not_keep_the_program(raw_tree: Path, tmp_path: Path) -> None:
    process = start(HUNG, tmp_path, raw_tree)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 7, errors
    assert errors.count("\n") == 1
    assert "check the disk or network of the data" in errors


def forked(function: Callable[[], Any]) -> Any:
    """What the function returns, in a forked process that ends then."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(theirs, json.dumps(function()).encode())
        except BaseException as error:
            os.write(theirs, json.dumps(repr(error)).encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as pipe:
        said = json.loads(pipe.read())
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize(("backend", "kind"), MAIN[:2])
def test_a_forked_process_builds_its_own_loader_and_leaves_the_parents_alone(
    backend: str, kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = {"raw": raw_tree, **converted}[kind]
    settings = {"backend": backend, "size": 40, "batch_size": 8, "workers": 2}

    def serve() -> list[int]:
        with build_loader(path, **settings) as own:
            return ids_of(own)

    def use_what_is_inherited() -> list[str]:
        said = []
        for use in (next, lambda _: iter(held[0])):
            with pytest.raises(SettingError) as caught:
                use(held[1])
            said.append(str(caught.value))
        held[0].close()
        held.clear()
        del caught
        gc.collect()
        return said

    held: list[Any] = [build_loader(path, **settings)]
    expected = ids_of(held[0])
    held[0].set_epoch(0)
    held.append(iter(held[0]))
    ids = ids_of([next(held[1])])
    assert forked(serve) == expected
    (message,) = set(forked(use_what_is_inherited))
    assert "build it in the process that uses it" in message
    assert ids + ids_of(held[1]) == expected
    with pytest.raises(SettingError, match="build it in the process that uses it"):
        pickle.dumps(held[0])
    held[0].close()


def test_a_worker_collects_nothing_that_it_has_from_its_parent(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its finaliser might wait for a thread that is not there."""
    load, ours = decoding.read, os.getpid()

    class Inherited:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if os.getpid() != ours:
                (tmp_path / "collected in a worker").touch()

    def collect_and_load(*arguments: Any) -> Any:
        gc.collect()
        return load(*arguments)

    monkeypatch.setattr(decoding, "read", collect_and_load)
    gc.collect()
    gc.disable()
    try:
        Inherited()
        with build_loader(raw_tree, size=40, workers=1) as loader:
            next(iter(loader))
            assert not gc.isenabled()
    finally:
        gc.enable()
    assert list(tmp_path.iterdir()) == []
