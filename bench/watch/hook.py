"""Times the batches of a script that `bench watch` started, in the script's own processes. Stands alone.

It runs in the interpreter of the script, and imports nothing of this project but `describe.py` beside it.
Each process appends its events, a JSON object a line, to a file of its own in the folder BENCH_WATCH, which
`bench.watch.run` reads. Each names its kind as `event`, and all but the first and the last the `stream` that
it is of. Times are seconds of the monotonic clock, `_cpu_s` those of the process's CPU time. What goes wrong
in here is written as an event, and never reaches the script.

    process     pid, rank               the first one
    stream      kind, where, ...        a loader is iterated for the first time: what it is
    described   source, side, ...       its first batch, and what `describe.py` knows of the loader
    epoch       begin_s, begin_cpu_s, end_s
                                        making an iterator took from `begin_s` to `end_s`
    batch       asked_s, got_s, asked_cpu_s, got_cpu_s, steps, images, served
                                        `steps` of optimizers so far; `served` is one of SERVED
    end         asked_s, asked_cpu_s, got_s, steps
                                        the iterator had no more
    idle        batch, seconds          the device had nothing to do while that batch was fetched
    ahead                               batches are asked for by another thread than trains
    alone                               no further batch will be held
    parts       parts, quartiles, ...   what the parts of a sample take; or `failed`, why that is not known
    fault       text                    something went wrong in here
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_FOLDER = os.environ.get("BENCH_WATCH", "")
SERVED = ("usual", "held", "late")
"""How a batch was served: as ever; held back until no worker was busy; after the parts were timed."""
_PROBE_S, _PROBE_SAMPLES, _PROBE_LIMIT_S = 2.0, 64, 20.0
_LOOK_S = 0.2  # between two looks whether more is to be measured
_ROUNDS, _HELD_STEPS = 3, 6  # holding batches ends after so many rounds, or steps
_PARTS = {
    "PIL.ImageFile:ImageFile.load": "decode",
    "PIL.Image:open": "decode",
    "PIL.Image:Image.convert": "decode",
    "PIL.Image:Image.resize": "resize",
    "cv2:imread": "decode",
    "cv2:imdecode": "decode",
    "cv2:resize": "resize",
    "simplejpeg:decode_jpeg": "decode",
    "torchvision.io.image:decode_image": "decode",
    "torchvision.io.image:decode_jpeg": "decode",
    "torch.nn.functional:interpolate": "resize",
}
"""Functions whose CPU time is told apart, where they are imported."""


class _Log:
    """The file of this process."""

    def __init__(self) -> None:
        self._pid, self._file, self._inode = -1, -1, (0, 0)

    def write(self, event: str, **values: Any) -> None:
        if self._pid != os.getpid():  # also of a process that was forked from one that wrote
            self._pid = os.getpid()
            name = os.path.join(_FOLDER, f"events-{self._pid}-{time.monotonic_ns()}.jsonl")
            self._file = os.open(name, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            self._inode = self._where()
            self.write("process", pid=self._pid, rank=os.environ.get("RANK", ""))
        if self._where() == self._inode:  # else the script closed it, and has opened another
            line = json.dumps({"event": event, **values}, default=str)
            os.write(self._file, line.encode() + b"\n")

    def _where(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_dev, status.st_ino


class _Steps:
    """Counts the steps of all optimizers of this process."""

    def __init__(self) -> None:
        self.count, self.thread, self.is_counting = 0, 0, False

    def begin(self) -> None:
        optimizer = sys.modules.get("torch.optim.optimizer")
        if optimizer is not None and not self.is_counting:
            self.is_counting = True
            optimizer.register_optimizer_step_post_hook(self)

    def __call__(self, *_: Any) -> None:
        self.count, self.thread = self.count + 1, threading.get_ident()


_log, _steps, _inside = _Log(), _Steps(), threading.local()
_streams: list["_Stream"] = []
_of_loader: dict[int, tuple[Any, "_Stream"]] = {}  # by the id of a loader: a weak reference to it, its stream
_not_the_scripts: set[int] = set()  # ids of loaders
_places: dict[tuple[int, str], "_Place"] = {}  # by process and key of a stream


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Write down whatever goes wrong in `function`, and let the script go on."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            with contextlib.suppress(Exception):
                _log.write("fault", text=f"{function.__name__}: {type(error).__name__}: {error}")
            return None

    return called


@contextlib.contextmanager
def _nested() -> Iterator[None]:
    """What is iterated within is a loader's own business."""
    _inside.active = True
    try:
        yield
    finally:
        _inside.active = False


