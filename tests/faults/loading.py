"""Loaders used whole, dropped, closed and interrupted midway, over every backend.

What is served is right, a Ctrl-C arrives, and afterwards no thread, process or open file more is there.
"""

import gc
import os
import random
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precache import PrecacheError
from tests.faults import nursery, serving
from tests.faults.serving import Samples, Wrong
from tests.faults.tally import RIGHT, Outcome
from tests.faults.worlds import make_tree

CASE_S, CHUNK = 20.0, 50  # of which five for what ends by itself
_READERS = serving.installed(
    ("pytorch", "raw", {"workers": 0}),
    ("pytorch", "raw", {"workers": 2}),
    ("shards", "shards", {}),
    ("shards", "shards", {"shuffle": "window"}),
    ("webdataset", "webdataset", {}),
    ("dali", "raw", {}),
    ("dali", "webdataset", {}),
    ("dali", "dali", {}),
    ("synthetic", "shards", {}),
    ("shards", "shards", {"cache": "ram"}),
)


@dataclass(slots=True)
class World:
    folder: Path
    samples: dict[str, Samples]  # by backend, format and split
    base: tuple[int, ...] = ()  # held before any case
    sniper: tuple[int, int] = field(default=(-1, -1))  # pipes: seconds to wait, done


def prepare(world: Path) -> None:
    make_tree(world / "raw")
    (world / "raw/000.class/broken.jpg").unlink()  # a raw tree serves what it holds
    serving.prepare(world, world / "raw", _READERS, "train=1")


def load(world: Path) -> World:
    return World(world, serving.load(world))


def warm(world: World) -> None:
    """What the first loader of each backend leaves for good is there before any is counted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    world.sniper = _start_sniper()
    for backend, name, settings in _READERS:
        with serving.build(world.folder, backend, name, settings) as loader:
            list(loader)
    gc.collect()
    gc.freeze()  # what torch consists of need not be looked at again after each case
    time.sleep(0.2)
    world.base = _held()


def case(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    backend, name, settings = draw.choice(_READERS)
    way = draw.choice([*_WAYS, _interrupted])
    settings = {**settings, "batch_size": draw.choice((1, 2, 5, 64))}
    did = f"{backend} {name} {settings}: {way.__name__.removeprefix('_')}"
    nursery.say(did)
    truth = world.samples[f"{backend} {name} train"]
    start_s = time.monotonic()

    def use() -> Outcome | None:
        def build() -> Any:
            return serving.build(world.folder, backend, name, settings)

        def check(batches: Iterable[Any]) -> Iterator[int]:
            return serving.checked(serving.rows(batches), truth, backend)

        if way is _interrupted:
            return _interrupted(build, check, draw, world.sniper)
        way(build, check, sorted(truth), draw)
        return None

    bad = serving.watched(use)
    if bad is None and (took_s := time.monotonic() - start_s) > nursery.HANG_S:
        bad = Outcome("hang", f"took {took_s:.0f} s")
    if bad is None and (left := _left(world.base)):
        bad = Outcome("loss", left)
    if bad is not None:
        world.base = tuple(max(pair) for pair in zip(world.base, _held(), strict=True))  # blame no other case
    return RIGHT if bad is None else Outcome(bad.kind, f"{did}: {bad.detail}")


# Ways to use one.

Build = Callable[[], Any]
Check = Callable[[Iterable[Any]], Iterator[int]]


def _whole(build: Build, check: Check, ids: list[int], draw: random.Random) -> None:
    loader = build()
    for _ in range(draw.choice((1, 2, 3))):
        _all(check(loader), ids)
    if draw.random() < 0.5:
        loader.close()


def _all(served: Iterable[int], ids: list[int]) -> None:
    if sorted(served) != ids:
        raise Wrong("an epoch is not every sample once")


def _dropped(build: Build, check: Check, ids: list[int], draw: random.Random) -> None:
    last = draw.randrange(len(ids))
    for count, _ in enumerate(check(build())):
        if count == last:
            break


def _unused(build: Build, check: Check, ids: list[int], draw: random.Random) -> None:
    loader = build()
    if draw.random() < 0.5:
        iter(loader)


def _closed(build: Build, check: Check, ids: list[int], draw: random.Random) -> None:
    loader = build()
    iterator = iter(loader)
    list(check([next(iterator)]))
    loader.close()
    with suppress(PrecacheError):  # it may serve no more, or say so
        list(check(iterator))
    loader.close()


def _raised(build: Build, check: Check, ids: list[int], draw: random.Random) -> None:
    try:
        with build() as loader:
            for _ in check(loader):
                raise ZeroDivisionError
    except ZeroDivisionError:
        return
    raise Wrong("an exception in the loop was lost")


def _two_iterators(build: Build, check: Check, ids: list[int], draw: random.Random) -> None:
    """Both serve all, or the first one says that it cannot."""
    with build() as loader:
        first = check(iter(loader))
        served = [next(first)]
        _all(check(loader), ids)
        with suppress(PrecacheError):
            _all([*served, *first], ids)


_WAYS: list[Callable[[Build, Check, list[int], random.Random], None]] = [
    _whole, _dropped, _unused, _closed, _raised, _two_iterators,
]  # fmt: skip


def _interrupted(build: Build, check: Check, draw: random.Random, sniper: tuple[int, int]) -> Outcome | None:
    """A Ctrl-C while it is built, in the loop, between two epochs, or as an epoch is left."""
    ask, done = sniper
    left = draw.random() < 0.5
    lost = False
    try:
        loader = build() if draw.random() < 0.7 else None
        os.write(ask, struct.pack("d", draw.choice((0.0, draw.uniform(0, 0.02), draw.uniform(0, 0.1)))))
        if loader is None:
            loader = build()
        for _ in check(loader):
            pass
        sent_s = None
        while sent_s is None or time.monotonic() < sent_s + 0.5:
            for _ in loader:  # a tight loop
                if left:
                    break
            if sent_s is None and select.select([done], [], [], 0)[0]:
                sent_s = time.monotonic()
        lost = True
    except KeyboardInterrupt:
        pass
    os.read(done, 1)
    return Outcome("loss", "a Ctrl-C was lost") if lost else None


def _start_sniper() -> tuple[int, int]:
    """A process that sends SIGINT to this one, so many seconds after it was asked."""
    asked, ask = os.pipe()
    done, said = os.pipe()
    victim = os.getpid()
    if os.fork() == 0:
        os.close(ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while data := os.read(asked, 8):
            time.sleep(*struct.unpack("d", data))
            os.kill(victim, signal.SIGINT)
            os.write(said, b".")
        os._exit(0)
    os.close(asked)
    os.close(said)
    return ask, done


def _held() -> tuple[int, ...]:
    """Threads of Python, threads in all, child processes, open files."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    threads = len(os.listdir("/proc/self/task"))
    return threading.active_count(), threads, len(children), len(os.listdir("/proc/self/fd"))


def _left(base: tuple[int, ...]) -> str:
    """What there is more than in `base` once it had five seconds to go away; empty if nothing is."""
    gc.collect()
    deadline_s = time.monotonic() + 5
    while any(now > then for now, then in zip(_held(), base, strict=True)):
        if time.monotonic() > deadline_s:
            names = ("threads of Python", "threads", "processes", "open files")
            counts = zip(_held(), base, names, strict=True)
            more = ", ".join(f"{now - then} {what}" for now, then, what in counts if now > then)
            return f"left behind: {more} ({', '.join(t.name for t in threading.enumerate()[1:])})"
        time.sleep(0.01)
    return ""
