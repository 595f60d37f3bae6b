"""Attacks on what is read: folders that are damaged, and loaders that are used in every way."""

import contextlib
import gc
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precache import PrecacheError, Recipe, convert, open_dataset, verify
from precache.dataset import inspection
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from tests.building import build_loader
from tests.faults import mutations
from tests.faults.runner import CLEAN, HANG_S, RIGHT, Attack, Bad, Outcome, describe, forked, outcome_of, say
from tests.faults.trees import FORMATS, SIZE, make_tree

with suppress(ImportError):
    import nvidia.dali  # noqa: F401 (here, so that it is not loaded in each child)

# backend, what it reads, settings
_ALL: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("pytorch", "raw", {"workers": 0}),
    ("pytorch", "raw", {"workers": 2}),
    ("shards", "shards", {}),
    ("shards", "shards", {"on_error": "skip"}),
    ("shards", "shards", {"shuffle": "window"}),
    ("shards", "shards", {"shuffle": False}),
    ("shards", "shards", {"cache": "ram"}),
    ("webdataset", "webdataset", {}),
    ("webdataset", "webdataset", {"on_error": "skip"}),
    ("dali", "raw", {}),
    ("dali", "webdataset", {}),
    ("dali", "dali", {}),
    ("dali", "dali", {"on_error": "skip"}),
    ("synthetic", "shards", {}),
)
_ARMS = [arm for arm in _ALL if arm[0] != "dali" or "nvidia.dali" in sys.modules]
Samples = dict[int, tuple[int, bytes]]
"""id -> label, pixels."""


@dataclass(slots=True)
class World:
    folder: Path
    samples: dict[tuple[str, str, str], Samples]  # by backend, format and split
    base: dict[str, int] = field(default_factory=dict)  # held before any case
    sniper: tuple[int, int] = (-1, -1)  # pipes: seconds to wait, done


@dataclass(frozen=True, slots=True)
class Use:
    """A loader to be used: of which folder, with what it has to serve, and what is drawn."""

    folder: Path
    backend: str
    settings: dict[str, Any]
    truth: Samples
    draw: random.Random
    sniper: tuple[int, int]

    def build(self) -> Any:
        return _build(self.folder, self.backend, self.settings)

    def check(self, batches: Iterable[Any]) -> Iterator[int]:
        """The ids of `batches`, each once and as it is stored; pixels of `synthetic` are noise."""
        seen: set[int] = set()
        for id, label, pixels in _rows(batches):
            if id in seen or id not in self.truth:
                raise Bad("wrong", f"sample {id} {'was served twice' if id in seen else 'does not exist'}")
            if label != self.truth[id][0] or (self.backend != "synthetic" and pixels != self.truth[id][1]):
                raise Bad("wrong", f"sample {id} has another label, or other pixels")
            seen.add(id)
            yield id

    def check_all(self, served: Iterable[int]) -> None:
        if sorted(served) != sorted(self.truth):
            raise Bad("wrong", "an epoch is not every sample once")


def _build(folder: Path, backend: str, settings: dict[str, Any]) -> Any:
    return build_loader(folder, backend=backend, **{"size": SIZE, "workers": 1, **settings})


def _rows(batches: Iterable[Any]) -> Iterator[tuple[int, int, bytes]]:
    """(id, label, pixels) of all samples of `batches`."""
    for batch in batches:
        for id, label, picture in zip(batch.ids.tolist(), batch.labels.tolist(), batch.images, strict=True):
            yield id, label, picture.contiguous().numpy().tobytes()


def _prepare(folder: Path) -> World:
    """A tree, what it is in each format, and what each backend serves of it."""
    make_tree(folder / "raw")
    recipe = {"size": SIZE, "fit": "crop", "shard_bytes": 3 * SIZE * SIZE * 3, "splits": "train=0.7,val=0.3"}
    for name in FORMATS:
        convert(folder / "raw", folder / name, Recipe(format=name, **recipe), workers=0, max_rejects=0.5)  # type: ignore[arg-type]
    (folder / "raw/000.class/broken.jpg").unlink()  # a raw tree serves what it holds
    world = World(folder, {})
    for backend, name in {arm[:2]: arm for arm in _ARMS}:
        for split in ("train", "val")[: 1 if name == "raw" else 2]:
            with _build(folder / name, backend, {"split": split}) as loader:
                served = {id: (label, pixels) for id, label, pixels in _rows(loader)}
            assert served
            world.samples[backend, name, split] = served
    return world


