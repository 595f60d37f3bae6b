"""Run the cases of attacks in forked processes: one that crashes, hangs or leaks does not affect the next.

A host is a process that imports the module of an attack, has no threads, and forks a child for every few
cases. It writes a line for each case.
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
TRACEBACK = 70  # exit code of a child with an unexpected error; the commands have no such code
_ANNOUNCEMENT = "case: "
# Options of prctl: end with the parent; adopt the processes that children leave running.
_PDEATHSIG, _SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl


FAILURES = ("crash", "hang", "traceback", "wrong", "loss")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a case.

    Attributes:
        kind: `right`, the undisturbed result; `clean`, an error of one line; or one of FAILURES: `crash`, a
            process that died of a signal; `hang`, one that took more than ten seconds; `traceback`, an error
            that is not of this project; `wrong`, another result than the undisturbed one; `loss`, something
            that is gone or left behind (a file of the user's, a Ctrl-C; a thread, a process, a descriptor),
            or a DST that no later run takes.
        detail: the actions of the case, and what was observed.
    """

    kind: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether the kind is one of FAILURES."""
        return self.kind in FAILURES


RIGHT, CLEAN = Outcome("right"), Outcome("clean")


class CaseFailure(Exception):
    """A case has failed; its arguments are the kind of failure, and what was observed."""


def run_case(case: Callable[[], Outcome]) -> Outcome:
    """Run a case; an error that it raises becomes an Outcome."""
    try:
        return case()
    except CaseFailure as failure:
        return Outcome(*failure.args)
    except BaseException as error:
        return Outcome("traceback", describe(error))


def describe(error: BaseException) -> str:
    """Describe an error on one line: its type, message and place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"


def failures(name: str, outcomes: dict[int, Outcome]) -> list[str]:
    """List the failures of attack `name`, each with the command that repeats it."""
    return [
        f"{outcome.kind}: python -m tests.faults {name} --seed {seed} --count 1   # {outcome.detail}"
        for seed, outcome in sorted(outcomes.items())
        if outcome.failed
    ]


# name -> (module, cases of the long run; 0: every error at every system call)
ATTACKS = {
    "kills": ("converting", 1_000),
    "errnos": ("converting", 0),
    "sidecars": ("converting", 2_000),
    "locks": ("converting", 2_000),
    "pictures": ("pictures", 10_000),
    "folders": ("reading", 10_000),
    "loaders": ("reading", 10_000),
}
NEED_THE_SHIM = ("kills", "errnos", "sidecars", "locks")


@dataclass(frozen=True, slots=True)
class Attack:
    """Description of an attack; each module of ATTACKS has a dictionary of its own attacks.

    Attributes:
        prepare: makes, once, the data that is attacked in a folder, and returns a setup for the others.
        case: runs the case of a seed in a folder of its own.
        prepare_host: called at the start of each host.
        prepare_child: called at the start of each child that runs cases.
        case_s: longest time of a case.
        chunk: cases of each child.
    """

    prepare: Callable[[Path], Any]
    case: Callable[[Any, int, Path], Outcome]
    prepare_host: Callable[[Any], None] = lambda setup: None
    prepare_child: Callable[[Any], None] = lambda setup: None
    case_s: float = HANG_S
    chunk: int = 1


