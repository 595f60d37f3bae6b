"""The engine `local`: worker processes of this machine, or the calling process.

A picture can kill its worker: one that takes all memory, or that makes a decoder crash. So a task records
which unit it begins, in memory that outlives the worker, and is tried again. A unit that killed two workers
is left out, and the rest of its task is done. The engine `ray` runs this one on the node to find such a unit.

A worker is a new Python, whatever the program has imported. It imports `precache`, and the program's main
module only if what it is sent was defined there; so `if __name__ == "__main__":` is needed only then. A start
takes 0.35 s of CPU time, and 30 MB that are not shared: two workers are ready after 0.4 s. In a script that
imports torch, too, where multiprocessing's workers, which import the script again, take 2.4 s (spawn) or 2 s
(forkserver) and 280 MB each. (2 CPUs of an AMD EPYC.) And a program has one fork server, and one start method
of multiprocessing, which are its own to set.

`concurrent.futures.ProcessPoolExecutor` does not do: if a worker is killed while it sends a result, the pool
waits for the rest of the result forever; and when one worker dies, it ends the others too, so that all their
tasks are done again. Here each worker has a pipe of its own, whose end says that the worker is gone.
"""

import ctypes
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import process, spawn
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NamedTuple, TypeVar

from precache.engines.cpus import available_cpus
from precache.errors import (
    PrecacheError,
    SettingError,
    WorkerError,
    check_open_files,
    check_range,
    os_reason,
    thread_errors,
)
from precache.pictures import large_pictures

Task = TypeVar("Task")

KILLED = "killed the process that decoded it, twice; perhaps memory ran out"
"""Reason in the list of rejects of a picture that was in `Ticks.fatal`."""

# A task fails after more deaths of its workers than this, not counting deaths over units that are left out.
_MAX_DEATHS = 2
_MAX_FATAL = 16  # units of a task that are left out, at most

_REPORT_S = 0.1  # how often progress is reported
_NO_UNIT = -1
_MFD_CLOEXEC = 1  # https://man7.org/linux/man-pages/man2/memfd_create.2.html
_REMEDY = (
    "use workers=0, or define its class at the top of a module, and leave open files out in __getstate__"
)
_PROGRAM = """
import sys
numbers, sys.path = sys.argv[1:5], sys.argv[5:]
from precache.engines.processes import serve
serve(*map(int, numbers))
"""
"""Program of a worker: its arguments are those of `serve`, then the program's path of modules."""