def _watched(use: Callable[[], Outcome]) -> Outcome:
    """How it ends; what was raised where nobody hears it counts."""
    behind: list[str] = []
    threading.excepthook = lambda args: behind.append(describe(args.exc_value or SystemExit()))
    sys.unraisablehook = lambda args: behind.append(describe(args.exc_value or SystemExit()))
    outcome = outcome_of(use)
    if not outcome.failed and behind:
        kind = "loss" if "KeyboardInterrupt" in behind[0] else "traceback"
        return Outcome(kind, f"unheard: {behind[0]}")
    return outcome


# Converted folders with one file changed or replaced, read by every backend, verified and inspected. Each
# ends in the samples that are there, or in a PrecacheError of one line; and `verify` sees every change of a
# file.

_MOST_BYTES = 12 << 30  # of address space: torch alone takes some


def _warm_folders(world: World) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))


def _damage_one(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    reads = draw.random() < 0.75
    backend, name, settings = draw.choice([arm for arm in _ARMS if arm[1] != "raw"])
    tool = draw.choice(sorted(_TOOLS))
    data = Path(shutil.copytree(world.folder / name, folder / name))
    (folder / "elsewhere").mkdir()
    path, change = _damage(data, draw, folder / "elsewhere")
    split = "val" if path.name.startswith("val") else "train"
    settings = {"split": split, "batch_size": draw.choice((1, 4, 64)), **settings}
    say(f"{name}: {path.name} {change}; {f'{backend} {settings}' if reads else tool}")

    def read() -> None:
        use = Use(data, backend, settings, world.samples[backend, name, split], draw, world.sniper)
        with use.build() as loader:
            for _ in range(2):
                served = list(use.check(loader))
                if settings.get("on_error") != "skip":
                    use.check_all(served)

    def use() -> Outcome:
        try:
            read() if reads else _TOOLS[tool](world.folder / name, data)
        except PrecacheError as error:
            _check_short(str(error))
            return CLEAN
        return RIGHT

    return _watched(use)


def _check_short(text: str) -> None:
    if "\n" in text or len(text) > 2000:
        raise Bad("traceback", f"an error of {len(text)} characters: {text[:100]!r}")


def _damage(data: Path, draw: random.Random, elsewhere: Path) -> tuple[Path, str]:
    """Change one file; which, and how."""
    files = sorted(data.iterdir())
    kind = draw.choice(sorted({file.suffix for file in files}))  # the manifest as often as the shards
    path = draw.choice([file for file in files if file.suffix == kind])
    if draw.random() < 0.2:
        return path, mutations.replace_file(path, draw, elsewhere)
    content, other = path.read_bytes(), draw.choice(files).read_bytes()
    texts = (".json", ".idx", ".index", ".safetensors")
    spoil = mutations.spoil_json if path.suffix in texts else mutations.spoil
    path.write_bytes(spoil(content, draw, other))
    return path, f"changed ({len(content)} to {path.stat().st_size} bytes)"


def _summary(data: Path) -> str:
    return json.dumps(inspection.summary(open_dataset(data).manifest), sort_keys=True)


def _verify(original: Path, data: Path) -> None:
    problems = verify(data)
    for problem in problems:
        _check_short(problem)
    listed = {path.name for path in original.iterdir()} - {REJECTED_NAME}
    changed = sorted(file for file in listed if not _same(data / file, original / file))
    if changed and not problems:
        raise Bad("wrong", f"verify does not see that {changed[0]} changed")


def _same(path: Path, original: Path) -> bool:
    try:
        content, before = path.read_bytes() if path.is_file() else b"", original.read_bytes()
    except OSError:  # a link to a device that has nothing to read
        return False
    try:  # of the manifest, other blanks say the same
        return content == before or (path.name == MANIFEST_NAME and json.loads(content) == json.loads(before))
    except (ValueError, RecursionError):
        return False


def _inspect(original: Path, data: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        inspection.facts(open_dataset(data))
    if _summary(data) != _summary(original):
        raise Bad("wrong", "inspect shows what was not converted")


def _page(original: Path, data: Path) -> None:
    inspection.write_html(open_dataset(data), data.parent / "page.html")


def _open(original: Path, data: Path) -> None:
    found, stored = (open_dataset(path).read_index() for path in (data, original))
    for column in ("ids", "labels", "source_sizes"):
        if getattr(found, column).tolist() != getattr(stored, column).tolist():
            raise Bad("wrong", f"other {column}")


_TOOLS = {"verify": _verify, "inspect": _inspect, "page": _page, "open": _open}


# Loaders used whole, dropped, closed and interrupted midway, over every backend. What is served is right, a
# Ctrl-C arrives, and afterwards no thread or process more is there; nor an open file, but after a Ctrl-C.

_USED = [arm for arm in _ARMS if "on_error" not in arm[2]]


def _warm_loaders(world: World) -> None:
    """What the first loader of each backend leaves for good is there before any is counted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    world.sniper = _start_sniper()
    for backend, name, settings in _USED:
        with _build(world.folder / name, backend, settings) as loader:
            list(loader)
    gc.collect()
    gc.freeze()  # what torch consists of need not be looked at again after each case
    time.sleep(0.2)
    world.base = _held()


def _use_one(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    backend, name, settings = draw.choice(_USED)
    way = draw.choice(_WAYS)
    settings = {**settings, "batch_size": draw.choice((1, 2, 5, 64))}
    say(f"{backend} {name} {settings}: {way.__name__.removeprefix('_')}")
    truth, start_s = world.samples[backend, name, "train"], time.monotonic()

    def use() -> Outcome:
        way(Use(world.folder / name, backend, settings, truth, draw, world.sniper))
        if (took_s := time.monotonic() - start_s) > HANG_S:
            raise Bad("hang", f"took {took_s:.0f} s")
        return RIGHT

    outcome = _watched(use)
    unchecked = "open files" if way is _interrupted else ""  # the system closes them with the program
    if not outcome.failed and (left := _left(world.base, unchecked)):
        outcome = Outcome("loss", left)
    if outcome.failed or unchecked:
        world.base = {what: max(count, world.base[what]) for what, count in _held().items()}  # blame no other
    return outcome


def _whole(use: Use) -> None:
    loader = use.build()
    for _ in range(use.draw.choice((1, 2, 3))):
        use.check_all(use.check(loader))
    if use.draw.random() < 0.5:
        loader.close()


def _dropped(use: Use) -> None:
    last = use.draw.randrange(len(use.truth))
    for count, _ in enumerate(use.check(use.build())):
        if count == last:
            break


def _unused(use: Use) -> None:
    loader = use.build()
    if use.draw.random() < 0.5:
        iter(loader)


def _closed(use: Use) -> None:
    loader = use.build()
    iterator = iter(loader)
    list(use.check([next(iterator)]))
    loader.close()
    with suppress(PrecacheError):  # it may serve no more, or say so
        list(use.check(iterator))
    loader.close()


def _raised(use: Use) -> None:
    with suppress(ZeroDivisionError):
        with use.build() as loader:
            for _ in use.check(loader):
                raise ZeroDivisionError
        raise Bad("wrong", "an exception in the loop was lost")


def _two_iterators(use: Use) -> None:
    """Both serve all, or the first one says that it cannot."""
    with use.build() as loader:
        first = use.check(iter(loader))
        served = [next(first)]
        use.check_all(use.check(loader))
        with suppress(PrecacheError):
            use.check_all([*served, *first])


def _interrupted(use: Use) -> None:
    """A Ctrl-C while it is built, in the loop, between two epochs, or as an epoch is left."""
    (ask, done), draw = use.sniper, use.draw
    left = draw.random() < 0.5
    try:
        loader = use.build() if draw.random() < 0.7 else None
        os.write(ask, struct.pack("d", draw.choice((0.0, draw.uniform(0, 0.02), draw.uniform(0, 0.1)))))
        if loader is None:
            loader = use.build()
        for _ in use.check(loader):
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
        lost = False
    os.read(done, 1)
    if lost:
        raise Bad("loss", "a Ctrl-C was lost")


_WAYS = [_whole, _dropped, _unused, _closed, _raised, _two_iterators, _interrupted]


def _start_sniper() -> tuple[int, int]:
    """A process that sends SIGINT to this one, so many seconds after it was asked."""
    asked, ask = os.pipe()
    done, said = os.pipe()
    victim = os.getpid()

    def shoot() -> None:
        os.close(ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while data := os.read(asked, 8):
            time.sleep(*struct.unpack("d", data))
            os.kill(victim, signal.SIGINT)
            os.write(said, b".")

    forked(shoot)
    os.close(asked)
    os.close(said)
    return ask, done


def _held() -> dict[str, int]:
    return {
        "threads of Python": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "open files": len(os.listdir("/proc/self/fd")),
    }


def _left(base: dict[str, int], unchecked: str) -> str:
    """What there is more than in `base` once it had five seconds to go away; empty if nothing is."""
    gc.collect()
    deadline_s = time.monotonic() + 5
    while more := [
        f"{count - base[what]} {what}"
        for what, count in _held().items()
        if count > base[what] and what != unchecked
    ]:
        if time.monotonic() > deadline_s:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:])
            return f"left behind: {', '.join(more)} ({names})"
        time.sleep(0.01)
    return ""


ATTACKS = {
    "folders": Attack(_prepare, _damage_one, warm=_warm_folders, case_s=12, chunk=20),  # given up at ten
    "loaders": Attack(
        _prepare, _use_one, warm=_warm_loaders, case_s=20, chunk=50
    ),  # five for what ends by itself
}
