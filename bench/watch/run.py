"""Running of a user's script with the hook in it: start it, read its events, and end it in time.

`bench.watch.hook` says which events there are, and what a stream, a group and a probe are. The script's
processes and this one share a folder:

    events-PID-TIME.jsonl   events of a process
    hold-PID-STREAM         asks a process to time the steps of a group alone, see `held` there
    probe-PID-STREAM        asks a process to probe a group
    done                    nothing more is needed, because the script is being ended

The run is over once a stream has been steady for long enough, and these two measurements are done.
"""

import contextlib
import json
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
from precache.engines.cpus import available_cpus, throttled_periods
from precache.errors import SettingError, did_you_mean, os_errors_as
from precache.storage.staging import temporary_folder

_INJECT = Path(__file__).parent / "inject"
_POLL_S = 0.3
_GRACE_S = 20.0  # time for a script to write a checkpoint on SIGTERM
_CTRL_C_S = 3.0  # time for a script to end itself on Ctrl-C
_MEASURING_S = 45.0  # limit for holding batches and probing, after which the script is ended anyway


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """Events and exit code of a script that was watched.

    Attributes:
        processes: events of each process, in the order in which they were written.
        code: exit code of the script, as a shell gives it; 0 where bench ended it.
        ended: whether bench ended it.
        interrupted: whether Ctrl-C ended it.
        machine: CPUs of the machine, and their use while the training was steady.
        throttled_share: share, 0 to 1, of the periods of a quota in which it was used up; None without one.
    """

    processes: list[list[Event]]
    code: int
    ended: bool
    interrupted: bool
    machine: Machine
    throttled_share: float | None

    @property
    def failed(self) -> bool:
        """Whether the script ended by itself with an error."""
        return self.code != 0 and not self.ended

    def events(self, kind: str) -> list[Event]:
        """Events of one kind, of all processes."""
        return [event for events in self.processes for event in events if event["event"] == kind]


def command_line(words: Sequence[str], module: str | None) -> list[str]:
    """Make the command that starts a script, a module or a program.

    Args:
        words: script or program and its arguments, as typed.
        module: module to run as `python -m` does; None: `words` begins with a script or a program.

    Raises:
        SettingError: there is no such script, module or program.
    """
    python = shutil.which("python") or sys.executable
    if module is not None:
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
        if subprocess.run([python, "-c", find, module.partition(".")[0]], check=False).returncode:
            raise SettingError(
                f"{python} finds no such module",
                path=f"-m {module}",
                remedy="give one that it can import",
            )
        return [python, "-m", module, *words]
    if not words:
        raise SettingError(
            "no script to watch", remedy="write it as for python: bench watch train.py --epochs 3"
        )
    if os.path.isfile(words[0]) and not (os.access(words[0], os.X_OK) and words[0][-3:] != ".py"):
        return [python, *words]
    if words[0].endswith(".py") or os.sep in words[0] or shutil.which(words[0]) is None:
        hint = did_you_mean(words[0])
        raise SettingError(
            f"no such script or program{hint}",
            path=words[0],
            remedy="name a script, or a program in PATH",
        )
    return list(words)


def watch(
    command: Sequence[str],
    *,
    seconds: float,
    batches: int | None = None,
    whole: bool = False,
    output: Any = None,
) -> WatchedRun:
    """Run a command until it has been steady for long enough, or has ended by itself; Ctrl-C ends it, too.

    Args:
        command: words of the command.
        seconds: seconds of steady batches after which the command is ended.
        batches: number of steady batches to wait for, instead of `seconds`.
        whole: whether the command goes on to its own end.
        output: file for its standard output; None: that of this process.
    """
    with temporary_folder() as folder:
        path = [str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(path), "BENCH_WATCH": str(folder)}
        with os_errors_as(SettingError, f"{command[0]}: cannot be started", "check it"):
            process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=output)
        reader = _Reader(folder)
        progress = _Progress(seconds, batches)
        usage = _Usage()
        interrupted = False
        with _end_after(process, folder):
            try:
                while process.poll() is None and (whole or not progress.is_over):
                    time.sleep(_POLL_S)
                    progress.update(reader.read_new())
                    if progress.is_steady:
                        usage.begin()
                    if progress.is_enough:
                        usage.end()
                        _request_measurements(folder, progress)
            except KeyboardInterrupt:
                interrupted = True
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_CTRL_C_S)  # a terminal sends Ctrl-C to the script, too
            ended = interrupted or process.poll() is None
            (folder / "done").touch()
            usage.end()
        reader.read_new()
        code = 0 if ended else process.returncode
        return WatchedRun(
            processes=reader.processes,
            code=128 - code if code < 0 else code,
            ended=ended,
            interrupted=interrupted,
            machine=_describe_cpus(reader.processes, usage),
            throttled_share=usage.throttled_share,
        )


