"""Cases in forked processes: one that crashes, hangs or leaks does not touch the next.

A host is a process that imports the module of an attack, stays without threads, and forks a child for each
few cases. It writes a line for each case.
"""

import ctypes
import faulthandler
import fcntl
import importlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.command import ROOT
from tests.faults import shim

HANG_S = 10.0
TRACEBACK = 70  # no exit code of ours
_SAID = "case: "
_PDEATHSIG, _SUBREAPER = 1, 36  # end with the parent; what a child leaves running becomes ours
_prctl = ctypes.CDLL(None).prctl


FAILURES = ("crash", "hang", "traceback", "wrong", "loss")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: `right`, the undisturbed result; `clean`, an error of one line; or one of FAILURES: a process
            that died of a signal, one that took more than ten seconds, an error that is not of this project,
            another result than the undisturbed one, and what is gone or left behind (a file of the user's, a
            Ctrl-C; a thread, a process, a descriptor), or a DST that no later run takes.
        detail: what was done, and what was seen.
    """

    kind: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


RIGHT, CLEAN = Outcome("right"), Outcome("clean")


class Bad(Exception):
    """Raised by a case, with a kind of failure and what was seen."""


def outcome_of(case: Callable[[], Outcome]) -> Outcome:
    """What it returns, or what is raised."""
    try:
        return case()
    except Bad as bad:
        return Outcome(*bad.args)
    except BaseException as error:
        return Outcome("traceback", describe(error))


def describe(error: BaseException) -> str:
    """Kind, message and place of an error, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"


def failures(name: str, outcomes: dict[int, Outcome]) -> list[str]:
    """Of the attack `name`, each with the command that repeats it."""
    return [
        f"{outcome.kind}: python -m tests.faults {name} --seed {seed} --count 1   # {outcome.detail}"
        for seed, outcome in sorted(outcomes.items())
        if outcome.failed
    ]


# name -> (module, cases of the long run; 0: as many as there are calls and errors)
ATTACKS = {
    "kills": ("converting", 1_000),
    "errnos": ("converting", 0),
    "journals": ("converting", 2_000),
    "locks": ("converting", 2_000),
    "pictures": ("pictures", 10_000),
    "folders": ("reading", 10_000),
    "loaders": ("reading", 10_000),
}
NEED_THE_SHIM = ("kills", "errnos", "journals", "locks")


@dataclass(frozen=True, slots=True)
class Attack:
    """What is attacked, and how; each module of ATTACKS has an entry of this kind in its own.

    Attributes:
        prepare: makes in a folder what is attacked, once; what it returns is given to the others.
        case: does one attack, by seed, in a folder of its own.
        warm_host, warm: what each host, and each child that does cases, begins with.
        case_s: how long a case may take.
        chunk: cases that a child does.
    """

    prepare: Callable[[Path], Any]
    case: Callable[[Any, int, Path], Outcome]
    warm_host: Callable[[Any], None] = lambda world: None
    warm: Callable[[Any], None] = lambda world: None
    case_s: float = HANG_S
    chunk: int = 1


