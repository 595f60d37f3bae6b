"""Loaders over several processes: resumed in a new one, forked, spawned, interrupted."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import loaders
from loaders.read import decoding
from precache.errors import SettingError
from tests.building import build_loader
from tests.command import ROOT
from tests.conftest import IMAGES
from tests.loader_contract import ids_of
from tests.loaders.arms import EACH_ARM, installed_arms
from tests.loaders.test_ranks import launch

RESUME = """
import json, sys
import loaders

if __name__ == "__main__":
    tasks = json.load(sys.stdin)
    rests = []
    for backend, path, state, workers in tasks:
        reading = loaders.Reading(workers=workers)
        with loaders.build(path, backend=backend, size=40, batch_size=8, reading=reading) as loader:
            loader.load_state_dict(state)
            rests.append([[i for batch in loader for i in batch.ids.tolist()] for _ in range(2)])
    json.dump(rests, sys.stdout)
"""
RESUME_RANKS = """
import json, sys
import torch.distributed as dist
import loaders

dist.init_process_group("gloo")
path, state_file, out, batch_size = sys.argv[1:]
with loaders.build(path, batch_size=int(batch_size), reading=loaders.Reading(workers=1)) as loader:
    if state_file == "none":
        served = [batch.ids.tolist() for batch in loader]
        iterator = iter(loader)
        next(iterator), next(iterator)
        with open(f"{out}/state{dist.get_rank()}.json", "w") as file:
            json.dump(loader.state_dict(), file)
        served = [batch.ids.tolist() for batch in iterator]
    else:
        loader.load_state_dict(json.load(open(state_file)))
        served = [batch.ids.tolist() for batch in loader]
with open(f"{out}/{dist.get_rank()}.json", "w") as file:
    json.dump(served, file)
dist.destroy_process_group()
"""
DROP_IN_A_CHILD = """
import gc, os, sys
import loaders

loader = loaders.build(sys.argv[1], size=40, batch_size=8, reading=loaders.Reading(workers=2))
expected = len(list(loader))
for running in (False, True):
    iterator = iter(loader)
    if running:
        next(iterator)
    else:  # the workers wait, no thread reads ahead
        loader._drop_ahead()
    child = os.fork()
    if child == 0:
        del loader, iterator
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == expected - running
loader.close()
"""
START_METHOD = """
import sys
import torch.multiprocessing
import loaders

if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    with loaders.build(sys.argv[1], size=40, batch_size=16, reading=loaders.Reading(workers=2)) as loader:
        for _ in range(2):
            assert sorted(i for batch in loader for i in batch.ids.tolist()) == list(range(70))
"""
ENDLESS = """
import signal, sys, time
import loaders

if __name__ == "__main__":
    # it is ignored where a shell started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    backend, path = sys.argv[1:]
    loader = loaders.build(path, backend=backend, size=40, batch_size=8, reading=loaders.Reading(workers=2))
    while True:
        for number, batch in enumerate(loader):
            time.sleep(0.005)
        print("epoch", flush=True)