def _describe_cpus(processes: Sequence[Sequence[Event]], usage: "_Usage") -> Machine:
    """Make the Machine of a script, which may have begun with fewer CPUs than this process has."""
    masks = [event["start"] for events in processes for event in events if event["event"] == "cpus"]
    own = available_cpus()
    machine = Machine(own, usage.script_cpu_share, usage.other_cpu_share)
    return machine.with_cpus(min(own, len(set().union(*masks)) or own))


def _request_measurements(folder: Path, progress: "_Progress") -> None:
    """Write the files that ask all ranks to hold batches, and one process to probe."""
    for pid, stream in progress.to_hold:
        (folder / f"hold-{pid}-{stream}").touch()
    for pid, stream in progress.to_probe:
        (folder / f"probe-{pid}-{stream}").touch()


@contextmanager
def _end_after(process: "subprocess.Popen[bytes]", folder: Path) -> Iterator[None]:
    """End the script and its child processes after the block, also on an error: by SIGTERM, then SIGKILL."""
    try:
        yield
    finally:
        (folder / "done").touch()
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
            process.wait()
            running = [child for child in children if child.is_running()]
            for stop in (psutil.Process.terminate, psutil.Process.kill):
                for child in running:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        stop(child)
                _, running = psutil.wait_procs(running, timeout=3)


