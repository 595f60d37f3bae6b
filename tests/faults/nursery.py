"""Cases in forked processes: one that crashes, hangs or leaks does not touch the next.

A host, `python -m tests.faults.nursery MODULE WORLD`, imports the module of an attack, stays without threads,
and forks a child for each few cases. It reads lines of seeds, and writes a line for each case.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from tests.faults import shim
from tests.faults.tally import Outcome, Tally

ROOT = Path(__file__).resolve().parent.parent.parent
HANG_S = 10.0
_SAID = "case: "
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def run(module: Any, seed: int, count: int, folder: Path, *, jobs: int = 1) -> Tally:
    """The cases of the seeds from `seed` on, `jobs` at a time.

    The module of an attack has `prepare(world)`, which makes in a folder what is attacked, once;
    `load(world)`, which each host calls; `warm(state)`, if each child is to be prepared; and
    `case(state, seed, folder)`. It may say how many seconds a case may take, CASE_S, how many a child does,
    CHUNK, and whether it needs the shim, PRELOAD.
    """
    chunk = getattr(module, "CHUNK", 1)
    chunks = [list(range(s, min(s + chunk, seed + count))) for s in range(seed, seed + count, chunk)]
    chunks.reverse()
    tally = Tally()
    hosts: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for _ in range(min(jobs, len(chunks))):
            host = _start(module, folder)
            assert host.stdout is not None
            hosts[host.stdout.fileno()] = host
            _hand_out(host, chunks)
        while hosts:
            for descriptor in select.select(list(hosts), [], [])[0]:
                _receive(hosts, descriptor, chunks, tally)
    finally:
        for host in hosts.values():
            host.terminate()
            _end(host)
    return tally


def prepare(module: Any, folder: Path) -> Path:
    """Make what is attacked; `run` does this by itself."""
    _end(_start(module, folder))
    return folder / "world"


def _start(module: Any, folder: Path) -> "subprocess.Popen[bytes]":
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",  # a host that has threads should not be forked
        "TQDM_DISABLE": "1",
        "COLUMNS": "200",
    }
    if getattr(module, "PRELOAD", False):
        environment["LD_PRELOAD"] = str(shim.build(folder))
    host = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.nursery", module.__name__, str(folder)],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    assert host.stdout is not None
    if host.stdout.readline() != b"ready\n":
        _end(host)
        raise RuntimeError(f"{module.__name__} could not be prepared; what it says is above")
    return host


def _receive(
    hosts: "dict[int, subprocess.Popen[bytes]]", descriptor: int, chunks: list[list[int]], tally: Tally
) -> None:
    """Take a line of a host: count its case, or give it more to do."""
    host = hosts[descriptor]
    assert host.stdout is not None
    line = host.stdout.readline()
    if not line:
        raise RuntimeError(f"a host ended, with exit code {host.wait()}; what it says is above")
    if line != b"done\n":
        seed, kind, detail = json.loads(line)
        tally.add(seed, Outcome(kind, detail))
    elif not _hand_out(host, chunks):
        del hosts[descriptor]
        _end(host)


def _hand_out(host: "subprocess.Popen[bytes]", chunks: list[list[int]]) -> bool:
    if not chunks:
        return False
    assert host.stdin is not None
    host.stdin.write(json.dumps(chunks.pop()).encode() + b"\n")
    return True


def _end(host: "subprocess.Popen[bytes]") -> None:
    assert host.stdin is not None
    assert host.stdout is not None
    host.stdin.close()
    host.wait()
    host.stdout.close()


# In the host.


def _serve(module: Any, folder: Path) -> None:
    _adopt_orphans()
    signal.signal(signal.SIGTERM, _terminated)
    world = folder / "world"
    if not world.exists():
        draft = folder / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        _in_child(lambda: module.prepare(draft))
        draft.rename(world)
    state = module.load(world)
    print("ready", flush=True)
    for line in sys.stdin:
        for seed, outcome in _run_chunk(module, state, folder, json.loads(line)):
            print(json.dumps((seed, outcome.kind, outcome.detail)), flush=True)
        print("done", flush=True)


def _adopt_orphans() -> None:
    """What a child leaves running becomes ours, to be ended."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _terminated(number: int, frame: object) -> None:
    _end_children()
    os._exit(1)


