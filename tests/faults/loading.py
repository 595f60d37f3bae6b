"""Loaders used whole, dropped, closed and interrupted midway, over every backend.

What is served is right, a Ctrl-C arrives, and afterwards no thread, process or open file more is there.
"""

import gc
import json
import os
import random
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loaders
from precache import PrecacheError, Recipe, convert
from tests.building import build_loader
from tests.faults import nursery
from tests.faults.nursery import describe
from tests.faults.tally import RIGHT, Outcome, Tally
from tests.faults.worlds import FORMATS, SIZE, make_tree

try:
    import nvidia.dali  # noqa: F401 (here, so that it is not loaded in each child)

    _DALI = True
except ImportError:
    _DALI = False

CASE_S = 20.0  # of which five for what ends by itself
_ARMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
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
_READERS = tuple(arm for arm in _ARMS if _DALI or arm[0] != "dali")

Samples = dict[int, tuple[int, bytes]]  # id -> label, pixels


@dataclass(slots=True)
class World:
    folder: Path
    samples: dict[str, Samples]  # by backend and format
    base: tuple[int, ...] = ()  # held before any case
    sniper: tuple[int, int] = field(default=(-1, -1))  # pipes: seconds to wait, done


class Wrong(Exception):
    """What was served is not what is stored."""


def attack(seed: int, count: int, tmp_path: Path, jobs: int = 1) -> Tally:
    return nursery.run(__name__, seed, count, tmp_path, jobs=jobs, chunk=50)


def prepare(world: Path) -> None:
    make_tree(world / "raw")
    (world / "raw/000.class/broken.jpg").unlink()  # a raw tree serves what it holds
    for name in FORMATS:
        recipe = Recipe(format=name, size=SIZE, fit="crop", shard_bytes=3 * SIZE * SIZE * 3, splits="train=1")
        convert(world / "raw", world / name, recipe, workers=0)
    truth = {}
    for backend, name, settings in _READERS:
        if f"{backend} {name}" not in truth:
            with _build(world, backend, name, settings) as loader:
                served = {id: (label, pixels.hex()) for id, label, pixels in _rows(iter(loader))}
            assert len(served) == 12, (backend, name, sorted(served))
            truth[f"{backend} {name}"] = served
    (world / "truth.json").write_text(json.dumps(truth))


def load(world: Path) -> World:
    truth = json.loads((world / "truth.json").read_text())
    samples = {
        arm: {int(id): (label, bytes.fromhex(pixels)) for id, (label, pixels) in epoch.items()}
        for arm, epoch in truth.items()
    }
    return World(world, samples)


