"""Times the batches of a script that `bench watch` started, in the script's own processes. Stands alone.

It runs in the interpreter of the script, and so imports nothing of this project unless a cure needs it. Each
process appends its events, a JSON list a line, to a file of its own in the folder BENCH_WATCH, which
`bench.watch.run` reads. Times are seconds of the monotonic clock. What goes wrong in here is written as an
event, and never reaches the script.

    process pid {rank, world}            the first line
    stream  id {...}                     something is iterated for the first time: what it is
    seen    id {kinds, side, ...}        its first batch
    epoch   id begin end                 an iterator was made, which took from `begin` to `end`
    batch   id asked got steps images    `steps` of optimizers so far
    end     id asked got steps           the iterator had no more
    idle    id number seconds            the device had nothing to do while batch `number` was fetched
    ahead   id                           batches are asked for by another thread than trains
    probe   id {...}                     what the parts of a sample take
    cured   {...}, fault text            a DataLoader was changed; something went wrong in here
"""

import atexit
import contextlib
import copy
import functools
import inspect
import json
import os
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

_FOLDER = os.environ.get("BENCH_WATCH", "")
_LOADER = os.environ.get("BENCH_WATCH_LOADER", "")
_CONFIG: dict[str, Any] = {}
_PROBE_S, _PROBE_SAMPLES, _PROBE_LIMIT_S = 2.0, 64, 20.0
_ANOTHER = " another"
_LOOK_S = 0.2  # between two looks whether a probe is asked for
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

    def write(self, *event: Any) -> None:
        if self._pid != os.getpid():  # also of a process that was forked from one that wrote
            self._pid = os.getpid()
            name = os.path.join(_FOLDER, f"events-{self._pid}-{time.monotonic_ns()}.jsonl")
            self._file = os.open(name, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            self._inode = self._where()
            rank = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
            self.write("process", self._pid, rank)
        if self._where() == self._inode:  # else the script closed it, and has opened another
            os.write(self._file, json.dumps(event, default=str).encode() + b"\n")

    def _where(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_dev, status.st_ino


class _Steps:
    """Of all optimizers of this process."""

    def __init__(self) -> None:
        self.count, self.thread = 0, 0

    def __call__(self, *_: Any) -> None:
        self.count, self.thread = self.count + 1, threading.get_ident()


_log, _steps, _inside = _Log(), _Steps(), threading.local()
_streams: dict[str, "_Stream"] = {}
_loaders: dict[str, Callable[[], Any]] = {}  # by the key of a stream: what was iterated last
_made: dict[int, tuple[Any, str]] = {}  # by the id of a dataset: a reference to it, where its loader was made


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Whatever goes wrong in `function` is written down, and the script goes on."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            with contextlib.suppress(Exception):
                _log.write("fault", f"{function.__name__}: {type(error).__name__}: {error}")
            return None

    return called


@_quietly
def imported(name: str, module: ModuleType) -> None:
    """Time what `module`, which was just imported, iterates over."""
    if not _CONFIG:
        with open(os.path.join(_FOLDER, "config.json"), encoding="utf-8") as file:
            _CONFIG.update(json.load(file))
    if name == "torch.utils.data.dataloader":
        _watch_torch(module)
    elif name == "loaders.loader":
        iteration = module.Iteration
        iteration.__next__ = _timed_next(iteration.__next__, _stream_of_ours)
    else:
        _watch_named(module, _LOADER.partition(":")[2])


def _watch_torch(module: ModuleType) -> None:
    loader, iterator = module.DataLoader, module._BaseDataLoaderIter
    make, iterate = loader.__init__, loader.__iter__

    @functools.wraps(make)
    def __init__(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        place = _place(dataset) or ""
        if _CONFIG.get("cure"):
            named = dict(zip(list(inspect.signature(make).parameters)[2:], args, strict=False))
            changed = _cured(dataset, place, {**named, **kwargs})
            dataset, args, kwargs = changed or (dataset, args, kwargs)
        make(self, dataset, *args, **kwargs)
        self._bench_watch_place = place

    @functools.wraps(iterate)
    def __iter__(self: Any) -> Any:
        if not _records():
            return iterate(self)
        _inside.active = True
        begin_s = time.monotonic()
        try:
            made = iterate(self)
        finally:
            _inside.active = False
        _begin(_stream_of_loader(self), made, begin_s, time.monotonic())
        return made

    loader.__init__, loader.__iter__ = __init__, __iter__
    iterator.__next__ = _timed_next(iterator.__next__, lambda each: getattr(each, "_bench_watch", None))
    atexit.register(_probe_at_exit)


@_quietly
def _begin(stream: "_Stream", made: Any, begin_s: float, end_s: float) -> None:
    if stream is not None:
        made._bench_watch = stream
        stream.begin(begin_s, end_s)


def _records() -> bool:
    """Whether it is the script that asks now, and not a loader for its own use."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return not getattr(_inside, "active", False) and getattr(worker, "_worker_info", None) is None


def _timed_next(advance: Callable[[Any], Any], stream_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`__next__` that also writes down how long it took."""

    @functools.wraps(advance)
    def __next__(self: Any) -> Any:
        stream = stream_of(self) if _records() else None
        if stream is None:
            return advance(self)
        stream.ask()
        _inside.active = True
        asked_s = time.monotonic()
        try:
            batch = advance(self)
        except StopIteration:
            stream.end(asked_s)
            raise
        finally:
            _inside.active = False
        stream.got(asked_s, batch)
        return batch

    return __next__


class _Stream:
    """What is iterated over at one place of the script, epoch after epoch.

    Attributes:
        source: what a probe needs: the dataset, the function that collates, the batch size, and how
            processes are started; None where that is not known. Batch size 0: a sample is a batch.
    """

    def __init__(self, info: dict[str, Any], source: tuple[Any, ...] | None = None) -> None:
        self.number, self.source = len(_streams), source
        self.batches, self.trained, self.is_probed = 0, 0, False
        self._steps, self._seen, self._ahead, self._looked_s = 0, False, False, 0.0
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._event: Any = None
        _log.write("stream", self.number, info)

    @_quietly
    def begin(self, begin_s: float, end_s: float) -> None:
        _log.write("epoch", self.number, begin_s, end_s)

    @_quietly
    def ask(self) -> None:
        now_s = time.monotonic()
        if self.source is not None and now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            if os.path.exists(os.path.join(_FOLDER, f"probe-{os.getpid()}-{self.number}")):
                self.probe()
        self._event = _cuda_event()

    @_quietly
    def got(self, asked_s: float, batch: Any) -> None:
        got_s = time.monotonic()
        if self._event is not None:
            self._pending.append((self.batches, self._event, _cuda_event()))
        while self._pending and self._pending[0][2].query():  # asks the device, and does not wait for it
            number, before, after = self._pending.popleft()
            _log.write("idle", self.number, number, before.elapsed_time(after) / 1e3)
        if not self._seen:
            self._seen = True
            _log.write("seen", self.number, _describe_batch(batch))
        if _steps.count and _steps.thread != threading.get_ident() and not self._ahead:
            self._ahead = True
            _log.write("ahead", self.number)
        self.trained += _steps.count > self._steps
        self._steps = _steps.count
        _log.write("batch", self.number, asked_s, got_s, _steps.count, _images(batch))
        self.batches += 1

    @_quietly
    def end(self, asked_s: float) -> None:
        _log.write("end", self.number, asked_s, time.monotonic(), _steps.count)

    @_quietly
    def probe(self) -> None:
        if self.is_probed or self.source is None:
            return
        self.is_probed = True
        _log.write("probe", self.number, _probe(*self.source))


def _cuda_event() -> Any:
    torch = sys.modules.get("torch")  # an iterator that --loader names may need none
    if torch is None or not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _stream_for(key: str, info: dict[str, Any], source: tuple[Any, ...] | None = None) -> _Stream:
    if not _steps.thread:
        _steps.thread = -1  # asked for once
        optimizer = sys.modules.get("torch.optim.optimizer")
        if optimizer is not None:
            optimizer.register_optimizer_step_post_hook(_steps)
    if key not in _streams:
        _streams[key] = _Stream({"key": key, **info}, source)
    return _streams[key]


@_quietly
def _stream_of_loader(loader: Any) -> _Stream:
    where = getattr(loader, "_bench_watch_place", "")
    key, dataset = _key(loader.dataset, where), _innermost(loader.dataset)
    while (other := _loaders.get(key, lambda: None)()) is not None and other is not loader:
        key += _ANOTHER  # two of one dataset that are made in one line
    _loaders[key] = weakref.ref(loader)
    is_list = hasattr(loader.dataset, "__getitem__") and hasattr(loader.dataset, "__len__")
    info = {
        "kind": "DataLoader",
        "where": where,
        "dataset": type(dataset).__name__,
        "samples": len(loader.dataset) if is_list else None,
        "root": str(getattr(dataset, "root", "")),
        "replaceable": _is_replaceable(dataset),
        "workers": loader.num_workers,
        "prefetch": loader.prefetch_factor or 0,
        "persistent": loader.persistent_workers,
        "pinned": loader.pin_memory,
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "pillow": getattr(sys.modules.get("PIL"), "__version__", ""),
    }
    start = loader.multiprocessing_context
    size = 0 if loader.batch_sampler is None else info["batch_size"] or 1
    source = (loader.dataset, loader.collate_fn, size, loader.num_workers, start)
    return _stream_for(key, info, source)


@_quietly
def _stream_of_ours(iteration: Any) -> _Stream:
    loader = iteration._loader
    spec, where = loader.spec, _frame()[0]
    info = {"kind": "loaders", "where": where, "dataset": "loaders.build", "samples": loader.samples}
    info |= {"root": str(getattr(spec, "path", "")), "workers": 0, "batch_size": loader.batch_size}
    stream = _stream_for(f"loaders {id(loader)}", info)
    if not hasattr(iteration, "_bench_watch"):
        iteration._bench_watch = True
        stream.begin(time.monotonic(), time.monotonic())
    return stream


def _watch_named(module: ModuleType, name: str) -> None:
    """Time what the function, or the class, `name` of `module` gives to iterate over."""
    found = getattr(module, name, None)
    _log.write("loader", callable(found))
    if found is None:
        return
    info = {"kind": "named", "where": _LOADER, "dataset": _LOADER, "workers": 0}

    class Timed:
        """The iterable, and its iterator, which is timed."""

        def __init__(self, inner: Any) -> None:
            self._inner, self._begun = inner, False

        def __iter__(self) -> Any:
            return Timed(iter(self._inner))

        def __next__(self) -> Any:
            return next(self._inner)

        def __len__(self) -> int:
            return len(self._inner)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    def stream_of(timed: Any) -> _Stream:
        stream = _stream_for(_LOADER, info)
        if not timed._begun:
            timed._begun = True
            stream.begin(time.monotonic(), time.monotonic())
        return stream

    Timed.__next__ = _timed_next(Timed.__next__, stream_of)  # type: ignore[method-assign,assignment]
    if isinstance(found, type):
        inner = found.__iter__  # type: ignore[attr-defined]
        found.__iter__ = lambda self: Timed(inner(self))  # type: ignore[attr-defined]
    else:
        setattr(module, name, functools.wraps(found)(lambda *args, **kwargs: Timed(found(*args, **kwargs))))


def _frame() -> tuple[str, bool]:
    """`file:line` of the script that is running, and whether it is that which called, not a framework."""
    frame, outer, direct = sys._getframe(1), "", True
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith("<"):
            place = f"{os.path.abspath(name)}:{frame.f_lineno}"
            if not any(part in name for part in ("site-packages", "dist-packages", os.__file__[:-5])):
                return place, direct
            outer, direct = place, direct and f"{os.sep}torch{os.sep}" in name
        frame = frame.f_back  # type: ignore[assignment]
    return outer, False


@_quietly
def _place(dataset: Any) -> str:
    """Where a DataLoader is made; for one that a framework makes of another, where that was made."""
    place, direct = _frame()
    found = _made.get(id(dataset))
    is_known = found is not None and found[0]() is dataset
    if found is not None and is_known and not direct:
        return found[1]
    if not is_known:
        _note_place(dataset, place)
    return place


def _note_place(dataset: Any, place: str) -> None:
    with contextlib.suppress(TypeError):  # of what cannot be referred to weakly
        _made[id(dataset)] = weakref.ref(dataset), place


def _innermost(dataset: Any) -> Any:
    """The dataset within torch's Subsets."""
    while type(dataset).__name__ == "Subset" and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


def _key(dataset: Any, where: str) -> str:
    """The same in another run of the script."""
    inner = _innermost(dataset)
    try:
        samples = len(dataset)
    except TypeError:
        samples = -1
    return f"{where} {type(inner).__name__} {getattr(inner, 'root', '')} {samples}"


def _is_replaceable(dataset: Any) -> bool:
    """Whether its pictures are files below `root`, which torchvision's own function loads."""
    load = getattr(dataset, "loader", None)
    named = (getattr(load, "__module__", ""), getattr(load, "__name__", ""))
    usual = [("torchvision.datasets.folder", name) for name in ("default_loader", "pil_loader")]
    return hasattr(dataset, "root") and hasattr(dataset, "samples") and named in usual


def _tensors(batch: Any) -> Iterator[Any]:
    """The tensors in a batch of lists, dicts and the like."""
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        yield batch
    elif isinstance(batch, dict) or hasattr(batch, "values"):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        for value in batch[:8]:
            yield from _tensors(value)


def _images(batch: Any) -> int:
    first = next(_tensors(batch), None)
    return int(first.shape[0]) if first is not None and len(first.shape) else 1


def _describe_batch(batch: Any) -> dict[str, Any]:
    found = list(_tensors(batch))
    kinds = [f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in found]
    pictures = [
        one.shape for one in found if len(one.shape) == 4 and {1, 3, 4} & {one.shape[1], one.shape[3]}
    ]
    side = max((shape[2 if shape[1] in (1, 3, 4) else 1] for shape in pictures), default=0)
    moved = sum(one.numel() * one.element_size() for one in found if hasattr(one, "element_size"))
    return {"kinds": kinds[:4] or [type(batch).__name__], "side": int(side), "bytes": moved}


@_quietly
def _cured(dataset: Any, place: str, named: dict[str, Any]) -> Any:
    """Dataset, arguments and keywords of the DataLoader that is to be cured; None: it is another one."""
    cure = _CONFIG["cure"]
    if cure["key"].replace(_ANOTHER, "") != _key(dataset, place):
        return None
    if cure.get("shards"):
        dataset = _with_pictures_of(dataset, cure["shards"])
        _note_place(dataset, place)
    _log.write("cured", cure)
    return dataset, (), {**named, **cure.get("keywords", {})}


def _with_pictures_of(dataset: Any, folder: str) -> Any:
    """The dataset, its samples, labels and transforms, with the pictures that are stored in `folder`."""
    changed = copy.copy(dataset)
    if _innermost(dataset) is dataset:
        changed.loader = Stored(folder, dataset.root, dataset.loader)
    else:
        changed.dataset = _with_pictures_of(dataset.dataset, folder)
    return changed


class Stored:
    """Loads a file of a tree from what it was converted to; a picture that is not in there from its file."""

    def __init__(self, folder: str, root: Any, load: Callable[[str], Any]) -> None:
        import loaders

        self._dataset, self._root, self._load = loaders.ImageDataset(folder), os.path.abspath(root), load
        self._places = {path: place for place, (path, _) in enumerate(self._dataset.samples)}

    def __call__(self, path: str) -> Any:
        place = self._places.get(os.path.relpath(os.path.abspath(path), self._root).replace(os.sep, "/"))
        return self._load(path) if place is None else self._dataset[place][0].convert("RGB")


def _probe_at_exit() -> None:
    """Of a script that ends before it was asked: probe what it trained on most."""
    found = [stream for stream in _streams.values() if stream.source is not None]
    crashed, first = hasattr(sys, "last_value"), os.environ.get("RANK", "0") == "0"
    if found and first and not crashed and _records() and not os.path.exists(os.path.join(_FOLDER, "done")):
        max(found, key=lambda stream: (stream.trained, stream.batches)).probe()


def _probe(
    dataset: Any, collate: Callable[[Any], Any], batch_size: int, workers: int, start: Any
) -> dict[str, Any]:
    """Time the parts of a few samples in a process of its own, in which nothing of the script changes."""
    torch = sys.modules["torch"]
    start = start or torch.multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receive, send = start.Pipe(duplex=False)
    process = start.Process(
        target=_probe_here, args=(send, dataset, collate, batch_size, workers), daemon=True
    )
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


def _probe_here(send: Any, dataset: Any, collate: Any, batch_size: int, workers: int) -> None:
    os.environ.pop("BENCH_WATCH", None)
    try:
        if workers:  # its batches are collated in shared memory
            worker: Any = sys.modules["torch.utils.data._utils.worker"]
            worker._worker_info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=dataset)
        found = _time_parts(dataset, collate, batch_size)
        if not workers:
            found["parts"].pop("copy")
        send.send(found)
    except Exception as error:
        send.send({"failed": f"{type(error).__name__}: {error}"[:500]})
    os._exit(0)  # nothing that the script registered runs a second time


def _time_parts(dataset: Any, collate: Any, batch_size: int) -> dict[str, Any]:
    """Seconds of a sample by part, the mean of a few, and of collating and handing over a batch.

    Parts are times of the CPU. What a sample took beyond the CPU's time and the wait for a CPU is reading.
    """
    sys.modules["torch"].set_num_threads(1)  # as in the workers of a DataLoader
    clock = _Parts()
    samples, walls, cpus, reads = [], [], [], []
    until_s = time.monotonic() + _PROBE_S
    for sample in _few(dataset):
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
    images = 1 if batch_size else _images(samples[-1])
    found = {**parts, "python": max(0.0, python_s), "read": sum(reads) / count}
    per_batch = {"collate": 0.0, "copy": 0.0}
    batch = (samples * (batch_size // len(samples) + 1))[:batch_size] if batch_size else samples[-1]
    with contextlib.suppress(Exception):
        from multiprocessing.reduction import ForkingPickler

        for _ in range(2):  # the first time memory is asked for
            clock.since()
            collated = collate(batch)
            per_batch["collate"] = clock.since()[1]
            kept = ForkingPickler.dumps(collated)
            per_batch["copy"] = clock.since()[1]
            del kept
    each = {name: seconds / images for name, seconds in found.items()}
    each |= {name: seconds / (batch_size or images) for name, seconds in per_batch.items()}
    spread = sorted(cpu_s + read_s for cpu_s, read_s in zip(cpus, reads, strict=True)) or [0.0]
    quarter = len(spread) // 4
    return {"parts": each, "samples": count, "quartiles": [spread[quarter], spread[-1 - quarter]]}


def _few(dataset: Any) -> Iterator[Any]:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        yield from iter(dataset)
        return
    places = random.Random(41).sample(range(len(dataset)), min(len(dataset), _PROBE_SAMPLES))
    at_once = getattr(dataset, "__getitems__", None)
    for place in places:
        yield at_once([place])[0] if callable(at_once) else dataset[place]


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