def _in_child(function: Any) -> None:
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit("the attack could not be prepared")
    _end_children()


def _run_chunk(module: Any, state: Any, folder: Path, seeds: list[int]) -> Iterator[tuple[int, Outcome]]:
    """Every case of `seeds`; those that a crash or a hang kept from running run in a further child."""
    while seeds:
        log = folder / f"{os.getpid()}.log"
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            _run_cases(module, state, folder, seeds, theirs, log)
        os.close(theirs)
        try:
            done = yield from _watch(child, ours, seeds, getattr(module, "CASE_S", HANG_S), log)
        finally:
            os.close(ours)
            _end_children()
        seeds = seeds[done:]


def _run_cases(module: Any, state: Any, folder: Path, seeds: list[int], pipe: int, log: Path) -> None:
    os.setsid()
    _adopt_orphans()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if warm := getattr(module, "warm", None):
        warm(state)
    os.write(pipe, b"[]\n")
    for seed in seeds:
        place = folder / f"case-{seed}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            outcome = module.case(state, seed, place)
        except BaseException as error:
            outcome = Outcome("traceback", describe(error))
        os.write(pipe, json.dumps((seed, outcome.kind, outcome.detail)).encode() + b"\n")
        if "FAULTS_KEEP" not in os.environ:
            shutil.rmtree(place, ignore_errors=True)
    os._exit(0)


def _watch(
    child: int, pipe: int, seeds: list[int], case_s: float, log: Path
) -> Generator[tuple[int, Outcome], None, int]:
    """Yield outcomes as they come; returns for how many of `seeds` there was one."""
    waiting, buffer, deadline = list(seeds), b"", time.monotonic() + 60  # to warm up
    process = os.pidfd_open(child)
    try:
        while True:
            ready, _, _ = select.select([pipe, process], [], [], max(0.0, deadline - time.monotonic()))
            if pipe in ready and (data := os.read(pipe, 1 << 16)):
                *lines, buffer = (buffer + data).split(b"\n")
                for line in filter(None, map(json.loads, lines)):
                    waiting.remove(line[0])
                    yield line[0], Outcome(*line[1:])
                deadline = time.monotonic() + case_s
                continue
            if not ready:
                os.kill(child, signal.SIGUSR1)  # says where it stands
                time.sleep(0.2)
                os.killpg(child, signal.SIGKILL)
                yield waiting.pop(0), Outcome("hang", _tail(log))
            else:
                _, status = os.waitpid(child, 0)
                if waiting:
                    yield waiting.pop(0), Outcome("crash", f"{_how(status)} {_tail(log)}")
            return len(seeds) - len(waiting)
    finally:
        os.close(process)


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def describe(error: BaseException) -> str:
    """Kind, message and place of an error, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"


def say(text: str) -> None:
    """For a case: what it is about to do, should it not come back."""
    print(_SAID + text, file=sys.stderr, flush=True)


def _tail(log: Path) -> str:
    """What a case that ended badly said, or where its threads stood."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    said = [number for number, line in enumerate(lines) if line.startswith(_SAID)]
    lines = [lines[said[-1]].removeprefix(_SAID), *lines[said[-1] + 1 :]] if said else lines
    ours = [line.strip() for line in lines if "/precache/" in line or "/loaders/" in line]
    shown = [*lines[:1], *(ours[:3] or lines[1:][-3:])]
    return " | ".join(line.replace(str(ROOT), "") for line in shown)[:400]


def _end_children() -> None:
    """Kill what a case left, and what that had started."""
    me = os.getpid()
    while True:
        children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
        if not children:
            return
        for child in map(int, children):
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


if __name__ == "__main__":
    _serve(importlib.import_module(sys.argv[1]), Path(sys.argv[2]))
