"""Starts somebody's script with the hook in it, reads what that writes down, and ends the script in time."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.report.waiting import Event, warm_up
from precache.engines import available_cpus
from precache.errors import SettingError, did_you_mean
from precache.storage.staging import temporary_folder

_INJECT = Path(__file__).parent / "inject"
_POLL_S = 0.3
_USAGE_S = 3.0  # between two looks at the CPU time
_GRACE_S = 20.0  # for a script that writes a checkpoint when it is told to end
_ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True)
class Observed:
    """What a script did while it was watched.

    Attributes:
        processes: the events of each process, in the order in which they were written.
        code: its exit code, as a shell says it; 0 where it was ended here.
        ended: whether it was ended here.
        busy: share, 0 to 1, of the CPUs that it used while it was steady; None where that is not known.
    """

    processes: list[list[Event]]
    code: int
    ended: bool
    busy: float | None


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
    loader: str | None = None,
    cure: Mapping[str, Any] | None = None,
    output: Any = None,
) -> Observed:
    """Run `command` until it has been steady for long enough, or has ended by itself.

    Args:
        seconds: of steady batches, after which it is ended.
        batches: the same in batches, instead.
        whole: let it go on to its own end.
        loader: MODULE:FUNCTION whose iterator is timed, too.
        cure: what the hook is to change, see `bench.watch.hook`.
        output: where its standard output goes; None: where ours goes.

    Raises:
        SettingError: what `loader` names is not there.
    """
    with temporary_folder() as folder:
        (folder / "config.json").write_text(json.dumps({"cure": cure or {}, "version": 1}))
        environment = _environment(folder, loader, bool(cure))
        try:
            process = subprocess.Popen(command, env=environment, stdout=output)
        except OSError as error:
            raise SettingError(f"{command[0]}: cannot be started ({error.strerror}); check it") from error
        reader = _Reader(folder)
        steady = _Steady(seconds, batches, loader is not None)
        usage = _Usage(process.pid)
        with _ending(process, folder):
            while process.poll() is None:
                time.sleep(_POLL_S)
                steady.take(reader.new())
                if loader is not None and steady.named is False:
                    raise SettingError(
                        f"--loader {loader}: the module has no such function; name one that it defines"
                    )
                if steady.began and not steady.asked_s:
                    usage.look()
                if steady.asks_for_probe:
                    for pid, stream in steady.asks_for_probe:
                        (folder / f"probe-{pid}-{stream}").touch()
                if steady.is_over and not whole:
                    break
            ended = process.poll() is None
            (folder / "done").touch()
        reader.new()
        if loader is not None and steady.named is None and not reader.has("loader"):
            raise SettingError(
                f"--loader {loader}: the script did not import that module; name one that it does"
            )
        code = 0 if ended else process.returncode
        return Observed(reader.processes, 128 - code if code < 0 else code, ended, usage.share)


def _environment(folder: Path, loader: str | None, imports_ours: bool) -> dict[str, str]:
    path = [str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if imports_ours and importlib.util.find_spec("loaders") is not None:
        path.append(str(_ROOT))
    told = {"PYTHONPATH": os.pathsep.join(path), "BENCH_WATCH": str(folder)}
    return {**os.environ, **told, **({"BENCH_WATCH_LOADER": loader} if loader else {})}


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

    def has(self, kind: str) -> bool:
        """Whether there was such an event."""
        return any(event[0] == kind for events in self.processes for event in events)

    def new(self) -> list[tuple[int, Event]]:
        """(pid, event) of what was written since the last call."""
        found: list[tuple[int, Event]] = []
        for path in sorted(self._folder.glob("events-*.jsonl")):
            offset, events = self._read.get(path.name, (0, []))
            with open(path, "rb") as file:
                file.seek(offset)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            new = [json.loads(line) for line in whole.splitlines()]
            self._read[path.name] = offset + len(whole), [*events, *new] if new else events
            found += [(int(path.name.split("-")[1]), event) for event in new]
        return found


@dataclass(slots=True)
class _Progress:
    """Of one stream of one process."""

    skip: int
    can_probe: bool
    seen: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    steps: int = 0
    trained: int = 0


@dataclass(slots=True)
class _Steady:
    """Tells from the events when there is enough.

    A stream that no optimizer follows may be a validation ahead of training: it has to last twice as long.
    """

    seconds: float
    batches: int | None
    has_named: bool
    streams: dict[tuple[int, int], _Progress] = field(default_factory=dict)
    asks_for_probe: list[tuple[int, int]] = field(default_factory=list)
    probed: bool = False
    asked_s: float = 0.0
    named: bool | None = None

    def take(self, events: Sequence[tuple[int, Event]]) -> None:
        """Look at new events."""
        for pid, event in events:
            kind, key = event[0], (pid, event[1])
            if kind == "stream":
                info = event[2]
                self.streams[key] = _Progress(warm_up(info), info["kind"] == "DataLoader")
            elif kind == "batch":
                one = self.streams[key]
                one.seen, one.last_s = one.seen + 1, event[3]
                one.trained += event[4] > one.steps
                one.steps = event[4]
                if one.seen <= one.skip + 1:
                    one.first_s = event[3]
            elif kind == "probe":
                self.probed = True
            elif kind == "loader":
                self.named = bool(event[1])
        enough = [key for key, one in self.streams.items() if self._enough(one)]
        if enough and not self.asks_for_probe:
            self.asks_for_probe = [key for key in enough if self.streams[key].can_probe][:1]
            self.asked_s = time.monotonic()
            self.probed = not self.asks_for_probe

    def _enough(self, one: _Progress) -> bool:
        times = 1 if one.trained > 1 else 2
        if self.batches is not None:
            return one.seen - one.skip > self.batches * times
        return one.last_s - one.first_s >= self.seconds * times

    @property
    def began(self) -> bool:
        """Whether a stream is beyond its first batches."""
        return any(one.seen > one.skip and one.trained for one in self.streams.values())

    @property
    def is_over(self) -> bool:
        """Whether nothing more is waited for; a probe is, for half a minute."""
        return self.asked_s > 0 and (self.probed or time.monotonic() - self.asked_s > 30)


class _Usage:
    """The CPU time of a process and of all that it started, as a share of the CPUs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begin: tuple[float, float] | None = None
        self._looked_s = 0.0
        self.share: float | None = None

    def look(self) -> None:
        """Measure from the first call to this one; not at each call, for that takes time, too."""
        if time.monotonic() - self._looked_s < _USAGE_S:
            return
        (now_s, used_s), self._looked_s = self._now(), time.monotonic()
        if self._begin is None:
            self._begin = now_s, used_s
        elif now_s > self._begin[0]:
            cpus = (used_s - self._begin[1]) / (now_s - self._begin[0])
            self.share = min(1.0, max(0.0, cpus / available_cpus()))

    def _now(self) -> tuple[float, float]:
        total = 0.0
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._pid)
            for one in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += sum(one.cpu_times()[:4])  # its own, and that of those that have ended
        return time.monotonic(), total