"""
PROCESS_S = 60


def build(backend: str, path: Path, **settings: Any) -> loaders.Loader:
    return build_loader(path, **{"backend": backend, "size": 40, "batch_size": 8, "workers": 2, **settings})


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


def test_a_state_goes_on_in_a_new_process_with_any_number_of_workers(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    tasks, expected = [], []
    for backend, path in installed_arms(raw_tree, converted):
        with build(backend, Path(path)) as loader:
            list(loader)
            iterator = iter(loader)
            ids_of(next(iterator) for _ in range(3))
            state = loader.state_dict()
            rest, following = ids_of(iterator), ids_of(loader)
        for workers in (0, 1, 3):
            tasks.append([backend, path, state, workers])
            expected.append([rest, following])
    process = start(RESUME, tmp_path)
    out, errors = process.communicate(json.dumps(tasks), timeout=PROCESS_S)
    assert process.returncode == 0, errors
    for task, rests, due in zip(tasks, json.loads(out), expected, strict=True):
        assert rests == due, task


@pytest.mark.slow
def test_a_state_of_two_ranks_goes_on_with_one_and_with_four(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    """The global batch is 8 in all three worlds."""
    due: set[int] = set()
    for world_size, state in ((2, "none"), (1, "state0.json"), (4, "state1.json")):
        state_file = state if state == "none" else tmp_path / state
        launch(RESUME_RANKS, world_size, tmp_path, converted["shards"], state_file, tmp_path, 8 // world_size)
        served = [
            i
            for rank in range(world_size)
            for batch in json.loads((tmp_path / f"{rank}.json").read_text())
            for i in batch
        ]
        due = due or set(served)
        assert len(served) == len(set(served)) == IMAGES - 16
        assert set(served) == due
    states = [json.loads((tmp_path / f"state{rank}.json").read_text()) for rank in range(2)]
    assert states[0] == states[1]


def serve_one_epoch(backend: str, path: Path, results: Any) -> None:
    with build(backend, path) as loader:
        results.put(ids_of(loader))


def use_inherited(loader: loaders.Loader, iterator: Any, results: Any) -> None:
    messages = []
    for use in (lambda: next(iterator), lambda: iter(loader)):
        try:
            use()
            messages.append("no error")
        except SettingError as error:
            messages.append(str(error))
    loader.close()
    results.put(messages)


def result_of(method: str, function: Any, *arguments: Any) -> Any:
    """What `function` puts into its queue, run in a process that has to end by itself."""
    context: Any = multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=function, args=(*arguments, results))
    process.start()
    try:
        result = results.get(timeout=PROCESS_S)
        process.join(PROCESS_S)
        assert process.exitcode == 0
        return result
    finally:
        process.kill()


@pytest.mark.parametrize(("backend", "kind"), EACH_ARM)
def test_a_forked_process_builds_its_own_loader_and_leaves_the_parents_alone(
    backend: str, kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = raw_tree if kind == "raw" else converted[kind]
    with build(backend, path) as loader:
        expected = ids_of(loader)
        loader.set_epoch(0)
        iterator = iter(loader)
        ids = ids_of([next(iterator)])
        assert result_of("fork", serve_one_epoch, backend, path) == expected
        for message in result_of("fork", use_inherited, loader, iterator):
            assert "build it in the process that uses it" in message
            assert "\n" not in message
        assert ids + ids_of(iterator) == expected


def test_a_forked_process_that_drops_its_copy_leaves_the_parents_workers(
    raw_tree: Path, tmp_path: Path
) -> None:
    process = start(DROP_IN_A_CHILD, tmp_path, raw_tree)
    _, errors = process.communicate(timeout=PROCESS_S)
    assert (process.returncode, errors) == (0, "")


class Inherited:
    """Garbage that says where it was collected."""

    def __init__(self, said: Path) -> None:
        self.itself, self.said, self.made_in = self, said, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.made_in:
            self.said.touch()


def test_a_worker_collects_nothing_that_it_has_from_its_parent(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its finaliser might wait for a thread that is not there. What the parent has put aside stays so."""
    load = decoding.read

    def collect_and_load(*arguments: Any) -> Any:
        gc.collect()
        return load(*arguments)

    monkeypatch.setattr(decoding, "read", collect_and_load)
    gc.collect()
    gc.freeze()
    put_aside = gc.get_freeze_count()
    gc.disable()
    try:
        Inherited(tmp_path / "collected in a worker")
        with build("pytorch", raw_tree, workers=1) as loader:
            next(iter(loader))
            assert not gc.isenabled()
    finally:
        gc.enable()
    assert list(tmp_path.iterdir()) == []
    assert gc.get_freeze_count() > put_aside / 2
    with build("pytorch", raw_tree, workers=1) as loader:
        next(iter(loader))
        assert gc.isenabled()


@pytest.mark.parametrize(
    ("backend", "kind"),
    [pytest.param("pytorch", "raw", marks=pytest.mark.slow), ("shards", "shards")],
)
def test_a_spawned_process_builds_its_own_loader(
    backend: str, kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = raw_tree if kind == "raw" else converted[kind]
    with build(backend, path) as loader:
        expected = ids_of(loader)
        assert result_of("spawn", serve_one_epoch, backend, path) == expected
        with pytest.raises(SettingError, match="build it in the process that uses it"):
            result_of("spawn", use_inherited, loader, None)


@pytest.mark.slow
def test_workers_may_be_spawned(raw_tree: Path, tmp_path: Path) -> None:
    process = start(START_METHOD, tmp_path, raw_tree)
    _, errors = process.communicate(timeout=PROCESS_S)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


INTERRUPTS = [
    pytest.param(to, *arm.values, marks=arm.marks if quick else [*arm.marks, pytest.mark.slow])
    for arm in EACH_ARM
    for to in ("group", "process")
    for quick in [to == "group" and arm.values[0] == "pytorch"]  # it has workers
]


@pytest.mark.parametrize(("sent_to", "backend", "kind"), INTERRUPTS)
def test_interrupting_ends_the_program_and_its_workers(
    sent_to: str, backend: str, kind: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """`kill -INT`, and Ctrl-C, which a terminal sends to the workers too: one traceback, no orphans."""
    process = start(ENDLESS, tmp_path, backend, raw_tree if kind == "raw" else converted[kind])
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "epoch\n"
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
        if sent_to == "group":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGINT, errors
        assert errors.count("Traceback") == 1, errors
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
