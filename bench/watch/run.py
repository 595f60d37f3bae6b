"""Starts somebody's script with the hook in it, reads what that writes down, and ends the script in time."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.machine.monitor import OtherProcesses
from bench.report.waiting import FEWEST, Event, Machine, warm_up
from precache.cli import terminal
from precache.engines import available_cpus
from precache.errors import SettingError, did_you_mean, os_errors_as
from precache.storage.records import read_json_lines
from precache.storage.staging import temporary_folder

_INJECT = Path(__file__).parent / "inject"
_POLL_S = 0.3
_GRACE_S = 20.0  # for a script that writes a checkpoint when it is told to end
_CTRL_C_S = 3.0  # for a script that Ctrl-C ends, too
_MEASURING_S = 45.0  # for steps without workers, and for the parts of samples


@dataclass(frozen=True, slots=True)
class Observed:
    """What a script did while it was watched.

    Attributes:
        processes: the events of each process, in the order in which they were written.
        code: its exit code, as a shell says it; 0 where it was ended here.
        ended: whether it was ended here.
        interrupted: whether that was by Ctrl-C.
        machine: the CPUs, and who used them while the training was steady.
    """

    processes: list[list[Event]]
    code: int
    ended: bool
    interrupted: bool
    machine: Machine

    @property
    def failed(self) -> bool:
        """Whether the script ended by itself, and not well."""
        return self.code != 0 and not self.ended

    def all(self, kind: str) -> list[Event]:
        """Events of that kind."""
        return [event for events in self.processes for event in events if event["event"] == kind]


def command_line(words: Sequence[str], module: str | None) -> list[str]:
    """What to start, as it would be typed; SettingError for a script or a module that is not there."""
    python = shutil.which("python") or sys.executable
    if module is not None:
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
        if subprocess.run([python, "-c", find, module.partition(".")[0]], check=False).returncode:
            raise SettingError(f"-m {module}: {python} finds no such module; give one that it can import")
        return [python, "-m", module, *words]
    if not words:
        raise SettingError("no script to watch; write it as for python: bench watch train.py --epochs 3")
    if os.path.isfile(words[0]) and not (os.access(words[0], os.X_OK) and words[0][-3:] != ".py"):
        return [python, *words]
    if words[0].endswith(".py") or os.sep in words[0] or shutil.which(words[0]) is None:
        hint = did_you_mean(words[0])
        raise SettingError(
            f"{words[0]}: no such script or program{hint}; name a script, or a program in PATH"
        )
    return list(words)


def watch(
    command: Sequence[str],
    *,
    seconds: float,
    batches: int | None = None,
    whole: bool = False,
    output: Any = None,
) -> Observed:
    """Run `command` until it has been steady for long enough, or has ended by itself; Ctrl-C ends it, too.

    Args:
        seconds: of steady batches, after which it is ended.
        batches: the same in batches, instead.
        whole: let it go on to its own end.
        output: where its standard output goes; None: where ours goes.
    """
    with temporary_folder() as folder:
        path = [str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        told = {"PYTHONPATH": os.pathsep.join(path), "BENCH_WATCH": str(folder)}
        with os_errors_as(SettingError, f"{command[0]}: cannot be started", "check it"):
            process = subprocess.Popen(command, env={**os.environ, **told}, stdout=output)
        reader = _Reader(folder)
        steady = _Steady(seconds, batches)
        usage = _Usage()
        interrupted = False
        with _ending(process, folder):
            try:
                while process.poll() is None and (whole or not steady.is_over):
                    time.sleep(_POLL_S)
                    steady.take(reader.new())
                    if steady.began:
                        usage.begin()
                    if steady.is_enough:
                        usage.end()
                        _ask_for_more(folder, steady)
            except KeyboardInterrupt:
                interrupted = True
                terminal.pending_interrupts.clear()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_CTRL_C_S)  # a terminal tells the script, too
            ended = interrupted or process.poll() is None
            (folder / "done").touch()
            usage.end()
        reader.new()
        code = 0 if ended else process.returncode
        return Observed(
            processes=reader.processes,
            code=128 - code if code < 0 else code,
            ended=ended,
            interrupted=interrupted,
            machine=Machine(available_cpus(), usage.ours, usage.others),
        )


def _ask_for_more(folder: Path, steady: "_Steady") -> None:
    """Ask the script's processes for the steps alone and, one of them, for the parts of its samples."""
    for pid, stream in steady.to_hold:
        (folder / f"hold-{pid}-{stream}").touch()
    for pid, stream in steady.to_probe:
        (folder / f"probe-{pid}-{stream}").touch()


@contextmanager
def _ending(process: "subprocess.Popen[bytes]", folder: Path) -> Iterator[None]:
    """End the script and all that it started, whatever happens within: first asked, then made to."""
    try:
        yield
    finally:
        (folder / "done").touch()
        started: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            started = {one.pid: one for one in psutil.Process(process.pid).children(recursive=True)}
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
            process.wait()
            left = [one for one in started.values() if one.is_running()]
            for stop in (psutil.Process.terminate, psutil.Process.kill):
                for one in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        stop(one)
                _, left = psutil.wait_procs(left, timeout=3)


