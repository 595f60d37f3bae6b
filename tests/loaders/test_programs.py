"""Programs that end without closing their loaders, fork, are killed or interrupted."""

import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import psutil
import pytest

from precache.errors import SettingError
from tests.building import build_loader
from tests.command import ROOT
from tests.loader_contract import ids_of
from tests.loaders.cases import MAIN_CASES

# Imports once and forks for each run, which then ends as a program does that was started by itself. The
# augmentation is inside torch whenever the program ends.
ENDING = """
import gc, itertools, json, os, sys, tempfile, threading, time
import loaders
from loaders import threads
from loaders.read import decoding
import precache.formats
import torch

EXPECTED = {"exit": 3, "error": 1}


def augment(images, ids, epoch):
    deadline, small = time.monotonic() + 0.03, torch.zeros(8)
    while time.monotonic() < deadline:
        small = small + 1
    return images[:, :40, :40]


def hang():
    # reading does, from the second batch on
    read, numbers, never, hanging = decoding.read, itertools.count(), os.pipe()[0], threading.Event()

    def read_or_hang(*arguments):
        if next(numbers) >= 16:
            hanging.set()
            os.read(never, 1)
        return read(*arguments)

    decoding.read, threads._READERS_S = read_or_hang, 0.3
    return hanging


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
                if code != EXPECTED.get(run[2], 0) or said != (run[2] in ("error", "hung")):
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
    if ending == "hung":
        reading, hanging = loaders.Reading(workers=0, threads=2), hang()
    settings = {"backend": backend, "size": 40, "batch_size": 16, "reading": reading}
    loader = loaders.build(path, augment=augment, **settings)
    if ending == "kept":
        iterator = iter(loader)
        batch = next(iterator)
    elif ending == "hung":
        iterator = iter(loader)
        next(iterator)
        hanging.wait()
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
ENDINGS = ["kept", "whole", "break", "exit", "error", "thread", "forked"]
FEW = ["kept", "whole", "error", "thread", "forked"]
QUICK = {"dali": ["kept", "forked"], "pytorch": [*FEW, "hung"]}
"""Of DALI fewer, which is imported by each; a hung disk is told in a line, and does not keep the program."""


@pytest.fixture
def arms(raw_tree: Path, converted: dict[str, Path]) -> list[tuple[str, str]]:
    """(backend, path) of each that can run here."""
    folders = {"raw": raw_tree, **converted}
    here = [arm.values for arm in MAIN_CASES if not any(mark.args[0] for mark in arm.marks)]
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
    runs = [(*arm, ending) for arm in arms for ending in QUICK.get(arm[0], FEW)]
    if times > 1:
        runs = [(*arm, ENDINGS[number % len(ENDINGS)]) for number in range(times) for arm in arms]
    process = start(ENDING, tmp_path)
    said, errors = process.communicate(json.dumps(runs), timeout=7200 if times > 1 else 280)
    assert process.returncode == 0, errors
    assert json.loads(said) == [], "run, exit code, what it said"


MIDWAY = """
import sys
import loaders

reading = loaders.Reading(workers=2)
loader = loaders.build(sys.argv[1], backend="pytorch", size=40, batch_size=4, reading=reading)
iterator = iter(loader)
next(iterator)
print("running", flush=True)
sys.stdin.readline()
"""


# after SIGKILL torch's workers look each 5 s
@pytest.mark.parametrize("by", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_workers_end_with_a_program_that_is_stopped(
    by: signal.Signals, raw_tree: Path, tmp_path: Path
) -> None:
    """Ctrl-C goes to the workers too: one traceback, no orphans."""
    process = start(MIDWAY, tmp_path, raw_tree)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    (os.killpg if by == signal.SIGINT else os.kill)(process.pid, by)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -by, errors
    assert by == signal.SIGKILL or errors.count("Traceback") == 1, errors
    assert psutil.wait_procs(children, timeout=15)[1] == []


@pytest.mark.parametrize(("backend", "kind"), MAIN_CASES[:2])
def test_a_forked_process_needs_a_loader_of_its_own(
    backend: str, kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = {"raw": raw_tree, **converted}[kind]
    settings = {"backend": backend, "size": 40, "batch_size": 8, "workers": 2}
    with build_loader(path, **settings) as loader:
        expected = ids_of(loader)
        loader.set_epoch(0)
        iterator = iter(loader)
        ids = ids_of([next(iterator)])
        child = os.fork()
        if child == 0:
            try:
                with build_loader(path, **settings) as own:
                    assert ids_of(own) == expected
                for use in (next, lambda _: iter(loader)):
                    with pytest.raises(SettingError, match="build it in the process that uses it"):
                        use(iterator)
                loader.close()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert ids + ids_of(iterator) == expected
        with pytest.raises(SettingError, match="build it in the process that uses it"):
            pickle.dumps(loader)
