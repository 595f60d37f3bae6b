"""Programs that end without closing their loaders: with their own exit code, at once and quietly."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.command import ROOT
from tests.loaders.arms import installed_arms

# Imports once and forks for each run, which then ends as a program does that was started by itself. The
# augmentation is inside torch whenever the program ends.
PROGRAM = """
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
QUICK = ["kept", "whole", "error", "thread", "forked"]


def failures(runs: list[tuple[str, str, str]], folder: Path, timeout_s: float) -> list[object]:
    """[run, exit code, what it said] of the runs that did not end as they should."""
    file = folder / "program.py"
    file.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, str(file)],
        input=json.dumps(runs),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    failed: list[object] = json.loads(result.stdout)
    return failed


@pytest.mark.timeout(300)
def test_a_program_that_closes_nothing_ends_with_its_own_exit_code(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    arms = installed_arms(raw_tree, converted)
    # DALI costs a second more: it is imported by each
    runs = [(*arm, ending) for arm in arms for ending in (["kept", "forked"] if arm[0] == "dali" else QUICK)]
    assert failures(runs, tmp_path, 280) == []


@pytest.mark.faults
@pytest.mark.timeout(7200)
def test_two_hundred_programs_of_each_backend_end_with_their_own_exit_code(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    arms = installed_arms(raw_tree, converted)
    runs = [(*arm, ENDINGS[number % len(ENDINGS)]) for number in range(200) for arm in arms]
    assert failures(runs, tmp_path, 7200) == []


PLAIN = """
import atexit, sys, time

atexit.register(lambda: print(time.monotonic() - end_s))  # the first is called last

import torch
import loaders

path, backend = sys.argv[1:]
reading, serving = loaders.Reading(workers=2), loaders.Serving(dtype=torch.float32)
loader = loaders.build(path, backend=backend, size=40, batch_size=4, serving=serving, reading=reading)
iterator = iter(loader)
batch = next(iterator)
print("running", flush=True)
sys.stdin.readline()
end_s = time.monotonic()
"""
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
    )


def test_a_disk_that_does_not_answer_does_not_keep_the_program(raw_tree: Path, tmp_path: Path) -> None:
    process = start(HUNG, tmp_path, raw_tree)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 7, errors
    assert errors.count("\n") == 1
    assert "check the disk or network of the data" in errors


@pytest.mark.parametrize(
    "by", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGKILL"]
)
def test_workers_end_with_a_program_that_is_killed(
    by: signal.Signals, raw_tree: Path, tmp_path: Path
) -> None:
    process = start(PLAIN, tmp_path, raw_tree, "pytorch")
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(by)
    process.communicate(timeout=30)
    assert process.returncode == -by
    _, alive = psutil.wait_procs(children, timeout=15)
    assert alive == []


def test_the_end_waits_for_no_batch(raw_tree: Path, tmp_path: Path) -> None:
    """Worker processes may be long in the middle of one: they are stopped here, and would never finish it."""
    process = start(PLAIN, tmp_path, raw_tree, "pytorch")
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "running\n"
    for child in psutil.Process(process.pid).children(recursive=True):
        child.suspend()
    seconds, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert float(seconds) < 4, "torch alone waits 5 s for each"
