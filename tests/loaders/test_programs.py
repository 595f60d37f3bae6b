"""Programs that end without closing their loaders, fork, are killed or interrupted."""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from precache.errors import SettingError
from tests.building import build_loader
from tests.command import ROOT
from tests.loader_contract import check_a_fork_shares_no_batch, ids_of
from tests.loaders.cases import MAIN_CASES

# It imports once and forks for each run, which then ends like a program of its own. The augmentation keeps a
# thread inside torch, so that the program ends while it is there.
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


def hang_reading():
    # from the second batch on, reading blocks for ever
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
            output = tempfile.TemporaryFile()
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                os.dup2(output.fileno(), 2)
                return run
            running[child] = run, output, time.monotonic()
        for child, (run, output, start_s) in list(running.items()):
            if time.monotonic() - start_s > 60:
                os.killpg(child, 9)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del running[child]
                output.seek(0)
                text, code = output.read().decode(), os.waitstatus_to_exitcode(status)
                signs = ("Traceback", "Exception ignored", "terminate", "did not stop")
                messages = sum(map(text.count, signs))
                if code != EXPECTED.get(run[2], 0) or messages != (run[2] in ("error", "hung")):
                    failed.append([run, code, text[-2000:]])
        time.sleep(0.002)
    print(json.dumps(failed))


def consume(loader):
    assert sum(len(batch.ids) for _ in range(2) for batch in loader) == 140


gc.collect()
gc.freeze()  # collecting the imported modules at each end would take most of the time
run = supervise(json.load(sys.stdin))
if run is not None:
    backend, path, ending = run
    reading = loaders.Reading(workers=2)
    if ending == "hung":
        reading, hanging = loaders.Reading(workers=0, threads=2), hang_reading()
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
        if backend == "dali":  # locks that its threads hold during the fork would stay locked in the child
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
"""Ends to test by backend; few for DALI, which each child imports. A hung disk ends with one warning."""


@pytest.fixture
def cases(raw_tree: Path, converted: dict[str, Path]) -> list[tuple[str, str]]:
    """(backend, path) of each backend that is installed."""
    folders = {"raw": raw_tree, **converted}
    installed = [case.values for case in MAIN_CASES if not any(mark.args[0] for mark in case.marks)]
    return [(backend, str(folders[kind])) for backend, kind in installed]


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
    times: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    runs = [(*case, ending) for case in cases for ending in QUICK.get(case[0], FEW)]
    if times > 1:
        runs = [(*case, ENDINGS[number % len(ENDINGS)]) for number in range(times) for case in cases]
    process = start(ENDING, tmp_path)
    output, errors = process.communicate(json.dumps(runs), timeout=7200 if times > 1 else 280)
    assert process.returncode == 0, errors
    assert json.loads(output) == [], "run, exit code and stderr of each that failed"


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


# torch's workers check every 5 s whether their parent is alive
@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_workers_end_with_a_program_that_is_stopped(
    sent: signal.Signals, raw_tree: Path, tmp_path: Path
) -> None:
    """Ctrl-C reaches the workers too: there is one traceback, and no orphan."""
    process = start(MIDWAY, tmp_path, raw_tree)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    kill = os.killpg if sent == signal.SIGINT else os.kill
    kill(process.pid, sent)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -sent, errors
    assert sent == signal.SIGKILL or errors.count("Traceback") == 1, errors
    assert psutil.wait_procs(children, timeout=15)[1] == []


@pytest.fixture
def _restored_start_method() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("_restored_start_method")
@pytest.mark.parametrize(
    ("first", "then"),
    [("fork", "spawn"), ("fork", "forkserver"), ("spawn", "fork"), (None, "spawn"), (None, None)],
)
def test_the_start_method_is_the_programs(first: str | None, then: str | None, raw_tree: Path) -> None:
    """It is asked for when the workers start, is not set by this, and changes no picture."""
    multiprocessing.set_start_method(first, force=True)
    settings = {"size": 32, "batch_size": 35, "shuffle": False}
    with build_loader(raw_tree, workers=0, **settings) as loader:
        expected = torch.cat([batch.images for batch in loader])
    with build_loader(raw_tree, workers=1, **settings) as loader:
        assert multiprocessing.get_start_method(allow_none=True) == first
        if then is not None:
            multiprocessing.set_start_method(then, force=first is not None)
        assert torch.equal(torch.cat([batch.images for batch in loader]), expected)
        if then is not None or multiprocessing.get_all_start_methods()[0] == "fork":
            assert multiprocessing.get_start_method(allow_none=True) == then
    if (first, then) == ("fork", "spawn"):
        check_a_fork_shares_no_batch(partial(build_loader, raw_tree, workers=1, size=32))


def test_a_program_without_the_guard_is_shown_it(raw_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import multiprocessing\nimport loaders\nmultiprocessing.set_start_method('spawn', force=True)\n"
        f"next(iter(loaders.build({str(raw_tree)!r}, batch_size=8, reading=loaders.Reading(workers=1))))\n"
    )
    ended = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert 'if __name__ == "__main__":' in ended.stderr.splitlines()[-1], ended.stderr


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
                    with pytest.raises(SettingError, check=lambda error: "process" in error.remedy):
                        use(iterator)
                loader.close()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert ids + ids_of(iterator) == expected
        with pytest.raises(SettingError, check=lambda error: "process" in error.remedy):
            pickle.dumps(loader)
