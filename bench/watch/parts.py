"""Timing of the parts of a sample: reading, decoding, each transform by its name, collating, copying.

A few samples of a watched script's loader are made in a process of its own, as a worker makes them, so that
what is wrapped for the timing is wrapped in that process alone. Like the hook, this module runs in the
interpreter of the script and imports the standard library alone.

    stage       name                    CPU time of
    read        -                       nothing: the time of a sample beyond CPU time and waiting for a CPU
    decode      library                 the functions of _DECODERS
    transform   class or function       each step of a Compose, and of what else holds steps, as RandomApply
                                        or OneOf; each transform of torchvision or Albumentations; resizing
    python      -                       all else of the dataset
    collate     -                       making a batch
    copy        -                       putting a batch where another process reads it

A transform holds what it calls, but for decoding: Pillow decodes when the first transform needs the pixels.
"""

import contextlib
import functools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_SECONDS, _SAMPLES, _LIMIT_S = 2.0, 64, 20.0
_FORMATS = ("image", "jpeg", "png", "webp", "gif", "avif", "heic")
_DECODERS = {
    "PIL.Image:open": "Pillow",
    "PIL.ImageFile:ImageFile.load": "Pillow",
    "simplejpeg:decode_jpeg": "simplejpeg",
    "cv2:imread": "OpenCV",
    "cv2:imdecode": "OpenCV",
    **{f"torchvision.io:decode_{form}": "torchvision" for form in _FORMATS},
    **{f"torchcodec.decoders:decode_{form}": "torchcodec" for form in _FORMATS},
}
"""Library that decodes, by 'module:function'."""
_HELPERS = {
    "PIL.Image:Image.convert": ("decode", "Pillow"),
    "PIL.Image:Image.resize": ("transform", "Image.resize"),
    "cv2:resize": ("transform", "cv2.resize"),
    "torch.nn.functional:interpolate": ("transform", "interpolate"),
}
"""Stage and name of functions that datasets call themselves; within a transform they are part of it."""
_TRANSFORMS = ("torchvision.transforms", "torchvision.transforms.v2", "albumentations")
"""Packages of transforms."""