def _records() -> bool:
    """Whether it is the script that asks now, and not a loader for its own use."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return not getattr(_inside, "active", False) and getattr(worker, "_worker_info", None) is None


@_quietly
def imported(name: str, module: ModuleType) -> None:
    """Time what `module`, which was just imported, iterates over."""
    if name == "torch.utils.data.dataloader":
        _watch_torch(module)
    elif name == "torchdata.stateful_dataloader.stateful_dataloader":
        _watch_loader(module.StatefulDataLoader)  # makes all of itself anew
        _watch_making(module._StatefulSingleProcessDataLoaderIter)
        _watch_making(module._StatefulMultiProcessingDataLoaderIter)
    elif name == "fastai.data.load":
        _watch_loader(module.DataLoader)
    elif name == "torchvision.datasets.vision":
        _describing().watch_datasets(module)
    elif name == "loaders.loader":
        _watch_loader(module.Loader)
        iteration = module.Iteration
        iteration.__next__ = _timed_next(iteration.__next__, _stream_of_ours)


def _describing() -> ModuleType:
    return importlib.import_module("bench_watch_describe")


def _watch_torch(module: ModuleType) -> None:
    """Time torch's iterators, and not its DataLoader: other loaders take from such iterators, too."""
    _describing()  # notes the working folder as it is now
    _watch_loader(module.DataLoader)
    base = module._BaseDataLoaderIter
    for each in (base, module._SingleProcessDataLoaderIter, module._MultiProcessingDataLoaderIter):
        _watch_making(each)
    base.__next__ = _timed_next(base.__next__, lambda iterator: getattr(iterator, "_bench_watch", None))
    base._next_index = _noted_index(base._next_index)
    atexit.register(_probe_at_exit)


def _watch_loader(loader: Any) -> None:
    """Note where loaders of that class are made."""
    make = loader.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("loaders.read."):
            _not_the_scripts.add(id(self))  # `loaders.build` takes batches of it in a thread of its own
        else:
            _not_the_scripts.discard(id(self))
            _loader_made(self, args[0] if args else kwargs.get("dataset"))
        make(self, *args, **kwargs)

    loader.__init__ = __init__


@_quietly
def _loader_made(loader: Any, dataset: Any) -> None:
    _describing().loader_made(loader, dataset)


def _watch_making(iterator: Any) -> None:
    """Time how long iterators of that class take to be made, and to be begun anew by workers that persist."""
    make = iterator.__init__

    @functools.wraps(make)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        stream = _stream_of_loader(loader) if _records() else None
        if stream is None:
            make(self, loader, *args, **kwargs)
            return
        self._bench_watch = stream
        begin = _Moment()
        with _nested():
            make(self, loader, *args, **kwargs)
        stream.begin(begin)

    iterator.__init__ = __init__
    if "_reset" not in vars(iterator):
        return
    reset = iterator._reset

    @functools.wraps(reset)
    def _reset(self: Any, *args: Any, **kwargs: Any) -> None:
        _forget(self)
        stream = getattr(self, "_bench_watch", None) if _records() else None
        if stream is None:
            reset(self, *args, **kwargs)
            return
        begin = _Moment()
        with _nested():
            reset(self, *args, **kwargs)
        stream.begin(begin)

    iterator._reset = _reset


def _forget(iterator: Any) -> None:
    """What is noted of batches that will not be served: the iterator begins anew."""
    iterator.__dict__.pop("_bench_watch_samples", None)
    if iterator.__dict__.pop("_bench_watch_held", None) is not None:
        iterator.__dict__.pop("_try_put_index", None)