def worker_count(workers: int | None, least: int = 0) -> int:
    """Return `workers`, or one per CPU for None.

    Raises:
        SettingError: it is less than `least`; or this process is a worker that still imports the program's
            main module, and would wait for what its parent does, or start workers without end.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise _guard_error()
    if workers is None:
        return available_cpus()
    try:
        return check_range("workers", workers, least)
    except SettingError as error:
        zero = "0 works in this process; " if least == 0 else ""
        raise SettingError(
            str(error), remedy=f"{zero}the default is one per CPU ({available_cpus()})"
        ) from None


class Ticks:
    """Receiver of the progress of a task, which may number its units as it likes.

    Attributes:
        fatal: units that killed two workers, which the task must leave out.
    """

    fatal: frozenset[int] = frozenset()

    def begin(self, unit: int | None) -> None:
        """Record which unit comes next, which is to blame if the worker dies; None: no unit is."""

    def __call__(self) -> None:
        """Count one more unit as done."""


@dataclass(slots=True, eq=False)
class _RetriedTask:
    """A task, and the deaths of its workers.

    Attributes:
        deaths: unit -> number of workers that died over it; None is an unknown unit.
        fatal: units that killed two workers.
    """

    task: Any
    deaths: Counter[int | None] = field(default_factory=Counter)
    fatal: frozenset[int] = frozenset()

    def blame(self, unit: int | None, exit_status: str) -> None:
        """Record that a worker died over `unit`; WorkerError if another try makes no sense."""
        self.deaths[unit] += 1
        if unit is not None and self.deaths[unit] == 2 and len(self.fatal) < _MAX_FATAL:
            self.fatal |= {unit}
            return
        others = sum(times for unit, times in self.deaths.items() if unit not in self.fatal)
        if self.deaths[unit] > 1 or others > _MAX_DEATHS:
            times = sum(self.deaths.values())
            raise repeated_failure_error(self.task, "its worker died", times, exit_status)


def repeated_failure_error(task: Any, failure: str, times: int, detail: str) -> WorkerError:
    """Return the error for a task that has had a `failure`, such as 'its worker died', too often."""
    return WorkerError(
        f"{task_name(task)}: {failure} {times} times ({detail})",
        remedy="run the same command again, with fewer --workers if memory is short: a conversion continues "
        "where it stopped",
    )


def task_name(task: Any) -> str:
    """Return the name of a task in errors: its `name`, if it has one."""
    name = str(getattr(task, "name", task))
    return name if len(name) <= 100 else f"{name[:99]}…"


def run(
    function: Callable[[Task, Ticks], Any],
    tasks: Iterable[Task],
    workers: int,
    on_progress: Callable[[int], None],
    *,
    check: object = None,
) -> Generator[Any, None, None]:
    """Yield `function(task, tick)` for each task as soon as it is done, in any order.

    `function` calls `tick()` once per unit of progress. Its exceptions are raised here. Leaving the iterator,
    by an exception or by closing it, ends the workers at once.

    A task whose worker died is tried again. If `function` calls `tick.begin(unit)` before each unit, a
    unit over which a second worker dies is in `tick.fatal` from then on.

    Args:
        function: does a task, in a worker.
        tasks: taken one by one as workers become free; errors name a task by its `name`, if it has one.
        workers: processes; 0 for the calling process.
        on_progress: called with the units done since its last call; the number is negative when the units
            of a dead worker must be done again.
        check: of engines on other machines; not used here.

    Raises:
        WorkerError: the workers of a task died too often, and not over the same unit.
    """
    if workers > 0:
        yield from _run_in_processes(function, tasks, workers, on_progress)
        return
    for task in tasks:
        yield function(task, _CallerTicks(on_progress))


def _run_in_processes(
    function: Callable[[Task, Ticks], Any],
    tasks: Iterable[Task],
    workers: int,
    on_progress: Callable[[int], None],
) -> Generator[Any, None, None]:
    _check_can_start()
    tasks = iter(tasks)
    first_tasks = list(islice(tasks, workers))
    new_tasks = map(_RetriedTask, chain(first_tasks, tasks))
    retries: deque[_RetriedTask] = deque()
    busy: list[_Worker] = []
    answers: list[_Answer] = []
    with ExitStack() as started:
        with _explain_failed_start():
            work = started.enter_context(_memory_file())
        _write_work(work, function)
        # all before the first task, because sending one may wait until its worker can read it
        idle = [started.enter_context(_Worker(work)) for _ in first_tasks]
        while True:
            while idle:
                task = retries.popleft() if retries else next(new_tasks, None)
                if task is None:
                    break
                worker = idle.pop()
                busy.append(worker)
                worker.start(task)
            for answer in answers:  # after the workers have new tasks, so that none waits for the caller
                if answer.error is not None:
                    raise answer.error
                yield answer.result
            if not busy:
                return
            wait([worker.connection for worker in busy], _REPORT_S)
            answers = []
            for worker in list(busy):
                new_answer = worker.receive()
                if units := worker.new_units():
                    on_progress(units)
                if worker.is_dead:
                    busy.remove(worker)
                    worker.task.blame(worker.unit, worker.end())
                    retries.append(worker.task)
                    idle.append(started.enter_context(_Worker(work)))
                elif new_answer is not None:
                    busy.remove(worker)
                    idle.append(worker)
                    answers.append(new_answer)


class _CallerTicks(Ticks):
    """Progress of tasks that run in the calling process."""

    def __init__(self, on_progress: Callable[[int], None]) -> None:
        self._on_progress = on_progress

    def __call__(self) -> None:
        self._on_progress(1)


class _Answer(NamedTuple):
    """Answer of a worker to a task: its result, or the error."""

    result: Any = None
    error: Exception | None = None


class _LogMessage(NamedTuple):
    """Message that a worker logged, which the parent logs."""

    logger: str
    level: int
    text: str


class _LogSender(logging.Handler):
    """Sends what a worker logs to its parent, which has the program's handlers."""

    def __init__(self, send: Callable[[_LogMessage], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(_LogMessage(record.name, record.levelno, self.format(record)))
        except Exception:  # the arguments do not fit the message, which is no fault of the picture
            self.handleError(record)


class _SharedProgress(ctypes.Structure):
    """Progress of a worker, in memory that outlives it; writing to it costs no system call."""

    _fields_ = (("unit", ctypes.c_longlong), ("done", ctypes.c_longlong))
    unit: int
    done: int


class _Worker:
    """A process that does one task after another.

    Attributes:
        task: the task that it does, or did last.
        connection: pipe that becomes readable when there is an answer, or the process is dead.
        is_dead: whether the process has ended by itself.
    """

    task: _RetriedTask
    connection: "Connection[Any, Any]"

    def __init__(self, work: IO[bytes]) -> None:
        self.is_dead = False
        self._reported = 0
        with _explain_failed_start():
            self.connection, worker_end = multiprocessing.Pipe()
            with worker_end, _memory_file() as memory:
                self._shared = _map_progress(memory.fileno())
                descriptors = (worker_end.fileno(), memory.fileno(), work.fileno())
                with _block_interrupts():  # on Ctrl-C this process ends the run
                    self._process = subprocess.Popen(
                        [*_interpreter(), _PROGRAM, *map(str, (os.getpid(), *descriptors, *_module_path()))],
                        pass_fds=descriptors,
                        # a program that was started without stdin has another file there
                        stdin=None if 0 in descriptors else subprocess.DEVNULL,
                        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # NumPy's threads would only idle
                    )

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def unit(self) -> int | None:
        """Unit that the worker is at, if it is known."""
        return None if self._shared.unit == _NO_UNIT else self._shared.unit

    def start(self, task: _RetriedTask) -> None:
        """Send a task to the worker, which skips the task's fatal units."""
        self.task = task
        self._reported = 0
        self._shared.unit, self._shared.done = _NO_UNIT, 0
        try:
            self.connection.send((task.task, task.fatal))
        except OSError:
            pass  # the worker is dead, which `receive` will find
        except Exception as error:  # pickling runs other people's code
            raise unpicklable_error(error, "worker processes", _REMEDY) from error

    def receive(self) -> _Answer | None:
        """Return the worker's answer, if there is one, and note whether the worker is dead."""
        try:
            if self.connection.poll():
                message: _Answer | _LogMessage = self.connection.recv()
                if isinstance(message, _Answer):
                    return message
                logging.getLogger(message.logger).log(message.level, "%s", message.text)
                return None
            # the end of the pipe is not enough: a process that the worker forked may hold it open
            self.is_dead = self._process.poll() is not None and not self.connection.poll()
        except (EOFError, OSError):  # the worker's end closed, perhaps in the middle of an answer
            self.is_dead = True
        return None

    def new_units(self) -> int:
        """Return the units done since the last call; once the worker is dead, minus those of its task."""
        done = 0 if self.is_dead else self._shared.done
        units = done - self._reported
        self._reported = done
        return units

    def end(self) -> str:
        """End the process, if it lives, and return its exit status in words."""
        self._process.kill()
        code = self._process.wait()
        self.connection.close()
        if code == 1:  # an error ended it before it had a task
            return "exit code 1; it has printed why"
        return f"exit code {code}; -9 means killed, often because memory ran out"


def _check_can_start() -> None:
    """Raise SettingError where no worker process can be started."""
    if sys.platform == "win32":
        raise SettingError("worker processes need Linux or macOS", remedy="use WSL, or workers=0")
    if not spawn.get_executable():
        raise SettingError(
            "no worker process can be started: this program has Python built in (sys.executable is empty)",
            remedy="use workers=0, or name a Python by multiprocessing.set_executable",
        )


def _interpreter() -> list[str]:
    """Return the words of a command that runs a program in this Python, with the flags of this process."""
    return spawn.get_command_line()[:-2]  # which ends with multiprocessing's program, and a flag for it


def _module_path() -> Iterator[str]:
    """Yield the program's path of modules; '' is the working folder, and was the one that it began in."""
    began_in = process.ORIGINAL_DIR  # type: ignore[attr-defined]
    for folder in sys.path:
        yield folder
        if not folder and began_in is not None:
            yield began_in


def _memory_file() -> IO[bytes]:
    """Return a new file that two processes can map: in memory, or where systems cannot, a temporary one."""
    return open_memory() or tempfile.TemporaryFile()


def open_memory() -> IO[bytes] | None:
    """Return a new file in memory, which two processes can map; None where the system has none."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("precache"), "r+b")
    try:  # a Python that was built for an older Linux, as conda's
        descriptor = ctypes.CDLL(None).memfd_create(b"precache", _MFD_CLOEXEC)
    except AttributeError:
        return None
    return open(descriptor, "r+b") if descriptor >= 0 else None


def _map_progress(file: int) -> _SharedProgress:
    """Map the progress of a worker, whose memory is the open `file`."""
    size = ctypes.sizeof(_SharedProgress)
    os.truncate(file, size)
    return _SharedProgress.from_buffer(mmap.mmap(file, size))


@contextmanager
def _explain_failed_start() -> Iterator[None]:
    """Raise WorkerError for an OSError of the block, which starts workers."""
    try:
        yield
    except OSError as error:
        check_open_files(error, error.filename)
        raise WorkerError(
            f"no worker process can be started ({os_reason(error)})",
            remedy="run the same command again with fewer --workers; 0 needs none",
        ) from error


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the end of the block; processes started in the block never get it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write_work(file: IO[bytes], function: Callable[..., Any]) -> None:
    """Write what workers do into a file, which `_read_work` reads."""
    try:
        pickled = pickle.dumps(function)
    except Exception as error:  # pickling runs other people's code
        raise unpicklable_error(error, "worker processes", _REMEDY) from error
    # a process of multiprocessing's names the module __mp_main__
    pickle.dump((_main_module() if b"_main__" in pickled else {}, pickled), file)
    file.flush()


def _main_module() -> dict[str, Any]:
    """Return how to import the program's main module, as `multiprocessing.spawn.prepare` takes it."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return {"init_main_from_name": spec.name, "sys_argv": sys.argv}
    if (path := getattr(main, "__file__", None)) is not None:
        return {"init_main_from_path": path, "sys_argv": sys.argv}
    return {}  # an interactive program


def _read_work(file: int) -> Callable[..., Any]:
    """Return the `function` of `run`, in a worker, from the open `file`."""
    worker: Any = multiprocessing.current_process()
    worker._inheriting = True  # so that the main module can start no processes, ours or others
    try:
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as content:
            main, function = pickle.loads(content)
        spawn.prepare(main)
        return pickle.loads(function)  # type: ignore[no-any-return]
    except SystemExit:  # the main module may end its program after an error
        raise _guard_error() from None
    except PrecacheError:
        raise
    except Exception as error:  # unpickling runs other people's code
        raise unpicklable_error(error, "worker processes", _REMEDY) from error
    finally:
        del worker._inheriting


def _guard_error() -> SettingError:
    """Return the error of a program whose main module starts processes when it is imported."""
    return SettingError(
        "An attempt has been made to start a new process before the current process has finished its "
        "bootstrapping phase: a worker imports the program for what is defined there, and so runs it again",
        remedy="put what the program does below 'if __name__ == \"__main__\":'",
    )


def unpicklable_error(error: Exception, where: str, remedy: str) -> SettingError:
    """Return the error for a source that cannot be pickled."""
    reason = " ".join(str(error).split())[:200]
    return SettingError(f"the source cannot be sent to {where} ({reason})", remedy=remedy)


def picklable_error(error: Exception) -> Exception:
    """Return `error`, or if it cannot be pickled, a WorkerError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerError(f"{type(error).__name__} in a worker: {error}")
    return error


def serve(parent: int, connection_file: int, memory: int, work: int) -> None:
    """Run the tasks that the parent sends, in a worker, until the parent is gone.

    Args:
        parent: its process id.
        connection_file: descriptor of the worker's end of the pipe.
        memory: descriptor of the memory for the worker's progress.
        work: descriptor of the file with the `function`.
    """
    connection: Connection[Any, Any] = Connection(connection_file)
    sending = threading.Lock()

    def send(message: _Answer | _LogMessage) -> None:
        with sending:  # a thread of the source's may log
            connection.send(message)

    logging.getLogger().addHandler(_LogSender(send))
    shared = _map_progress(memory)
    large_pictures.join_run(parent)
    with suppress(EOFError, OSError):  # the parent is gone
        try:
            with thread_errors():
                threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
            function = _read_work(work)
        except PrecacheError as error:
            send(_Answer(error=error))
            return
        for descriptor in (memory, work):
            os.close(descriptor)
        while True:
            task, fatal = connection.recv()
            tick = _SharedTicks(shared, fatal)
            try:
                answer = _Answer(function(task, tick))
            except Exception as error:
                answer = _Answer(error=picklable_error(error))
            except SystemExit as stop:  # of the source's own code; not the end of this process, whose parent
                # would say that memory may have run out
                call = traceback.extract_tb(stop.__traceback__)[-1]
                answer = _Answer(
                    error=WorkerError(
                        f"the source called sys.exit({stop.code!r}) in a worker ({call.name})",
                        path=f"{call.filename}:{call.lineno}",
                        remedy="raise an exception there, which names the picture",
                    )
                )
            tick.begin(None)
            send(answer)


def _end_after(parent: int) -> None:
    """End this process as soon as its parent is gone, so that it writes nothing more."""
    while os.getppid() == parent:
        time.sleep(_REPORT_S)
    os._exit(1)


class _SharedTicks(Ticks):
    """Progress of a worker's task, which the parent reads in `shared`."""

    def __init__(self, shared: _SharedProgress, fatal: frozenset[int]) -> None:
        self._shared, self.fatal = shared, fatal

    def begin(self, unit: int | None) -> None:
        self._shared.unit = _NO_UNIT if unit is None else unit

    def __call__(self) -> None:
        self._shared.done += 1