@dataclass(frozen=True)
class ProbeInput:
    """Properties of a loader that a probe needs.

    Attributes:
        dataset: dataset that gives the samples.
        collate: function that makes a batch of samples.
        batch_size: samples of a batch; 0 where a sample is a batch.
        count_samples: function that counts the samples of such a batch.
        takes_lists: whether an index of the dataset is a list of sample indices.
        workers: worker processes of the loader.
        start: multiprocessing context; None: torch's default.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    batch_size: int
    count_samples: Callable[[Any], int]
    takes_lists: bool
    workers: int
    start: Any


def probe(probe_input: ProbeInput) -> dict[str, Any]:
    """Time the parts of a few samples in a process of its own, so that nothing of the script changes.

    Returns:
        `parts`, each with its `stage`, its `name` and the mean `seconds` of a sample; or `failed`, why there
        are none.
    """
    context = probe_input.start
    if context is None:
        torch = sys.modules["torch"]
        context = torch.multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_run_probe, args=(send, probe_input), daemon=True)
    process.start()
    send.close()
    try:
        if not receive.poll(_LIMIT_S):
            return {"failed": f"gave no sample within {_LIMIT_S:.0f} s"}
        values: dict[str, Any] = receive.recv()
        return values
    except EOFError:
        return {"failed": "its process died"}
    finally:
        process.kill()
        process.join()


def _run_probe(send: Any, probe_input: ProbeInput) -> None:
    """Time parts in this process, which was started for that, and send them."""
    os.environ.pop("BENCH_WATCH", None)
    try:
        if probe_input.workers:  # workers collate batches in shared memory
            worker: Any = sys.modules["torch.utils.data._utils.worker"]
            info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=probe_input.dataset)
            worker._worker_info = info
        seconds = _time_parts(probe_input)
        parts = [{"stage": stage, "name": name, "seconds": value} for (stage, name), value in seconds.items()]
        send.send({"parts": parts})
    except Exception as error:
        send.send({"failed": f"{type(error).__name__}: {error}"[:500]})
    os._exit(0)  # exit handlers of the script do not run a second time


def _time_parts(probe_input: ProbeInput) -> dict[tuple[str, str], float]:
    """Time the parts of a few samples, and collating and copying a batch.

    Returns:
        The mean seconds of a sample, by stage and name.
    """
    sys.modules["torch"].set_num_threads(1)  # workers of a DataLoader have one, too
    clock = _PartClock()
    samples: list[Any] = []
    count, cpu_total_s, read_total_s = 0, 0.0, 0.0
    until_s = time.monotonic() + _SECONDS
    batch_size = probe_input.batch_size
    for sample in _draw_samples(probe_input):
        wall_s, cpu_s, queued_s = clock.lap()
        samples.append(sample)
        if len(samples) > 2:  # the first samples import modules and open files
            count += 1
            cpu_total_s += cpu_s
            read_total_s += max(0.0, wall_s - cpu_s - queued_s)
        else:
            clock.seconds.clear()
        if len(samples) >= _SAMPLES or (count and time.monotonic() > until_s):
            break
        clock.lap()
    if not count:
        raise ValueError(f"it gave {len(samples)} samples, and 3 are needed")
    python_s = max(0.0, cpu_total_s - sum(clock.seconds.values()))
    totals_s = {**clock.seconds, ("python", ""): python_s, ("read", ""): read_total_s}
    images = 1 if batch_size else probe_input.count_samples(samples[-1])
    parts = {part: seconds / count / images for part, seconds in totals_s.items()}
    batch = (samples * (batch_size // len(samples) + 1))[:batch_size] if batch_size else samples[-1]
    with contextlib.suppress(Exception):
        from multiprocessing.reduction import ForkingPickler

        for _ in range(2):  # the first time allocates memory
            clock.lap()
            collated = probe_input.collate(batch)
            parts["collate", ""] = clock.lap()[1] / (batch_size or images)
            if probe_input.workers:
                pickled = ForkingPickler.dumps(collated)
                parts["copy", ""] = clock.lap()[1] / (batch_size or images)
                del pickled
    return parts


def _draw_samples(probe_input: ProbeInput) -> Iterator[Any]:
    """Yield samples at random, or in the order of a dataset that can only be iterated."""
    dataset = probe_input.dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        yield from iter(dataset)
        return
    indices = random.Random(41).sample(range(len(dataset)), min(len(dataset), _SAMPLES))
    get_items = getattr(dataset, "__getitems__", None)
    for index in indices:
        if probe_input.takes_lists:
            yield dataset[[index]]
        elif callable(get_items):
            yield get_items([index])[0]
        else:
            yield dataset[index]


class _PartClock:
    """Clock of the CPU time of decoders and transforms, which it wraps in this process for good.

    Attributes:
        seconds: CPU seconds so far by stage and name, each without that of the others within it.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = {}
        self._inner_s: list[float] = []  # timed within each of the calls that run now
        self._is_in_transform = False
        self._wrapped_classes: set[type] = set()
        self._last = (0.0, 0.0, 0.0)
        parts = {name: ("decode", library) for name, library in _DECODERS.items()} | _HELPERS
        functions: dict[int, Any] = {}  # timed functions by the ids of those that they wrap
        for name, part in parts.items():
            module, _, path = name.partition(":")
            class_name, _, function_name = path.rpartition(".")
            owner: Any = sys.modules.get(module)
            if class_name:
                owner = getattr(owner, class_name, None)
            function = getattr(owner, function_name, None)
            if function is not None:
                functions[id(function)] = self._timed(function, *part, outermost_only=name in _HELPERS)
                setattr(owner, function_name, functions[id(function)])
        for importer in list(sys.modules.values()):  # those that imported a function by name
            for name, value in list(getattr(importer, "__dict__", {}).items()):
                if id(value) in functions:
                    setattr(importer, name, functions[id(value)])
        for package in filter(sys.modules.get, _TRANSFORMS):
            for kind in list(vars(sys.modules[package]).values()):
                if isinstance(kind, type) and kind.__module__.startswith(package):
                    self._wrap_class(kind)
        self.lap()

    def lap(self) -> tuple[float, float, float]:
        """Return the seconds since the last call: of the clock, of CPU time, and of waiting for a CPU."""
        queued_s = 0.0
        with contextlib.suppress(OSError, IndexError), open("/proc/thread-self/schedstat") as file:
            queued_s = int(file.read().split()[1]) / 1e9
        now = (time.monotonic(), time.process_time(), queued_s)
        passed = tuple(after - before for before, after in zip(self._last, now, strict=True))
        self._last = now
        return passed  # type: ignore[return-value]

    def _timed(self, function: Any, stage: str, name: str, *, outermost_only: bool) -> Any:
        """Wrap a function so that its time is added to a part."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            was_in_transform = self._is_in_transform
            if was_in_transform and outermost_only:
                return function(*args, **kwargs)
            part = stage, name or type(args[0]).__name__
            self._is_in_transform = was_in_transform or stage == "transform"
            self._inner_s.append(0.0)
            begin_s = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                passed_s = time.process_time() - begin_s
                self.seconds[part] = self.seconds.get(part, 0.0) + passed_s - self._inner_s.pop()
                if self._inner_s:
                    self._inner_s[-1] += passed_s
                self._is_in_transform = was_in_transform

        return call

    def _wrap_class(self, kind: Any) -> bool:
        """Wrap the calls of a class of transforms; False where there are none, or they cannot be wrapped."""
        if kind in self._wrapped_classes:
            return True
        if not any("__call__" in vars(base) for base in kind.__mro__):
            return False
        inner = kind.__call__
        timed = self._timed(inner, "transform", "", outermost_only=True)

        @functools.wraps(inner)
        def call(transform: Any, *args: Any, **kwargs: Any) -> Any:
            steps = getattr(transform, "transforms", None)
            if not isinstance(steps, (list, tuple)) and type(steps).__name__ != "ModuleList":
                return timed(transform, *args, **kwargs)
            self._wrap_steps(transform)
            return inner(transform, *args, **kwargs)

        try:
            kind.__call__ = call
        except TypeError:  # functions, and other classes that are not written in Python
            return False
        self._wrapped_classes.add(kind)
        return True

    def _wrap_steps(self, holder: Any) -> None:
        """Wrap what a Compose, or another transform that holds transforms, calls."""
        for position, step in enumerate(holder.transforms):
            if hasattr(step, "_bench_watch") or self._wrap_class(type(step)):
                continue
            function = getattr(step, "func", step)  # of a functools.partial
            timed = self._timed(
                step, "transform", getattr(function, "__name__", type(function).__name__), outermost_only=True
            )
            timed._bench_watch = True
            holder.transforms = [*holder.transforms[:position], timed, *holder.transforms[position + 1 :]]