def run(name: str, seed: int, count: int, folder: Path, *, jobs: int = 1) -> dict[int, Outcome]:
    """Run `count` cases of attack `name`, from `seed` on, `jobs` at a time; return outcomes by seed."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",  # a process with threads should not fork
        "TQDM_DISABLE": "1",
        "COLUMNS": "200",
    }
    if name in NEED_THE_SHIM:
        environment["LD_PRELOAD"] = str(shim.build(folder))
    command = [sys.executable, "-c", "from tests.faults import runner; runner.serve()", name]
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
            raise RuntimeError(f"a host ended: {_end_of(code)}; {(folder / f'host-{number}').read_text()}")
        for line in (folder / f"outcomes-{number}").read_text().splitlines():
            case_seed, *fields = json.loads(line)
            outcomes[case_seed] = Outcome(*fields)
    return outcomes


def fork(function: Callable[[], object]) -> int:
    """Call `function` in a new process, which ends with the exit code that it returns; return its id."""
    child = os.fork()
    if child == 0:
        code = TRACEBACK
        try:
            code = function() or 0  # type: ignore[assignment]
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def end_children() -> None:
    """Kill the processes that a case has left, and their descendants."""
    me = os.getpid()
    while children := Path(f"/proc/{me}/task/{me}/children").read_text().split():
        for child in map(int, children):
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def announce(text: str) -> None:
    """Print what a case does; it becomes part of the outcome if the case fails or does not return."""
    print(_ANNOUNCEMENT + text, file=sys.stderr, flush=True)


# The functions below run in a host.


def serve() -> None:
    """Run the host that the command line describes: its share of the cases, one child after another."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    seed, count, host, hosts = map(int, sys.argv[3:])
    log = os.open(folder / f"host-{host}", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, _end_host)
    _prctl(_PDEATHSIG, signal.SIGTERM)
    _prctl(_SUBREAPER, 1, 0, 0, 0)
    attack: Attack = importlib.import_module(f"tests.faults.{ATTACKS[name][0]}").ATTACKS[name]
    with open(folder / "lock", "w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not (folder / "setup").exists():
            os.waitpid(fork(partial(_prepare, attack, folder)), 0)
            end_children()
    setup = pickle.loads((folder / "setup.pickle").read_bytes())
    attack.prepare_host(setup)
    with open(folder / f"outcomes-{host}", "w") as outcomes:
        for start in range(seed + host * attack.chunk, seed + count, hosts * attack.chunk):
            seeds = list(range(start, min(start + attack.chunk, seed + count)))
            for case_seed, outcome in _run(attack, setup, folder, seeds):
                line = json.dumps((case_seed, outcome.kind, outcome.detail))
                print(line, file=outcomes, flush=True)


def _end_host(number: int, frame: object) -> None:
    end_children()
    os._exit(1)


def _prepare(attack: Attack, folder: Path) -> None:
    (folder / "setup").mkdir()
    (folder / "setup.pickle").write_bytes(pickle.dumps(attack.prepare(folder / "setup")))


def _run(attack: Attack, setup: Any, folder: Path, seeds: list[int]) -> Iterator[tuple[int, Outcome]]:
    """Run the cases of `seeds` in a child; after a crash or a hang the rest runs in a further child."""
    while seeds:
        os.ftruncate(1, 0)
        receiver, sender = Pipe(duplex=False)
        child = fork(partial(_run_cases, attack, setup, folder, seeds, sender))
        process, seconds = os.pidfd_open(child), 60.0  # until the child is ready
        while receiver in (ready := wait([receiver, process], seconds)):
            outcome = receiver.recv()
            if outcome is not None:  # else the child is ready
                if outcome.failed:
                    outcome = Outcome(outcome.kind, f"{_log_summary()}: {outcome.detail}")
                yield seeds.pop(0), outcome
            seconds = attack.case_s
        if ready:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if seeds:
                yield seeds.pop(0), Outcome("crash", f"{_end_of(code)} {_log_summary()}")
        else:
            os.kill(child, signal.SIGUSR1)  # faulthandler prints the stacks
            time.sleep(0.2)
            os.killpg(child, signal.SIGKILL)
            yield seeds.pop(0), Outcome("hang", _log_summary())
        end_children()
        receiver.close()
        sender.close()
        os.close(process)


def _run_cases(
    attack: Attack, setup: Any, folder: Path, seeds: list[int], pipe: "Connection[Any, Any]"
) -> None:
    os.setsid()
    _prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    attack.prepare_child(setup)
    pipe.send(None)
    for seed in seeds:
        place = folder / f"case-{seed}"
        place.mkdir()
        pipe.send(run_case(partial(attack.case, setup, seed, place)))
        if "FAULTS_KEEP" not in os.environ:
            shutil.rmtree(place, ignore_errors=True)


def _end_of(code: int) -> str:
    """Describe the end of a process: its exit code, or the name of the signal."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _log_summary() -> str:
    """Summarise the log of a failed case: its announcement, and the stacks of its threads if it hung."""
    log = os.pread(1, 1 << 20, 0).decode(errors="replace")
    announcement, *lines = (log.rpartition(_ANNOUNCEMENT)[2] or "?").splitlines()
    frames = [line.strip() for line in lines if "/precache/" in line or "/loaders/" in line]
    return " | ".join([announcement, *(frames[:3] or lines[-3:])]).replace(str(ROOT), "")[:400]