class _Reader:
    """Reader of the events that processes append to their files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, tuple[int, list[Event]]] = {}

    @property
    def processes(self) -> list[list[Event]]:
        """Events of each process so far."""
        return [events for _, events in self._read.values()]

    def read_new(self) -> list[tuple[int, Event]]:
        """Return the events that were written since the last call, each with the id of its process."""
        new: list[tuple[int, Event]] = []
        for path in sorted(self._folder.glob("events-*.jsonl")):
            offset, events = self._read.get(path.name, (0, []))
            with open(path, "rb") as file:
                file.seek(offset)
                # without its end, a line is still being written, or its process was killed
                while (line := file.readline()).endswith(b"\n"):
                    offset += len(line)
                    event = json.loads(line)
                    events.append(event)
                    new.append((int(path.name.split("-")[1]), event))
            self._read[path.name] = offset, events
        return new


@dataclass(slots=True)
class _GroupProgress:
    """Progress of a group of loaders in one process.

    Attributes:
        first_stream: number of the group's first stream, by which the group is asked for measurements.
        skip: number of first batches that do not count.
        batches: number of batches so far.
        first_s, last_s: times of the last batch that does not count, and of the latest batch.
        steps: number of steps of optimizers in the process so far.
        trained: number of batches after which an optimizer stepped.
        waited_s: seconds that all batches were waited for.
    """

    first_stream: int
    skip: int
    batches: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    steps: int = 0
    trained: int = 0
    waited_s: float = 0.0

    def add_batch(self, event: Event) -> None:
        """Count a batch."""
        self.batches += 1
        self.last_s = event["got_s"]
        self.waited_s += event["got_s"] - event["asked_s"]
        if event["steps"] > self.steps:
            self.trained += 1
        self.steps = event["steps"]
        if self.batches <= self.skip + 1:
            self.first_s = event["got_s"]

    def is_long_enough(self, seconds: float, batches: int | None) -> bool:
        """Whether enough batches were seen.

        A group after whose batches no optimizer steps may be a validation before the training, so it has to
        last twice as long.
        """
        times = 1 if self.trained > 1 else 2
        steady_batches = self.batches - self.skip
        if steady_batches <= FEWEST * times:
            return False
        if batches is not None:
            return steady_batches > batches * times
        return self.last_s - self.first_s >= seconds * times


@dataclass(slots=True)
class _Progress:
    """Progress of a watched script, from its events: is it steady, were enough batches seen, is it over.

    Attributes:
        seconds, batches: see `watch`.
        groups: progress of each group, by the id of its process and the key of its streams.
        keys: key of each stream, by the id of its process and its number there.
        to_hold: groups to time the steps of, each as the id of its process and its first stream.
        to_probe: groups to time the samples of, each as the id of its process and its first stream.
        missing: measurements that were asked for and are not there yet, each as the kind of the event that
            brings it, the id of the process and the first stream of the group.
        requested_s: time at which they were asked for; 0 before.
    """

    seconds: float
    batches: int | None
    groups: dict[tuple[int, str], _GroupProgress] = field(default_factory=dict)
    keys: dict[tuple[int, int], str] = field(default_factory=dict)
    to_hold: list[tuple[int, int]] = field(default_factory=list)
    to_probe: list[tuple[int, int]] = field(default_factory=list)
    missing: set[tuple[str, int, int]] = field(default_factory=set)
    requested_s: float = 0.0

    def update(self, events: Sequence[tuple[int, Event]]) -> None:
        """Take new events into account, each with the id of its process."""
        for pid, event in events:
            kind = event["event"]
            if kind == "stream":
                self.keys[pid, event["stream"]] = event["key"]
                new_group = _GroupProgress(event["stream"], warm_up(event))
                self.groups.setdefault((pid, event["key"]), new_group)
            elif kind in ("batch", "alone", "parts"):
                group = self.groups[pid, self.keys[pid, event["stream"]]]
                if kind == "batch":
                    group.add_batch(event)
                else:
                    self.missing.discard((kind, pid, group.first_stream))
        if not self.is_enough:
            self._choose_measurements()

    def _choose_measurements(self) -> None:
        """Choose the groups to hold and to probe, once a group is long enough."""
        candidates = {
            pid_and_key: group
            for pid_and_key, group in self.groups.items()
            if group.is_long_enough(self.seconds, self.batches)
        }
        if not candidates:
            return
        self.requested_s = time.monotonic()
        training = {pid_and_key: group for pid_and_key, group in candidates.items() if group.trained > 1}
        if training:
            candidates = training
        keys = {key for _, key in candidates}
        # all ranks at once, because they wait for each other
        self.to_hold = [(pid, group.first_stream) for (pid, key), group in self.groups.items() if key in keys]
        pid, key = max(candidates, key=lambda pid_and_key: candidates[pid_and_key].waited_s)
        self.to_probe = [(pid, candidates[pid, key].first_stream)]
        self.missing = {("alone", pid, stream) for pid, stream in self.to_hold}
        self.missing |= {("parts", pid, stream) for pid, stream in self.to_probe}

    @property
    def is_steady(self) -> bool:
        """Whether a group is beyond its first batches."""
        return any(group.batches > group.skip for group in self.groups.values())

    @property
    def is_enough(self) -> bool:
        """Whether enough batches were seen to know the waits."""
        return self.requested_s > 0

    @property
    def is_over(self) -> bool:
        """Whether the measurements are there, or have taken too long."""
        if not self.is_enough:
            return False
        return not self.missing or time.monotonic() - self.requested_s > _MEASURING_S


class _Usage:
    """Shares of the CPUs that were used, and of throttled periods, from `begin` to the first `end`."""

    def __init__(self) -> None:
        self._processes: OtherProcesses | None = None
        self._periods: dict[Path, tuple[int, int]] = {}
        self.script_cpu_share: float | None = None
        self.other_cpu_share: float | None = None
        self.throttled_share: float | None = None

    def begin(self) -> None:
        """Begin to measure, if that has not begun."""
        if self._processes is None:
            self._processes = OtherProcesses()
            self._periods = throttled_periods()

    def end(self) -> None:
        """End the measurement, if it has begun and not ended."""
        if self._processes is not None and self.other_cpu_share is None:
            self.script_cpu_share, self.other_cpu_share = self._processes.shares()
            for folder, (periods, throttled) in throttled_periods().items():
                before = self._periods.get(folder, (0, 0))
                if periods > before[0]:
                    share = (throttled - before[1]) / (periods - before[0])
                    self.throttled_share = max(self.throttled_share or 0.0, share)