def warm(world: World) -> None:
    """What the first loader of each backend leaves for good is there before any is counted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    world.sniper = _start_sniper()
    for backend, name, settings in _READERS:
        with _build(world.folder, backend, name, settings) as loader:
            list(_rows(iter(loader)))
    gc.collect()
    gc.freeze()  # what torch consists of need not be looked at again after each case
    time.sleep(0.2)
    world.base = _held()


def case(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    backend, name, settings = draw.choice(_READERS)
    way = draw.choice(list(_WAYS))
    settings = {**settings, "batch_size": draw.choice((1, 2, 5, 64))}
    did = f"{backend} {name} {settings}: {way}"
    nursery.say(did)
    behind: list[str] = []
    threading.excepthook = lambda args: behind.append(describe(args.exc_value or SystemExit()))
    sys.unraisablehook = lambda args: behind.append(describe(args.exc_value or SystemExit()))
    truth = world.samples[f"{backend} {name}"]

    def check(rows: Iterator[tuple[int, int, bytes]]) -> Iterator[int]:
        for id, label, pixels in rows:
            if truth.get(id, ("", b""))[0] != label or (backend != "synthetic" and truth[id][1] != pixels):
                raise Wrong(f"sample {id} is not as stored")
            yield id

    def build() -> loaders.Loader:
        return _build(world.folder, backend, name, settings)

    start_s = time.monotonic()
    try:
        bad = _WAYS[way](build, check, sorted(truth), draw, world)
    except Wrong as error:
        bad = Outcome("wrong", str(error))
    except BaseException as error:
        bad = Outcome("traceback", describe(error))
    if bad is None and (took_s := time.monotonic() - start_s) > nursery.HANG_S:
        bad = Outcome("hang", f"took {took_s:.0f} s")
    if bad is None and behind:
        bad = Outcome("loss" if "KeyboardInterrupt" in behind[0] else "traceback", f"unheard: {behind[0]}")
    if bad is None and (left := _left(world.base)):
        bad = Outcome("loss", left)
    if bad is not None:
        world.base = tuple(max(pair) for pair in zip(world.base, _held(), strict=True))  # blame no other case
    return RIGHT if bad is None else Outcome(bad.kind, f"{did}: {bad.detail}")


def _build(folder: Path, backend: str, name: str, settings: dict[str, Any]) -> loaders.Loader:
    return build_loader(folder / name, backend=backend, size=SIZE, **{"workers": 1, **settings})


def _rows(batches: Iterator[Any]) -> Iterator[tuple[int, int, bytes]]:
    """(id, label, pixels) of all samples of `batches`."""
    for batch in batches:
        for id, label, picture in zip(batch.ids.tolist(), batch.labels.tolist(), batch.images, strict=True):
            yield id, label, picture.contiguous().numpy().tobytes()


# Ways to use one: (build, check, ids, draw, world) -> what went wrong, or None.

Build = Callable[[], loaders.Loader]
Check = Callable[[Iterator[tuple[int, int, bytes]]], Iterator[int]]


def _whole(build: Build, check: Check, ids: list[int], draw: random.Random, world: World) -> Outcome | None:
    loader = build()
    for _ in range(draw.choice((1, 2, 3))):
        if sorted(check(_rows(iter(loader)))) != ids:
            return Outcome("wrong", "an epoch is not every sample once")
    if draw.random() < 0.5:
        loader.close()
    return None


def _dropped(build: Build, check: Check, ids: list[int], draw: random.Random, world: World) -> Outcome | None:
    loader = build()
    for count, _ in enumerate(check(_rows(iter(loader)))):
        if count == draw.randrange(len(ids)):
            break
    return None


def _unused(build: Build, check: Check, ids: list[int], draw: random.Random, world: World) -> Outcome | None:
    loader = build()
    if draw.random() < 0.5:
        iter(loader)
    return None


def _closed(build: Build, check: Check, ids: list[int], draw: random.Random, world: World) -> Outcome | None:
    loader = build()
    iterator = iter(loader)
    list(check(_rows(iter([next(iterator)]))))
    loader.close()
    with suppress(PrecacheError):  # it may serve no more, or say so
        list(check(_rows(iterator)))
    loader.close()
    return None


def _raised(build: Build, check: Check, ids: list[int], draw: random.Random, world: World) -> Outcome | None:
    try:
        with build() as loader:
            for _ in check(_rows(iter(loader))):
                raise ZeroDivisionError
    except ZeroDivisionError:
        return None
    return Outcome("wrong", "an exception in the loop was lost")


def _two(build: Build, check: Check, ids: list[int], draw: random.Random, world: World) -> Outcome | None:
    """Both iterators serve all, or the first one says that it cannot."""
    with build() as loader:
        first = check(_rows(iter(loader)))
        served = [next(first)]
        second = sorted(check(_rows(iter(loader))))
        if second != ids:
            return Outcome("wrong", "the second iterator does not serve every sample once")
        try:
            served += list(first)
        except PrecacheError:
            return None
        complete = sorted(served) == ids
        return None if complete else Outcome("wrong", f"the first iterator ended after {len(served)} samples")


def _interrupted(
    build: Build, check: Check, ids: list[int], draw: random.Random, world: World
) -> Outcome | None:
    """A Ctrl-C while it is built, in the loop, between two epochs, or as an epoch is left."""
    ask, done = world.sniper
    left = draw.random() < 0.5
    lost = False
    try:
        loader = build() if draw.random() < 0.7 else None
        os.write(ask, struct.pack("d", draw.choice((0.0, draw.uniform(0, 0.02), draw.uniform(0, 0.1)))))
        if loader is None:
            loader = build()
        for _ in check(_rows(iter(loader))):
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
    deadline = time.monotonic() + 5
    while any(now > then for now, then in zip(_held(), base, strict=True)):
        if time.monotonic() > deadline:
            names = ("threads of Python", "threads", "processes", "open files")
            more = [
                f"{now - then} {what}"
                for now, then, what in zip(_held(), base, names, strict=True)
                if now > then
            ]
            return f"left behind: {', '.join(more)} ({', '.join(t.name for t in threading.enumerate()[1:])})"
        time.sleep(0.01)
    return ""


_WAYS: dict[str, Callable[..., Outcome | None]] = {
    "whole": _whole,
    "dropped": _dropped,
    "unused": _unused,
    "closed": _closed,
    "raised": _raised,
    "two iterators": _two,
    "interrupted": _interrupted,
}