def run(name: str, seed: int, count: int, folder: Path, *, jobs: int = 1) -> dict[int, Outcome]:
    """The cases of the attack `name` of the seeds from `seed` on, `jobs` at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",  # a host that has threads should not be forked
        "TQDM_DISABLE": "1",
        "COLUMNS": "200",
    }
    if name in NEED_THE_SHIM:
        environment["LD_PRELOAD"] = str(shim.build(folder))
    command = [sys.executable, "-c", "from tests.faults import nursery; nursery.serve()", name]
    hosts = []
    for host in range(jobs):
        words = [*command, *map(str, (folder, seed, count, host, jobs))]
        hosts.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL))
    try:
        codes = [started.wait() for started in hosts]
    finally:
        for started in hosts:
            started.terminate()
            started.wait()
    outcomes = {}
    for number, code in enumerate(codes):
        if code:
            raise RuntimeError(f"a host ended: {_how(code)}; {(folder / f'host-{number}').read_text()}")
        for line in (folder / f"outcomes-{number}").read_text().splitlines():
            of, *outcome = json.loads(line)
            outcomes[of] = Outcome(*outcome)
    return outcomes


def forked(do: Callable[[], object]) -> int:
    """The id of a new process that does it, and ends with the code that it returns."""
    child = os.fork()
    if child == 0:
        code = TRACEBACK
        try:
            code = do() or 0  # type: ignore[assignment]
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def end_children() -> None:
    """Kill what a case left, and what that had started."""
    me = os.getpid()
    while children := Path(f"/proc/{me}/task/{me}/children").read_text().split():
        for child in map(int, children):
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def say(text: str) -> None:
    """For a case: what it does, should it end badly or not come back."""
    print(_SAID + text, file=sys.stderr, flush=True)


# In the host.


def serve() -> None:
    """What a host does."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    seed, count, host, hosts = map(int, sys.argv[3:])
    log = os.open(folder / f"host-{host}", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, _terminated)
    _prctl(_PDEATHSIG, signal.SIGTERM)
    _prctl(_SUBREAPER, 1, 0, 0, 0)
    attack: Attack = importlib.import_module(f"tests.faults.{ATTACKS[name][0]}").ATTACKS[name]
    with open(folder / "lock", "w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        if not (folder / "world").exists():
            os.waitpid(forked(partial(_make, attack, folder)), 0)
            end_children()
    world = pickle.loads((folder / "world.pickle").read_bytes())
    attack.warm_host(world)
    with open(folder / f"outcomes-{host}", "w") as outcomes:
        for start in range(seed + host * attack.chunk, seed + count, hosts * attack.chunk):
            seeds = list(range(start, min(start + attack.chunk, seed + count)))
            for of, outcome in _run(attack, world, folder, seeds):
                print(json.dumps((of, outcome.kind, outcome.detail)), file=outcomes, flush=True)


def _terminated(number: int, frame: object) -> None:
    end_children()
    os._exit(1)


def _make(attack: Attack, folder: Path) -> None:
    (folder / "world").mkdir()
    (folder / "world.pickle").write_bytes(pickle.dumps(attack.prepare(folder / "world")))


def _run(attack: Attack, world: Any, folder: Path, seeds: list[int]) -> Iterator[tuple[int, Outcome]]:
    """Every case of `seeds`; those that a crash or a hang kept from running run in a further child."""
    while seeds:
        os.ftruncate(1, 0)
        ours, theirs = Pipe(duplex=False)
        child = forked(partial(_run_cases, attack, world, folder, seeds, theirs))
        process, seconds = os.pidfd_open(child), 60.0  # to warm up
        while ours in (ready := wait([ours, process], seconds)):
            if (outcome := ours.recv()) is not None:
                told = Outcome(outcome.kind, f"{_tail()}: {outcome.detail}")
                yield seeds.pop(0), told if outcome.failed else outcome
            seconds = attack.case_s
        if ready:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if seeds:
                yield seeds.pop(0), Outcome("crash", f"{_how(code)} {_tail()}")
        else:
            os.kill(child, signal.SIGUSR1)  # says where it stands
            time.sleep(0.2)
            os.killpg(child, signal.SIGKILL)
            yield seeds.pop(0), Outcome("hang", _tail())
        end_children()
        ours.close()
        theirs.close()
        os.close(process)


def _run_cases(
    attack: Attack, world: Any, folder: Path, seeds: list[int], pipe: "Connection[Any, Any]"
) -> None:
    os.setsid()
    _prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    attack.warm(world)
    pipe.send(None)
    for seed in seeds:
        place = folder / f"case-{seed}"
        place.mkdir()
        pipe.send(outcome_of(partial(attack.case, world, seed, place)))
        if "FAULTS_KEEP" not in os.environ:
            shutil.rmtree(place, ignore_errors=True)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _tail() -> str:
    """What a case that ended badly said, and where its threads stood if it hung."""
    said, *lines = (os.pread(1, 1 << 20, 0).decode(errors="replace").rpartition(_SAID)[2] or "?").splitlines()
    ours = [line.strip() for line in lines if "/precache/" in line or "/loaders/" in line]
    return " | ".join([said, *(ours[:3] or lines[-3:])]).replace(str(ROOT), "")[:400]
