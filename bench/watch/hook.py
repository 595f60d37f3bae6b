"""Timing of the batches of a script that `bench watch` started, in the script's own processes.

The hook runs in the interpreter of the script, so it imports nothing of this project but `cpus.py`,
`origin.py`, `parts.py` and `transforms.py` beside it, and an error in here is written down and never reaches
the script.
`inject/sitecustomize.py` calls `watch_module` when torch's DataLoader or a similar module has been imported;
the hook then wraps the methods that make loaders, make iterators and give the next batch.

    stream     the batches of one loader in one process, epoch after epoch; it has a number
    group      loaders that one line of the script makes for one dataset, as for each evaluation; what is
               measured of one of them holds for all
    held       batches that the workers had in work are all collected, and then served one by one while the
               workers have nothing to do: so the training's steps are timed alone
    probe      timing of the parts of a sample, in a process of its own, by `parts.py`

Each process appends events, one JSON object a line, to a file of its own in the folder BENCH_WATCH, which
`bench.watch.run` reads; in the same folder `run` leaves files that ask a process to hold batches or to probe.
Every event has its kind as `event`, and the number of its `stream`, except for `process`, `made` and `fault`.
Times are seconds of the monotonic clock; those that end in `_cpu_s` are CPU time of the process.

    process     pid, rank               the first event of a process
    made        where                   the script made a loader, at that line
    stream      kind, where, ...        a loader is iterated for the first time; its properties
    described   kinds, side, bytes      the first batch was served; its form
    epoch       begin_s, begin_cpu_s, end_s
                                        making an iterator took from `begin_s` to `end_s`
    batch       asked_s, got_s, asked_cpu_s, got_cpu_s, steps, images, served
                                        a batch was asked for and served; `steps` counts the steps of
                                        optimizers so far; `served` is one of SERVED
    end         asked_s, asked_cpu_s, got_s, steps
                                        a batch was asked for, and the iterator had no more
    cpus        start, own, workers, queued_share, machine, variables
                                        CPUs that the process might use when it started, that it and its
                                        workers may use now, and how many the machine has; the share of the
                                        time for which workers waited for a CPU
    idle        batch, seconds          the device had nothing to do while that batch was fetched
    ahead                               another thread than the one that trains asks for batches
    alone                               no further batch will be held
    parts       parts, or failed        what `parts.py` returned
    fault       text                    an error in the hook
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

_FOLDER = os.environ.get("BENCH_WATCH", "")
SERVED = ("usual", "held", "late")
"""Ways to serve a batch: as without the hook; held until no worker was busy; late, after a probe."""
_REQUEST_INTERVAL_S = 0.2  # between two looks for files that ask for more measurements
_MAX_HOLDS, _MAX_HELD_STEPS = 3, 6  # no further batches are held after so many holds, or steps


class _Log:
    """Event file of this process."""

    def __init__(self) -> None:
        self._pid, self._file, self._inode = -1, -1, (0, 0)

    def write(self, event: str, **values: Any) -> None:
        """Append an event, of a kind listed in the module's docstring."""
        if self._pid != os.getpid():  # a forked process begins a file of its own
            self._pid = os.getpid()
            name = os.path.join(_FOLDER, f"events-{self._pid}-{time.monotonic_ns()}.jsonl")
            self._file = os.open(name, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            self._inode = self._file_id()
            self.write("process", pid=self._pid, rank=os.environ.get("RANK", ""))
        # a script may have closed the file, and opened another one under the same descriptor
        if self._file_id() == self._inode:
            line = json.dumps({"event": event, **values}, default=str)
            os.write(self._file, line.encode() + b"\n")

    def _file_id(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_dev, status.st_ino


class _Steps:
    """Counter of the steps of all optimizers in this process.

    Attributes:
        count: number of steps so far.
        thread: thread of the latest step.
    """

    def __init__(self) -> None:
        self.count, self.thread, self._is_counting = 0, 0, False

    def begin(self) -> None:
        """Begin to count, if torch's optimizers are imported."""
        optimizer = sys.modules.get("torch.optim.optimizer")
        if optimizer is not None and not self._is_counting:
            self._is_counting = True
            optimizer.register_optimizer_step_post_hook(self)

    def __call__(self, *_: Any) -> None:
        self.count, self.thread = self.count + 1, threading.get_ident()


_log, _steps, _inside = _Log(), _Steps(), threading.local()
_streams: list["_Stream"] = []
_stream_by_loader: dict[int, tuple[Any, "_Stream"]] = {}
"""Weak reference to a loader, and its stream, by the id of the loader."""
_inner_loaders: set[int] = set()
"""Ids of loaders that `loaders.build` uses itself, and the script does not iterate."""
_groups: dict[tuple[int, str], "_Group"] = {}
"""Groups by process and key of their streams."""
_descriptions: dict[int, tuple[Any, dict[str, Any]]] = {}
"""Weak reference to a loader, and its description by `_describe_loader`, by the id of the loader."""
_latest_descriptions: dict[int, tuple[Any, dict[str, Any]]] = {}
"""Weak reference to a dataset, and the description of the script's latest loader of it, by its id."""
_NOT_DESCRIBED = {"where": "", "libraries": (), "choice": "", "batches": {"reason": "it is not known"}}
"""Description of a loader that was not seen when it was made."""


def _catch_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its errors become events, and the script goes on; it then returns None."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            with contextlib.suppress(Exception):
                _log.write("fault", text=f"{function.__name__}: {type(error).__name__}: {error}")
            return None

    return call


@contextlib.contextmanager
def _inside_loader() -> Iterator[None]:
    """Mark the block as a loader's own work: what is iterated in it is not timed."""
    _inside.active = True
    try:
        yield
    finally:
        _inside.active = False


def _is_script_asking() -> bool:
    """Whether the script asks for a batch now, and not a loader or a worker for its own use."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return not getattr(_inside, "active", False) and getattr(worker, "_worker_info", None) is None


@_catch_errors
def watch_module(name: str, module: ModuleType) -> None:
    """Wrap the loaders and iterators of a module that has just been imported."""
    if name == "torch.utils.data.dataloader":
        _watch_torch(module)
    elif name == "torchdata.stateful_dataloader.stateful_dataloader":
        _watch_loader_class(module.StatefulDataLoader)  # does not call `__init__` of torch's DataLoader
        _watch_iterator_class(module._StatefulSingleProcessDataLoaderIter)
        _watch_iterator_class(module._StatefulMultiProcessingDataLoaderIter)
    elif name == "fastai.data.load":
        _watch_loader_class(module.DataLoader)
    elif name == "loaders.loader":
        _watch_loader_class(module.Loader)
        iteration = module.Iteration
        iteration.__next__ = _with_timing(iteration.__next__, _stream_of_iteration)


def _watch_torch(module: ModuleType) -> None:
    """Time torch's iterators rather than its DataLoader, because other loaders use these iterators, too."""
    _origin_module()  # notes the working folder when imported
    _watch_loader_class(module.DataLoader)
    base = module._BaseDataLoaderIter
    for iterator_class in (base, module._SingleProcessDataLoaderIter, module._MultiProcessingDataLoaderIter):
        _watch_iterator_class(iterator_class)
    base.__next__ = _with_timing(base.__next__, lambda iterator: getattr(iterator, "_bench_watch", None))
    base._next_index = _with_sample_counts(base._next_index)
    atexit.register(_probe_at_exit)


def _watch_loader_class(loader_class: Any) -> None:
    """Note where loaders of a class are made."""
    make = loader_class.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("loaders.read."):
            _inner_loaders.add(id(self))  # a thread of `loaders.build` iterates it
        else:
            _inner_loaders.discard(id(self))
            _describe_loader(self)

    loader_class.__init__ = __init__


@_catch_errors
def _describe_loader(loader: Any) -> None:
    """Describe a loader that has just been made: `where`, `libraries` and `choice` of its Origin, `batches`.

    Where a library makes a loader of its own of a script's loader, the description is of the latter.
    """
    origin = _origin_module().find_origin(sys._getframe(1))
    dataset = getattr(loader, "__dict__", {}).get("dataset")
    description = _find(_latest_descriptions, dataset)
    if not origin.libraries or description is None:
        _log.write("made", where=origin.where)
        description = {
            "where": origin.where,
            "libraries": origin.libraries,
            "choice": origin.choice,
            "batches": _transforms_module().describe_batches(loader),
        }
        _note(_latest_descriptions, dataset, description)
    _note(_descriptions, loader, description)


def _origin_module() -> ModuleType:
    """Import `origin.py`, which sitecustomize finds under this name."""
    return importlib.import_module("bench_watch_origin")


def _transforms_module() -> ModuleType:
    return importlib.import_module("bench_watch_transforms")


def _parts_module() -> ModuleType:
    return importlib.import_module("bench_watch_parts")


def _note(table: dict[int, tuple[Any, Any]], subject: Any, value: Any) -> None:
    """Note a value for an object, until the object is gone."""
    key = id(subject)
    with contextlib.suppress(TypeError):  # there are no weak references to a list, for example
        table[key] = weakref.ref(subject, lambda _: table.pop(key, None)), value


def _find(table: Mapping[int, tuple[Any, Any]], subject: Any) -> Any:
    """Return the value noted for an object; None where there is none."""
    entry = table.get(id(subject))
    if entry is None or entry[0]() is not subject:
        return None
    return entry[1]


def _watch_iterator_class(iterator_class: Any) -> None:
    """Time how long iterators of a class take to be made, and to be reset where workers persist."""
    make = iterator_class.__init__

    @functools.wraps(make)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        stream = _stream_of(loader) if _is_script_asking() else None
        if stream is None:
            make(self, loader, *args, **kwargs)
            return
        self._bench_watch = stream
        begin = _Moment()
        with _inside_loader():
            make(self, loader, *args, **kwargs)
        stream.record_epoch(begin)

    iterator_class.__init__ = __init__
    if "_reset" not in vars(iterator_class):
        return
    reset = iterator_class._reset

    @functools.wraps(reset)
    def _reset(self: Any, *args: Any, **kwargs: Any) -> None:
        _discard_notes(self)
        stream = getattr(self, "_bench_watch", None) if _is_script_asking() else None
        if stream is None:
            reset(self, *args, **kwargs)
            return
        begin = _Moment()
        with _inside_loader():
            reset(self, *args, **kwargs)
        stream.record_epoch(begin)

    iterator_class._reset = _reset


def _discard_notes(iterator: Any) -> None:
    """Discard the notes on batches that will not be served, because the iterator is reset."""
    iterator.__dict__.pop("_bench_watch_samples", None)
    if iterator.__dict__.pop("_bench_watch_held", None) is not None:
        iterator.__dict__.pop("_try_put_index", None)


def _with_sample_counts(next_index: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `_next_index` so that it also notes how many samples the sampler put into a batch."""

    @functools.wraps(next_index)
    def _next_index(self: Any) -> Any:
        index = next_index(self)
        samples = len(index) if isinstance(index, (list, tuple)) else 0
        self.__dict__.setdefault("_bench_watch_samples", deque()).append(samples)
        return index

    return _next_index


def _with_timing(advance: Callable[[Any], Any], find_stream: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `__next__` so that it also writes down how long it took.

    Args:
        advance: the iterator's own `__next__`.
        find_stream: returns the stream of an iterator; None: it is not timed.
    """

    @functools.wraps(advance)
    def __next__(self: Any) -> Any:
        stream = find_stream(self) if _is_script_asking() else None
        if stream is None:
            return advance(self)
        begin = _Moment()
        with _inside_loader():
            try:
                served = stream.prepare(self, advance) or "usual"
                if served == "held":
                    batch = _HeldBatches.pop_next(self)
                else:
                    batch = _HeldBatches.release_and_advance(self, advance)
            except StopIteration:
                stream.record_end(begin)
                raise
        stream.record_batch(begin, served, batch, getattr(self, "_bench_watch_samples", None))
        return batch

    return __next__


class _Moment:
    """Current time: seconds of the monotonic clock and of this process's CPU time."""

    __slots__ = ("cpu_s", "s")

    def __init__(self) -> None:
        self.s, self.cpu_s = time.monotonic(), time.process_time()


class _HeldBatches:
    """Batches that the workers had in work, collected to be served one by one while the workers are idle.

    So the training's steps are timed alone, on the samples that it would get anyway, in the same order. The
    workers are sent no further indices until the last of these batches is served.
    """

    def __init__(self, iterator: Any, advance: Callable[[Any], Any]) -> None:
        self._batches: deque[Any] = deque()
        self._postponed, self._error = 0, None
        iterator._bench_watch_held = self
        iterator._try_put_index = self._postpone_index  # hides the iterator's method
        try:
            while iterator._rcvd_idx < iterator._send_idx:
                self._batches.append(advance(iterator))
        except Exception as error:
            # the end of the epoch, or a sample that fails: it is raised once the batches before are served
            self._error = error

    def __len__(self) -> int:
        return len(self._batches)

    def _postpone_index(self) -> None:
        """Count an index that the workers are to be sent once the batches are served."""
        self._postponed += 1

    @staticmethod
    def pop_next(iterator: Any) -> Any:
        """Return the next held batch of an iterator."""
        return iterator._bench_watch_held._batches.popleft()

    @staticmethod
    def release_and_advance(iterator: Any, advance: Callable[[Any], Any]) -> Any:
        """Return the next batch of an iterator; workers that were idle for held batches go on."""
        held_batches = iterator.__dict__.pop("_bench_watch_held", None)
        if held_batches is not None:
            del iterator._try_put_index
            for _ in range(held_batches._postponed):
                iterator._try_put_index()
            if held_batches._error is not None:
                raise held_batches._error
        return advance(iterator)


def _can_hold(iterator: Any) -> bool:
    """Whether batches can be held, and steps are worth timing alone.

    The iterator has to be torch's own, and the steps have to run on the CPU, which the workers share.
    """
    torch = sys.modules["torch"]
    kind = sys.modules["torch.utils.data.dataloader"]._MultiProcessingDataLoaderIter
    return type(iterator) is kind and not torch.cuda.is_initialized()


class _Group:
    """Loaders that one line of the script makes for one dataset, and which measurements they still need.

    Attributes:
        number: number of the first loader's stream.
        probe_input: `ProbeInput` of `parts.py` of the latest loader; None where it cannot be probed.
        requests: measurements that `bench.watch.run` has asked for: "hold", "probe".
        done: requests that are done.
        holds_left: how often batches may still be held.
        held_steps: number of steps that were timed alone.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.probe_input: Any = None
        self.requests: set[str] = set()
        self.done: set[str] = set()
        self.holds_left, self.held_steps = _MAX_HOLDS, 0
        self._checked_s = 0.0

    def check_requests(self) -> None:
        """Look for files of `bench.watch.run` that ask for a measurement, but not too often."""
        now_s = time.monotonic()
        if now_s - self._checked_s < _REQUEST_INTERVAL_S:
            return
        self._checked_s = now_s
        for request in ("hold", "probe"):
            if os.path.exists(os.path.join(_FOLDER, f"{request}-{os.getpid()}-{self.number}")):
                self.requests.add(request)

    def needs(self, request: str) -> bool:
        """Whether a measurement was asked for, and is not done."""
        return request in self.requests and request not in self.done


class _Stream:
    """Batches of one loader in this process, epoch after epoch.

    Attributes:
        number: number of the stream in this process.
        key: text that streams of one group share: line of the script, dataset and its length.
        pid: id of this process; a forked process does not go on with the stream.
        group: group of the loader.
        batches: number of batches so far.
        trained: number of batches after which an optimizer stepped.
    """

    def __init__(self, info: dict[str, Any]) -> None:
        self.number, self.key, self.pid = len(_streams), info["key"], os.getpid()
        self.group = _groups.setdefault((self.pid, self.key), _Group(self.number))
        self.batches, self.trained = 0, 0
        self._steps_before, self._is_described, self._is_ahead = 0, False, False
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._event: Any = None
        self._cpus: Any = None
        _streams.append(self)
        _steps.begin()
        _log.write("stream", stream=self.number, **info)

    @_catch_errors
    def record_epoch(self, begin: _Moment) -> None:
        """Write that an iterator was made or reset, from `begin` until now."""
        end_s = time.monotonic()
        _log.write("epoch", stream=self.number, begin_s=begin.s, begin_cpu_s=begin.cpu_s, end_s=end_s)

    @_catch_errors
    def prepare(self, iterator: Any, advance: Callable[[Any], Any]) -> str:
        """Take the measurements that were asked for, and return how the next batch is served, see SERVED."""
        group = self.group
        group.check_requests()
        if not group.requests and self.batches & (self.batches - 1) == 0:  # before batches 0, 1, 2, 4, 8, ...
            self._record_cpus(iterator)
        held_batches = iterator.__dict__.get("_bench_watch_held")
        if group.needs("hold") and held_batches is None:
            if group.holds_left and group.held_steps < _MAX_HELD_STEPS and _can_hold(iterator):
                group.holds_left -= 1
                held_batches = _HeldBatches(iterator, advance)
            else:
                group.done.add("hold")
                _log.write("alone", stream=self.number)
        if held_batches:  # not empty
            group.held_steps += 1
            return "held"
        served = "usual"
        if group.needs("probe") and not group.needs("hold"):
            self.probe()
            served = "late"
        self._event = _cuda_event()
        return served

    @_catch_errors
    def _record_cpus(self, iterator: Any) -> None:
        """Write which CPUs this process and the workers of an iterator may use."""
        if self._cpus is None:
            self._cpus = importlib.import_module("bench_watch_cpus").WorkerCpus()
        workers = [worker.pid for worker in iterator.__dict__.get("_workers", ())]
        _log.write("cpus", stream=self.number, **self._cpus.read(workers))

    @_catch_errors
    def record_batch(self, begin: _Moment, served: str, batch: Any, sizes: Any) -> None:
        """Write that a batch was served.

        Args:
            begin: when it was asked for.
            served: one of SERVED.
            batch: the batch.
            sizes: deque with the number of samples of this batch first; None where no sampler made it.
        """
        now = _Moment()
        if self._event is not None:
            self._pending.append((self.batches, self._event, _cuda_event()))
            self._event = None
        while self._pending and self._pending[0][2].query():  # does not wait for the device
            number, before, after = self._pending.popleft()
            seconds = before.elapsed_time(after) / 1e3
            _log.write("idle", stream=self.number, batch=number, seconds=seconds)
        if not self._is_described:
            self._is_described = True
            _log.write("described", stream=self.number, **_describe_batch(batch))
        if _steps.count and _steps.thread != threading.get_ident() and not self._is_ahead:
            self._is_ahead = True
            _log.write("ahead", stream=self.number)
        if _steps.count > self._steps_before:
            self.trained += 1
        self._steps_before = _steps.count
        images = (sizes.popleft() if sizes else 0) or count_samples(batch)
        _log.write(
            "batch",
            stream=self.number,
            asked_s=begin.s,
            got_s=now.s,
            asked_cpu_s=begin.cpu_s,
            got_cpu_s=now.cpu_s,
            steps=_steps.count,
            images=images,
            served=served,
        )
        self.batches += 1

    @_catch_errors
    def record_end(self, begin: _Moment) -> None:
        """Write that a batch was asked for, at `begin`, and the iterator had no more."""
        times = {"asked_s": begin.s, "asked_cpu_s": begin.cpu_s, "got_s": time.monotonic()}
        _log.write("end", stream=self.number, **times, steps=_steps.count)

    @_catch_errors
    def probe(self) -> None:
        """Time the parts of a sample, once for a group of loaders, and write them."""
        if "probe" in self.group.done:
            return
        self.group.done.add("probe")
        values: dict[str, Any] = {"failed": "that is done for DataLoaders alone"}
        if self.group.probe_input is not None:
            values = _parts_module().probe(self.group.probe_input)
        _log.write("parts", stream=self.number, **values)


def _cuda_event() -> Any:
    """Record an event on the current CUDA stream; None where the script uses no GPU."""
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@_catch_errors
def _stream_of(loader: Any) -> _Stream | None:
    """Return the stream of a DataLoader, which begins with its first iterator; None where it is not timed."""
    if id(loader) in _inner_loaders:
        return None
    is_fastai = type(loader).__name__ == "_FakeLoader"
    script_loader = loader.d if is_fastai else loader  # fastai iterates a loader of its own
    known: _Stream | None = _find(_stream_by_loader, script_loader)
    if known is not None and known.pid == os.getpid():
        return known
    dataset = script_loader.dataset
    is_list = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    samples = len(dataset) if is_list else None
    description = _find(_descriptions, script_loader) or _NOT_DESCRIBED
    where, innermost = description["where"], dataset
    while type(innermost).__name__ == "Subset" and hasattr(innermost, "dataset"):
        innermost = innermost.dataset
    kind = type(innermost).__name__
    if is_fastai:
        batch_size = script_loader.bs
    else:
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    info = {
        "kind": "DataLoader",
        "key": f"{where} {kind} {samples}",
        "where": where,
        "libraries": description["libraries"],
        "choice": description["choice"],
        "dataset": kind,
        "root": _find_root(innermost),
        "samples": samples,
        "build": _describe_build(description["batches"], dataset) or _NOT_DESCRIBED["batches"],
        "workers": loader.num_workers,
        "prefetch": loader.prefetch_factor or 0,
        "persistent": loader.persistent_workers,
        "pinned": loader.pin_memory,
        "batch_size": batch_size,
        "start": _start_method(loader.multiprocessing_context),
        "python": sys.executable,
    }
    if is_fastai:
        samples_from, collate = _FastaiSamples(script_loader), script_loader.do_batch
        size = batch_size or 0
    else:
        samples_from, collate = dataset, loader.collate_fn
        size = 0 if loader.batch_sampler is None else batch_size or 1
    takes_lists = not size and "batch" in type(getattr(loader, "sampler", None)).__name__.lower()
    stream = _Stream(info)
    if is_list or not is_fastai:
        start = loader.multiprocessing_context
        start = start if hasattr(start, "Process") and hasattr(start, "Pipe") else None
        stream.group.probe_input = _parts_module().ProbeInput(
            samples_from, collate, size, count_samples, takes_lists, loader.num_workers, start
        )
    _note(_stream_by_loader, script_loader, stream)
    return stream


@_catch_errors
def _describe_build(batches: dict[str, Any], dataset: Any) -> Any:
    return _transforms_module().describe_build(batches, dataset)


def _find_root(dataset: Any) -> str:
    """Root folder of a dataset, as the script and whoever typed `bench watch` may write it; "" for none."""
    root = getattr(dataset, "root", None)
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root):
        return ""
    path = os.path.abspath(os.path.expanduser(os.fsdecode(root)))
    origin = _origin_module()
    return str(origin.relative_path(path)) if os.getcwd() == origin.FOLDER else path


def _start_method(context: Any) -> str:
    """Way in which workers are started: fork, spawn or forkserver; the script may yet choose another one."""
    if hasattr(context, "get_start_method"):
        return str(context.get_start_method())
    multiprocessing = sys.modules["torch"].multiprocessing
    # the default comes first; to ask for the method itself would keep the script from choosing another one
    return str(
        multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    )


class _FastaiSamples:
    """Samples of a DataLoader of fastai, made as its workers make them."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._loader.do_item(index)


@_catch_errors
def _stream_of_iteration(iteration: Any) -> _Stream:
    """Return the stream of the loader of `loaders.build` that an iteration is of."""
    loader = iteration._loader
    stream: _Stream | None = _find(_stream_by_loader, loader)
    if stream is None:
        where = (_find(_descriptions, loader) or _NOT_DESCRIBED)["where"]
        info = {
            "kind": "loaders",
            "key": f"{where} {loader._path}",
            "where": where,
            "root": loader._path,
            "dataset": "loaders.build",
            "samples": loader.samples,
            "batch_size": loader.batch_size,
            "workers": 0,
        }
        stream = _Stream(info)
        _note(_stream_by_loader, loader, stream)
    if not hasattr(iteration, "_bench_watch"):
        iteration._bench_watch = True
        stream.record_epoch(_Moment())
    return stream


def _tensors(batch: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors in a batch of lists, dicts or objects."""
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        yield batch
        return
    if isinstance(batch, Mapping) or (hasattr(batch, "keys") and hasattr(batch, "values")):
        inner: Any = list(batch.values())
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        inner = batch[:8]
    else:
        inner = getattr(batch, "__dict__", {}).values()
    for value in inner if depth < 5 else ():
        yield from _tensors(value, depth + 1)


def _is_pictures(tensor: Any) -> bool:
    """Whether a tensor is a batch of pictures, channels first or last."""
    return len(tensor.shape) == 4 and bool({1, 3, 4} & {tensor.shape[1], tensor.shape[3]})


def count_samples(batch: Any) -> int:
    """Count the samples of a batch that no sampler made, as where a dataset gives whole batches."""
    if isinstance(batch, list) and batch and all(isinstance(sample, (tuple, dict)) for sample in batch):
        return len(batch)  # samples that were not collated
    tensors = [tensor for tensor in _tensors(batch) if len(tensor.shape)]
    for tensor in tensors:
        if _is_pictures(tensor) or len(tensor.shape) > 4:
            return int(tensor.shape[0])
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], (tuple, list)):
        return len(batch[0])  # pictures of several sizes, and their labels
    labels = [tensor for tensor in tensors if len(tensor.shape) == 1]
    pictures = [tensor for tensor in tensors if len(tensor.shape) == 3]
    if pictures and not any(tensor.shape[0] == pictures[0].shape[0] for tensor in labels):
        return 1  # a sample is a batch
    return int(tensors[0].shape[0]) if tensors else 1


def _describe_batch(batch: Any) -> dict[str, Any]:
    """Dtypes and shapes of a batch's tensors, the side of its pictures in pixels, and its bytes."""
    tensors = list(_tensors(batch))
    kinds = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors]
    sides = [0]
    size_bytes = 0
    for tensor in tensors:
        if _is_pictures(tensor):
            sides.append(int(tensor.shape[2 if tensor.shape[1] in (1, 3, 4) else 1]))
        if hasattr(tensor, "element_size"):
            size_bytes += tensor.numel() * tensor.element_size()
    return {"kinds": kinds[:4] or [type(batch).__name__], "side": max(sides), "bytes": size_bytes}


def _probe_at_exit() -> None:
    """Probe the loader that was trained on most, where the script ends before it was asked to probe."""
    streams = [stream for stream in _streams if stream.group.probe_input and stream.pid == os.getpid()]
    is_crashed, is_first_rank = hasattr(sys, "last_value"), os.environ.get("RANK", "0") == "0"
    if not streams or is_crashed or not is_first_rank or not _is_script_asking():
        return
    if not os.path.exists(os.path.join(_FOLDER, "done")):  # the script was ended
        max(streams, key=lambda stream: (stream.trained, stream.batches)).probe()