class _Reader:
    """Reads the lines that processes append to their files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, tuple[int, list[Event]]] = {}

    @property
    def processes(self) -> list[list[Event]]:
        """All events so far, by process."""
        return [events for _, events in self._read.values()]

    def new(self) -> list[tuple[int, Event]]:
        """Events that were written since the last call, each with the process that wrote it."""
        found: list[tuple[int, Event]] = []
        for path in sorted(self._folder.glob("events-*.jsonl")):
            offset, events = self._read.get(path.name, (0, []))
            with open(path, "rb") as file:
                file.seek(offset)
                for line in read_json_lines(file):
                    offset = line.end
                    events.append(line.content)
                    found.append((int(path.name.split("-")[1]), line.content))
            self._read[path.name] = offset, events
        return found


@dataclass(slots=True)
class _Progress:
    """How far loaders of one place have come, in one process.

    Attributes:
        number: of the first one's stream.
        waited_s: for all batches so far.
    """

    number: int
    skip: int
    seen: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    steps: int = 0
    trained: int = 0
    waited_s: float = 0.0


@dataclass(slots=True)
class _Steady:
    """Tells from the events when there is enough.

    A stream that no optimizer follows may be a validation ahead of training: it has to last twice as long.

    Attributes:
        streams: by process and key.
        to_hold: processes and streams whose steps are to be timed alone.
        to_probe: the one whose samples are to be timed part by part.
    """

    seconds: float
    batches: int | None
    streams: dict[tuple[int, str], _Progress] = field(default_factory=dict)
    keys: dict[tuple[int, int], str] = field(default_factory=dict)
    to_hold: list[tuple[int, int]] = field(default_factory=list)
    to_probe: list[tuple[int, int]] = field(default_factory=list)
    waits_for: set[tuple[str, int, int]] = field(default_factory=set)
    asked_s: float = 0.0

    def take(self, events: Sequence[tuple[int, Event]]) -> None:
        """Look at new events."""
        for pid, event in events:
            kind = event["event"]
            if kind == "stream":
                self.keys[pid, event["stream"]] = event["key"]
                self.streams.setdefault((pid, event["key"]), _Progress(event["stream"], warm_up(event)))
            elif kind == "batch":
                self._take_batch(self.streams[pid, self.keys[pid, event["stream"]]], event)
            elif kind in ("alone", "parts"):
                number = self.streams[pid, self.keys[pid, event["stream"]]].number
                self.waits_for.discard((kind, pid, number))
        if not self.is_enough:
            self._look_whether_enough()

    def _take_batch(self, progress: _Progress, event: Event) -> None:
        progress.seen += 1
        progress.last_s = event["got_s"]
        progress.waited_s += event["got_s"] - event["asked_s"]
        if event["steps"] > progress.steps:
            progress.trained += 1
        progress.steps = event["steps"]
        if progress.seen <= progress.skip + 1:
            progress.first_s = event["got_s"]

    def _look_whether_enough(self) -> None:
        enough = {key: one for key, one in self.streams.items() if self._lasted(one)}
        if not enough:
            return
        self.asked_s = time.monotonic()
        trained = {key: one for key, one in enough.items() if one.trained > 1} or enough
        keys = {key for _, key in trained}  # all ranks: they wait for each other
        self.to_hold = [(pid, one.number) for (pid, key), one in self.streams.items() if key in keys]
        most = max(trained, key=lambda key: trained[key].waited_s)
        self.to_probe = [(most[0], trained[most].number)]
        self.waits_for = {("alone", *one) for one in self.to_hold} | {
            ("parts", *one) for one in self.to_probe
        }

    def _lasted(self, one: _Progress) -> bool:
        times = 1 if one.trained > 1 else 2
        if one.seen - one.skip <= FEWEST * times:
            return False
        if self.batches is not None:
            return one.seen - one.skip > self.batches * times
        return one.last_s - one.first_s >= self.seconds * times

    @property
    def began(self) -> bool:
        """Whether a stream is beyond its first batches."""
        return any(one.seen > one.skip and one.trained for one in self.streams.values())

    @property
    def is_enough(self) -> bool:
        """Whether the waits are known."""
        return self.asked_s > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more is waited for."""
        return self.is_enough and (not self.waits_for or time.monotonic() - self.asked_s > _MEASURING_S)


class _Usage:
    """Who used the CPUs, as shares of them, from `begin` to the first `end`."""

    def __init__(self) -> None:
        self._processes: OtherProcesses | None = None
        self.ours: float | None = None
        self.others: float | None = None

    def begin(self) -> None:
        """The training is steady."""
        if self._processes is None:
            self._processes = OtherProcesses()

    def end(self) -> None:
        """It was watched for long enough, or ends."""
        if self._processes is not None and self.others is None:
            self.ours, self.others = self._processes.shares()