def _noted_index(next_index: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_next_index` that also notes how many samples a batch will have, by the sampler."""

    @functools.wraps(next_index)
    def _next_index(self: Any) -> Any:
        index = next_index(self)
        samples = len(index) if isinstance(index, (list, tuple)) else 0
        self.__dict__.setdefault("_bench_watch_samples", deque()).append(samples)
        return index

    return _next_index


def _timed_next(advance: Callable[[Any], Any], stream_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`__next__` that also writes down how long it took."""

    @functools.wraps(advance)
    def __next__(self: Any) -> Any:
        stream = stream_of(self) if _records() else None
        if stream is None:
            return advance(self)
        asked = _Moment()
        with _nested():
            try:
                served = stream.prepare(self, advance) or "usual"
                batch = _Held.next_of(self) if served == "held" else _Held.advance_freed(self, advance)
            except StopIteration:
                stream.end(asked)
                raise
        stream.record_batch(asked, served, batch, getattr(self, "_bench_watch_samples", None))
        return batch

    return __next__


class _Moment:
    """Now, on the clock and in CPU time of this process."""

    __slots__ = ("cpu_s", "s")

    def __init__(self) -> None:
        self.s, self.cpu_s = time.monotonic(), time.process_time()


class _Held:
    """All batches that the workers were asked for, served one by one while the workers have nothing to do.

    So the training's steps are timed alone, on the samples that it would get anyway, in their order. The
    workers are sent no further indices until the last one is served.
    """

    def __init__(self, iterator: Any, advance: Callable[[Any], Any]) -> None:
        self._batches: deque[Any] = deque()
        self._owed, self._error = 0, None
        iterator._bench_watch_held = self
        iterator._try_put_index = self._owe  # hides the method
        try:
            while iterator._rcvd_idx < iterator._send_idx:
                self._batches.append(advance(iterator))
        except Exception as error:  # the end of the epoch, or a sample that fails: raised when it is its turn
            self._error = error

    def __len__(self) -> int:
        return len(self._batches)

    def _owe(self) -> None:
        self._owed += 1

    @staticmethod
    def next_of(iterator: Any) -> Any:
        """The next held batch of `iterator`."""
        return iterator._bench_watch_held._batches.popleft()

    @staticmethod
    def advance_freed(iterator: Any, advance: Callable[[Any], Any]) -> Any:
        """The next batch of `iterator`, whose workers go on if they were held."""
        held = iterator.__dict__.pop("_bench_watch_held", None)
        if held is not None:
            del iterator._try_put_index
            for _ in range(held._owed):
                iterator._try_put_index()
            if held._error is not None:
                raise held._error
        return advance(iterator)


def _can_hold(iterator: Any) -> bool:
    """Whether workers of torch's own kind may take CPU time from the steps, which run on the CPU."""
    torch = sys.modules["torch"]
    kind = sys.modules["torch.utils.data.dataloader"]._MultiProcessingDataLoaderIter
    return type(iterator) is kind and not torch.cuda.is_initialized()


@dataclass(frozen=True)
class _Source:
    """What a probe needs of a loader.

    Attributes:
        batch_size: 0 where a sample is a batch.
        takes_lists: whether the dataset is asked for a batch by a list of places.
        start: how processes are started; None: as torch does by default.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    batch_size: int
    takes_lists: bool
    workers: int
    start: Any


class _Place:
    """What loaders that are made at one place for one dataset share: what is measured of them.

    Attributes:
        number: of the first one's stream.
        source: what a probe needs of the last one; None where that is not known.
        rounds: of holding batches, that are left.
        held_steps: how many steps were timed alone.
        done: what was asked for and is over: "hold", "probe".
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.source: _Source | None = None
        self.asked: set[str] = set()
        self.done: set[str] = set()
        self.rounds, self.held_steps = _ROUNDS, 0
        self._looked_s = 0.0

    def look(self) -> None:
        """Look, not too often, for what `bench.watch.run` asks for."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        for what in ("hold", "probe"):
            if os.path.exists(os.path.join(_FOLDER, f"{what}-{os.getpid()}-{self.number}")):
                self.asked.add(what)

    def wants(self, what: str) -> bool:
        """Whether it was asked for, and is not done."""
        return what in self.asked and what not in self.done


class _Stream:
    """What a loader gives, epoch after epoch."""

    def __init__(self, info: dict[str, Any], loader: Any = None) -> None:
        self.number, self.key, self.pid = len(_streams), info["key"], os.getpid()
        self.place = _places.setdefault((self.pid, self.key), _Place(self.number))
        self.batches, self.trained = 0, 0
        self._loader = None if loader is None else weakref.ref(loader)
        self._source = None if loader is None else _source_of(loader)
        self._steps_before, self._is_described, self._is_ahead = 0, False, False
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._event: Any = None
        _streams.append(self)
        _steps.begin()
        _log.write("stream", stream=self.number, **info)

    @property
    def is_dead(self) -> bool:
        """Whether the script has thrown its loader away."""
        return self._loader is not None and self._loader() is None

    @_quietly
    def begin(self, begin: _Moment) -> None:
        end_s = time.monotonic()
        _log.write("epoch", stream=self.number, begin_s=begin.s, begin_cpu_s=begin.cpu_s, end_s=end_s)

    @_quietly
    def prepare(self, iterator: Any, advance: Callable[[Any], Any]) -> str:
        """Measure what is asked for; returns how the next batch is served, of SERVED."""
        place = self.place
        place.look()
        held = iterator.__dict__.get("_bench_watch_held")
        if place.wants("hold") and held is None:
            if place.rounds and place.held_steps < _HELD_STEPS and _can_hold(iterator):
                place.rounds -= 1
                held = _Held(iterator, advance)
            else:
                place.done.add("hold")
                _log.write("alone", stream=self.number)
        if held:
            place.held_steps += 1
            return "held"
        served = "usual"
        if place.wants("probe") and not place.wants("hold"):
            self.probe()
            served = "late"
        self._event = _cuda_event()
        return served

    @_quietly
    def got(self, asked: _Moment, served: str, batch: Any, sizes: Any) -> None:
        now = _Moment()
        if self._event is not None:
            self._pending.append((self.batches, self._event, _cuda_event()))
            self._event = None
        while self._pending and self._pending[0][2].query():  # asks the device, and does not wait for it
            number, before, after = self._pending.popleft()
            seconds = before.elapsed_time(after) / 1e3
            _log.write("idle", stream=self.number, batch=number, seconds=seconds)
        if not self._is_described:
            self._is_described = True
            self._describe(batch)
        if _steps.count and _steps.thread != threading.get_ident() and not self._is_ahead:
            self._is_ahead = True
            _log.write("ahead", stream=self.number)
        self.trained += _steps.count > self._steps_before
        self._steps_before = _steps.count
        images = (sizes.popleft() if sizes else 0) or count_samples(batch)
        _log.write(
            "batch",
            stream=self.number,
            asked_s=asked.s,
            got_s=now.s,
            asked_cpu_s=asked.cpu_s,
            got_cpu_s=now.cpu_s,
            steps=_steps.count,
            images=images,
            served=served,
        )
        self.batches += 1

    @_quietly
    def end(self, asked: _Moment) -> None:
        times = {"asked_s": asked.s, "asked_cpu_s": asked.cpu_s, "got_s": time.monotonic()}
        _log.write("end", stream=self.number, **times, steps=_steps.count)

    @_quietly
    def _describe(self, batch: Any) -> None:
        source = self._source or {}
        if source:
            source["batch"] = _describing().describe_batch(batch)
        _log.write("described", stream=self.number, source=source, **_describe_batch(batch))

    @_quietly
    def probe(self) -> None:
        """Time the parts of its samples, once."""
        if "probe" in self.place.done:
            return
        self.place.done.add("probe")
        source = self.place.source
        found = _probe(source) if source else {"failed": "that is done for DataLoaders alone"}
        _log.write("parts", stream=self.number, **found)


@_quietly
def _source_of(loader: Any) -> Any:
    return _describing().describe(loader)


def _cuda_event() -> Any:
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@_quietly
def _stream_of_loader(loader: Any) -> _Stream | None:
    if id(loader) in _not_the_scripts:
        return None
    is_fastai = type(loader).__name__ == "_FakeLoader"
    shown = loader.d if is_fastai else loader  # what the script has
    known = _of_loader.get(id(shown))
    if known is not None and known[0]() is shown and known[1].pid == os.getpid():
        return known[1]
    dataset = shown.dataset
    is_list = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    samples = len(dataset) if is_list else None
    where, kind = _place(shown) or "", _type_name(dataset)
    batch_size = (
        shown.bs if is_fastai else loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    )
    info = {
        "kind": "DataLoader",
        "key": f"{where} {kind} {samples}",
        "where": where,
        "dataset": kind,
        "samples": samples,
        "workers": loader.num_workers,
        "prefetch": loader.prefetch_factor or 0,
        "persistent": loader.persistent_workers,
        "pinned": loader.pin_memory,
        "batch_size": batch_size,
        "pillow": getattr(sys.modules.get("PIL"), "__version__", ""),
    }
    if is_fastai:
        given, collate, size = _Fastai(shown), shown.do_batch, batch_size or 0
    else:
        size = 0 if loader.batch_sampler is None else batch_size or 1
        given, collate = dataset, loader.collate_fn
    takes_lists = not size and "batch" in type(getattr(loader, "sampler", None)).__name__.lower()
    info["remade"] = any(each.key == info["key"] and each.is_dead for each in _streams)
    stream = _Stream(info, shown)
    if is_list or not is_fastai:
        start = loader.multiprocessing_context
        start = start if hasattr(start, "Process") and hasattr(start, "Pipe") else None
        stream.place.source = _Source(given, collate, size, takes_lists, loader.num_workers, start)
    _of_loader[id(shown)] = weakref.ref(shown), stream
    return stream


@_quietly
def _place(loader: Any) -> str:
    return str(_describing().place(loader))


def _type_name(dataset: Any) -> str:
    """The class of the dataset within torch's Subsets."""
    while type(dataset).__name__ == "Subset" and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return type(dataset).__name__


class _Fastai:
    """Samples of a DataLoader of fastai, as its workers make them."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader.dataset)

    def __getitem__(self, place: int) -> Any:
        return self._loader.do_item(place)


@_quietly
def _stream_of_ours(iteration: Any) -> _Stream:
    loader = iteration._loader
    known = _of_loader.get(id(loader))
    if known is None or known[0]() is not loader:
        where = _place(loader) or ""
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
        known = _of_loader[id(loader)] = weakref.ref(loader), _Stream(info)
    if not hasattr(iteration, "_bench_watch"):
        iteration._bench_watch = True
        known[1].begin(_Moment())
    return known[1]


def _tensors(batch: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors in a batch of lists, dicts, objects and the like."""
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
    """Whether it is a batch of pictures, channels first or last."""
    return len(tensor.shape) == 4 and bool({1, 3, 4} & {tensor.shape[1], tensor.shape[3]})


def count_samples(batch: Any) -> int:
    """Samples of a batch that no sampler made, as a dataset that gives whole batches does."""
    if isinstance(batch, list) and batch and all(isinstance(each, (tuple, dict)) for each in batch):
        return len(batch)  # samples that nothing collates
    tensors = [each for each in _tensors(batch) if len(each.shape)]
    for each in tensors:
        if _is_pictures(each) or len(each.shape) > 4:
            return int(each.shape[0])
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], (tuple, list)):
        return len(batch[0])  # pictures of several sizes, and their labels
    labels = [each for each in tensors if len(each.shape) == 1]
    pictures = [each for each in tensors if len(each.shape) == 3]
    if pictures and not any(each.shape[0] == pictures[0].shape[0] for each in labels):
        return 1  # a sample is a batch
    return int(tensors[0].shape[0]) if tensors else 1


def _describe_batch(batch: Any) -> dict[str, Any]:
    tensors = list(_tensors(batch))
    kinds = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in tensors]
    sides = [0]
    for each in tensors:
        if _is_pictures(each):
            sides.append(int(each.shape[2 if each.shape[1] in (1, 3, 4) else 1]))
    moved = sum(each.numel() * each.element_size() for each in tensors if hasattr(each, "element_size"))
    return {"kinds": kinds[:4] or [type(batch).__name__], "side": max(sides), "bytes": moved}


def _probe_at_exit() -> None:
    """Time the parts of what was trained on most, in a script that ends before it was asked to."""
    mine = [stream for stream in _streams if stream.place.source and stream.pid == os.getpid()]
    crashed, first = hasattr(sys, "last_value"), os.environ.get("RANK", "0") == "0"
    if mine and first and not crashed and _records() and not os.path.exists(os.path.join(_FOLDER, "done")):
        max(mine, key=lambda stream: (stream.trained, stream.batches)).probe()


def _probe(source: _Source) -> dict[str, Any]:
    """Time the parts of a few samples in a process of its own, in which nothing of the script changes."""
    torch = sys.modules["torch"]
    usual = torch.multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    start = source.start or usual
    receive, send = start.Pipe(duplex=False)
    process = start.Process(target=_probe_here, args=(send, source), daemon=True)
    process.start()
    send.close()
    try:
        if not receive.poll(_PROBE_LIMIT_S):
            return {"failed": f"gave no sample within {_PROBE_LIMIT_S:.0f} s"}
        found: dict[str, Any] = receive.recv()
        return found
    except EOFError:
        return {"failed": "its process died"}
    finally:
        process.kill()
        process.join()


def _probe_here(send: Any, source: _Source) -> None:
    os.environ.pop("BENCH_WATCH", None)
    try:
        if source.workers:  # its batches are collated in shared memory
            worker: Any = sys.modules["torch.utils.data._utils.worker"]
            info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=source.dataset)
            worker._worker_info = info
        found = _time_parts(source)
        if not source.workers:
            found["parts"].pop("copy")
        send.send(found)
    except Exception as error:
        send.send({"failed": f"{type(error).__name__}: {error}"[:500]})
    os._exit(0)  # nothing that the script registered runs a second time


def _time_parts(source: _Source) -> dict[str, Any]:
    """Seconds of a sample by part, the mean of a few, and of collating and handing over a batch.

    Parts are times of the CPU. What a sample took beyond the CPU's time and the wait for a CPU is reading.
    """
    sys.modules["torch"].set_num_threads(1)  # as in the workers of a DataLoader
    clock = _Parts()
    samples, walls, cpus, reads = [], [], [], []
    until_s = time.monotonic() + _PROBE_S
    batch_size = source.batch_size
    for sample in _few(source):
        wall_s, cpu_s, queued_s = clock.since()
        samples.append(sample)
        if len(samples) > 2:  # the first ones import and open things
            walls.append(wall_s)
            cpus.append(cpu_s)
            reads.append(max(0.0, wall_s - cpu_s - queued_s))
        else:
            clock.seconds.clear()
        if len(samples) >= _PROBE_SAMPLES or (len(samples) > 6 and time.monotonic() > until_s):
            break
        clock.since()
    count = max(1, len(cpus))
    parts = {name: seconds / count for name, seconds in clock.seconds.items()}
    python_s = sum(cpus) / count - sum(parts.values())
    images = 1 if batch_size else count_samples(samples[-1])
    found = {**parts, "python": max(0.0, python_s), "read": sum(reads) / count}
    per_batch = {"collate": 0.0, "copy": 0.0}
    batch = (samples * (batch_size // len(samples) + 1))[:batch_size] if batch_size else samples[-1]
    with contextlib.suppress(Exception):
        from multiprocessing.reduction import ForkingPickler

        for _ in range(2):  # the first time memory is asked for
            clock.since()
            collated = source.collate(batch)
            per_batch["collate"] = clock.since()[1]
            kept = ForkingPickler.dumps(collated)
            per_batch["copy"] = clock.since()[1]
            del kept
    each = {name: seconds / images for name, seconds in found.items()}
    each |= {name: seconds / (batch_size or images) for name, seconds in per_batch.items()}
    spread = sorted(cpu_s + read_s for cpu_s, read_s in zip(cpus, reads, strict=True)) or [0.0]
    quarter = len(spread) // 4
    return {"parts": each, "samples": count, "quartiles": [spread[quarter], spread[-1 - quarter]]}


def _few(source: _Source) -> Iterator[Any]:
    dataset = source.dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        yield from iter(dataset)
        return
    places = random.Random(41).sample(range(len(dataset)), min(len(dataset), _PROBE_SAMPLES))
    at_once = getattr(dataset, "__getitems__", None)
    for place in places:
        if source.takes_lists:
            yield dataset[[place]]
        elif callable(at_once):
            yield at_once([place])[0]
        else:
            yield dataset[place]


class _Parts:
    """CPU time of the functions in _PARTS, each without that of those that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within: list[float] = []
        self._last = (0.0, 0.0, 0.0)
        for name, part in _PARTS.items():
            module, _, path = name.partition(":")
            if module in sys.modules:
                self._wrap(sys.modules[module], path, part)
        self.since()

    def since(self) -> tuple[float, float, float]:
        """Seconds since the last call: of the clock, of the CPU, and waiting for a CPU."""
        queued_s = 0.0
        with contextlib.suppress(OSError, IndexError), open("/proc/thread-self/schedstat") as file:
            queued_s = int(file.read().split()[1]) / 1e9
        now = (time.monotonic(), time.process_time(), queued_s)
        passed = tuple(after - before for before, after in zip(self._last, now, strict=True))
        self._last = now
        return passed  # type: ignore[return-value]

    def _wrap(self, module: ModuleType, path: str, part: str) -> None:
        names = path.split(".")
        owner: Any = getattr(module, names[0], None) if len(names) > 1 else module
        inner = getattr(owner, names[-1], None)
        if inner is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._within.append(0.0)
            begin_s = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                passed_s = time.process_time() - begin_s
                self.seconds[part] = self.seconds.get(part, 0.0) + passed_s - self._within.pop()
                if self._within:
                    self._within[-1] += passed_s

        if owner is not module:
            setattr(owner, names[-1], timed)
            return
        for each in list(sys.modules.values()):  # those that imported it by name, too
            for name, value in list(getattr(each, "__dict__", {}).items()):
                if value is inner:
                    setattr(each, name, timed)
