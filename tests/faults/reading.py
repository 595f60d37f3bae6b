"""Attacks on readers: converted folders are damaged, and loaders are used in every way."""

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
from tests.faults.runner import (
    CLEAN,
    HANG_S,
    RIGHT,
    Attack,
    CaseFailure,
    Outcome,
    announce,
    describe,
    fork,
    run_case,
)
from tests.faults.trees import FORMATS, SIZE, make_tree

with suppress(ImportError):
    import nvidia.dali  # noqa: F401 (here, so that it is not loaded in each child)

# (backend, kind of data, settings)
_ALL: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("pytorch", "raw", {"workers": 0}),
    ("pytorch", "raw", {"workers": 2}),
    ("shards", "shards", {}),
    ("shards", "shards", {"on_error": "skip"}),
    ("shards", "shards", {"shuffle": "window"}),
    ("shards", "shards", {"shuffle": False}),
    ("webdataset", "webdataset", {}),
    ("webdataset", "webdataset", {"on_error": "skip"}),
    ("dali", "raw", {}),
    ("dali", "webdataset", {}),
    ("dali", "dali", {}),
    ("dali", "dali", {"on_error": "skip"}),
    ("synthetic", "shards", {}),
)
_CASES = [case for case in _ALL if case[0] != "dali" or "nvidia.dali" in sys.modules]
Samples = dict[int, tuple[int, bytes]]
"""Label and pixels of each sample, by id."""


@dataclass(slots=True)
class LoaderSetup:
    """Data of the attacks on readers.

    Attributes:
        folder: the tree `raw`, and a dataset of each format, by its name.
        samples: samples that a loader has to serve, by backend, format and split.
        base: number of threads, processes and files before the first case.
        interrupter: descriptors of two pipes: the one takes the seconds to wait before a Ctrl-C, the other
            gives a byte when it was sent.
    """

    folder: Path
    samples: dict[tuple[str, str, str], Samples]
    base: dict[str, int] = field(default_factory=dict)
    interrupter: tuple[int, int] = (-1, -1)


@dataclass(frozen=True, slots=True)
class LoaderUse:
    """A loader for a case: its folder and settings, the samples that it has to serve, and random numbers."""

    folder: Path
    backend: str
    settings: dict[str, Any]
    truth: Samples
    draw: random.Random
    interrupter: tuple[int, int]

    def build(self) -> Any:
        return _build(self.folder, self.backend, self.settings)

    def check(self, batches: Iterable[Any]) -> Iterator[int]:
        """Yield the ids of `batches`, and fail the case if a sample comes twice or is not as it is stored.

        The pixels of backend `synthetic` are noise, and not compared.
        """
        seen: set[int] = set()
        for id, label, pixels in _rows(batches):
            if id in seen or id not in self.truth:
                fault = "was served twice" if id in seen else "does not exist"
                raise CaseFailure("wrong", f"sample {id} {fault}")
            if label != self.truth[id][0] or (self.backend != "synthetic" and pixels != self.truth[id][1]):
                raise CaseFailure("wrong", f"sample {id} has another label, or other pixels")
            seen.add(id)
            yield id

    def check_all(self, served: Iterable[int]) -> None:
        """Fail the case unless each sample was served once."""
        if sorted(served) != sorted(self.truth):
            raise CaseFailure("wrong", "an epoch is not every sample once")


def _build(folder: Path, backend: str, settings: dict[str, Any]) -> Any:
    return build_loader(folder, backend=backend, **{"size": SIZE, "workers": 1, **settings})


def _rows(batches: Iterable[Any]) -> Iterator[tuple[int, int, bytes]]:
    """Yield id, label and pixels of each sample of `batches`."""
    for batch in batches:
        for id, label, picture in zip(batch.ids.tolist(), batch.labels.tolist(), batch.images, strict=True):
            yield id, label, picture.contiguous().numpy().tobytes()


def _prepare(folder: Path) -> LoaderSetup:
    """Make a tree, convert it to each format, and record the samples that each backend serves."""
    make_tree(folder / "raw")
    recipe = {"size": SIZE, "fit": "crop", "shard_bytes": 3 * SIZE * SIZE * 3, "splits": "train=0.7,val=0.3"}
    for name in FORMATS:
        convert(folder / "raw", folder / name, Recipe(format=name, **recipe), workers=0, max_rejects=0.5)  # type: ignore[arg-type]
    (folder / "raw/000.class/broken.jpg").unlink()  # a raw tree serves what it holds
    setup = LoaderSetup(folder, {})
    for backend, name in {case[:2]: case for case in _CASES}:
        for split in ("train", "val")[: 1 if name == "raw" else 2]:
            with _build(folder / name, backend, {"split": split}) as loader:
                served = {id: (label, pixels) for id, label, pixels in _rows(loader)}
            assert served
            setup.samples[backend, name, split] = served
    return setup


def _run_with_hooks(use: Callable[[], Outcome]) -> Outcome:
    """Run a case; an error in a thread or a finaliser, which nothing catches, is a failure, too."""
    uncaught: list[str] = []
    threading.excepthook = lambda args: uncaught.append(describe(args.exc_value or SystemExit()))
    sys.unraisablehook = lambda args: uncaught.append(describe(args.exc_value or SystemExit()))
    outcome = run_case(use)
    if not outcome.failed and uncaught:
        kind = "loss" if "KeyboardInterrupt" in uncaught[0] else "traceback"
        return Outcome(kind, f"unheard: {uncaught[0]}")
    return outcome


# Attack `folders`: converted folders with one file changed or replaced are read by every backend, verified
# and inspected. Each has to end with the stored samples, or with a PrecacheError of one line; and `verify`
# has to find every change of a file.

_MAX_BYTES = 12 << 30  # of address space, of which torch alone takes some


def _limit_memory(setup: LoaderSetup) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))


def _damage_one(setup: LoaderSetup, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    reads = draw.random() < 0.75
    backend, name, settings = draw.choice([case for case in _CASES if case[1] != "raw"])
    tool = draw.choice(sorted(_TOOLS))
    data = Path(shutil.copytree(setup.folder / name, folder / name))
    (folder / "elsewhere").mkdir()
    path, change = _damage(data, draw, folder / "elsewhere")
    split = "val" if path.name.startswith("val") else "train"
    settings = {"split": split, "batch_size": draw.choice((1, 4, 64)), **settings}
    reader = f"{backend} {settings}" if reads else tool
    announce(f"{name}: {path.name} {change}; {reader}")

    def read() -> None:
        use = LoaderUse(data, backend, settings, setup.samples[backend, name, split], draw, setup.interrupter)
        with use.build() as loader:
            for _ in range(2):
                served = list(use.check(loader))
                if settings.get("on_error") != "skip":
                    use.check_all(served)

    def use() -> Outcome:
        try:
            if reads:
                read()
            else:
                _TOOLS[tool](setup.folder / name, data)
        except PrecacheError as error:
            _check_one_line(str(error))
            return CLEAN
        return RIGHT

    return _run_with_hooks(use)


def _check_one_line(text: str) -> None:
    if "\n" in text or len(text) > 2000:
        raise CaseFailure("traceback", f"an error of {len(text)} characters: {text[:100]!r}")


def _damage(data: Path, draw: random.Random, elsewhere: Path) -> tuple[Path, str]:
    """Change or replace one file; return its path and a description."""
    files = sorted(data.iterdir())
    suffix = draw.choice(sorted({file.suffix for file in files}))  # the manifest as often as the shards
    path = draw.choice([file for file in files if file.suffix == suffix])
    if draw.random() < 0.2:
        return path, mutations.replace_file(path, draw, elsewhere)
    content, other = path.read_bytes(), draw.choice(files).read_bytes()
    has_json = path.suffix in (".json", ".idx", ".index", ".safetensors")
    spoil = mutations.spoil_json if has_json else mutations.spoil
    path.write_bytes(spoil(content, draw, other))
    return path, f"changed ({len(content)} to {path.stat().st_size} bytes)"


def _summary(data: Path) -> str:
    return json.dumps(inspection.summary(open_dataset(data).manifest), sort_keys=True)


def _verify(original: Path, data: Path) -> None:
    problems = verify(data)
    for problem in problems:
        _check_one_line(problem)
    listed = {path.name for path in original.iterdir()} - {REJECTED_NAME}
    changed = sorted(file for file in listed if not _same(data / file, original / file))
    if changed and not problems:
        raise CaseFailure("wrong", f"verify does not see that {changed[0]} changed")


def _same(path: Path, original: Path) -> bool:
    try:
        content, before = path.read_bytes() if path.is_file() else b"", original.read_bytes()
    except OSError:  # the path is a link to a device that cannot be read
        return False
    if content == before:
        return True
    if path.name != MANIFEST_NAME:
        return False
    try:  # a manifest may differ in its blanks
        return bool(json.loads(content) == json.loads(before))
    except (ValueError, RecursionError):
        return False


def _inspect(original: Path, data: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        inspection.facts(open_dataset(data))
    if _summary(data) != _summary(original):
        raise CaseFailure("wrong", "inspect shows what was not converted")


def _page(original: Path, data: Path) -> None:
    inspection.write_html(open_dataset(data), data.parent / "page.html")


def _open(original: Path, data: Path) -> None:
    index, stored = (open_dataset(path).read_index() for path in (data, original))
    for column in ("ids", "labels", "source_sizes"):
        if getattr(index, column).tolist() != getattr(stored, column).tolist():
            raise CaseFailure("wrong", f"other {column}")


_TOOLS = {"verify": _verify, "inspect": _inspect, "page": _page, "open": _open}


# Attack `loaders`: loaders of every backend are used whole, or dropped, closed or interrupted midway. They
# have to serve the stored samples, and to let a Ctrl-C through. Afterwards there must be no further thread or
# process; nor an open file, except after a Ctrl-C.

_LOADER_CASES = [case for case in _CASES if "on_error" not in case[2]]


def _prepare_loaders(setup: LoaderSetup) -> None:
    """Use each backend once before resources are counted: what its first loader leaves is no leak."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    setup.interrupter = _start_interrupter()
    for backend, name, settings in _LOADER_CASES:
        with _build(setup.folder / name, backend, settings) as loader:
            list(loader)
    gc.collect()
    gc.freeze()  # so that the collections after each case do not look at torch's own objects
    time.sleep(0.2)
    setup.base = _count_resources()


def _use_one(setup: LoaderSetup, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    backend, name, settings = draw.choice(_LOADER_CASES)
    way = draw.choice(_WAYS)
    settings = {**settings, "batch_size": draw.choice((1, 2, 5, 64))}
    announce(f"{backend} {name} {settings}: {way.__name__.removeprefix('_')}")
    truth, start_s = setup.samples[backend, name, "train"], time.monotonic()

    def use() -> Outcome:
        way(LoaderUse(setup.folder / name, backend, settings, truth, draw, setup.interrupter))
        if (took_s := time.monotonic() - start_s) > HANG_S:
            raise CaseFailure("hang", f"took {took_s:.0f} s")
        return RIGHT

    outcome = _run_with_hooks(use)
    unchecked = "open files" if way is _interrupt else ""  # a program that Ctrl-C ends has them closed
    if not outcome.failed:
        leaks = _describe_leaks(setup.base, unchecked)
        if leaks:
            outcome = Outcome("loss", leaks)
    if outcome.failed or unchecked:  # later cases are not blamed for what this one has left
        setup.base = {name: max(count, setup.base[name]) for name, count in _count_resources().items()}
    return outcome


def _serve_whole(use: LoaderUse) -> None:
    loader = use.build()
    for _ in range(use.draw.choice((1, 2, 3))):
        use.check_all(use.check(loader))
    if use.draw.random() < 0.5:
        loader.close()


def _drop_midway(use: LoaderUse) -> None:
    last = use.draw.randrange(len(use.truth))
    for count, _ in enumerate(use.check(use.build())):
        if count == last:
            break


def _leave_unused(use: LoaderUse) -> None:
    loader = use.build()
    if use.draw.random() < 0.5:
        iter(loader)


def _close_midway(use: LoaderUse) -> None:
    loader = use.build()
    iterator = iter(loader)
    list(use.check([next(iterator)]))
    loader.close()
    with suppress(PrecacheError):  # a closed loader may end the epoch, or raise
        list(use.check(iterator))
    loader.close()


def _raise_midway(use: LoaderUse) -> None:
    with suppress(ZeroDivisionError):
        with use.build() as loader:
            for _ in use.check(loader):
                raise ZeroDivisionError
        raise CaseFailure("wrong", "an exception in the loop was lost")


def _use_two_iterators(use: LoaderUse) -> None:
    """Use two iterators of one loader: both serve all samples, or the first one raises."""
    with use.build() as loader:
        first = use.check(iter(loader))
        served = [next(first)]
        use.check_all(use.check(loader))
        with suppress(PrecacheError):
            use.check_all([*served, *first])


def _interrupt(use: LoaderUse) -> None:
    """Send a Ctrl-C while the loader is built, in the loop, between two epochs, or when an epoch is left."""
    (ask, done), draw = use.interrupter, use.draw
    leaves_epochs = draw.random() < 0.5
    try:
        loader = use.build() if draw.random() < 0.7 else None
        os.write(ask, struct.pack("d", draw.choice((0.0, draw.uniform(0, 0.02), draw.uniform(0, 0.1)))))
        if loader is None:
            loader = use.build()
        for _ in use.check(loader):
            pass
        sent_s = None
        while sent_s is None or time.monotonic() < sent_s + 0.5:
            for _ in loader:
                if leaves_epochs:
                    break
            if sent_s is None and select.select([done], [], [], 0)[0]:
                sent_s = time.monotonic()
        is_lost = True
    except KeyboardInterrupt:
        is_lost = False
    os.read(done, 1)
    if is_lost:
        raise CaseFailure("loss", "a Ctrl-C was lost")


_WAYS = [
    _serve_whole,
    _drop_midway,
    _leave_unused,
    _close_midway,
    _raise_midway,
    _use_two_iterators,
    _interrupt,
]


def _start_interrupter() -> tuple[int, int]:
    """Start a process that sends SIGINT to this one when told; see `LoaderSetup.interrupter`."""
    delays, ask = os.pipe()
    done, done_writer = os.pipe()
    pid = os.getpid()

    def send_signals() -> None:
        os.close(ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while data := os.read(delays, 8):
            (delay_s,) = struct.unpack("d", data)
            time.sleep(delay_s)
            os.kill(pid, signal.SIGINT)
            os.write(done_writer, b".")

    fork(send_signals)
    os.close(delays)
    os.close(done_writer)
    return ask, done


def _count_resources() -> dict[str, int]:
    """Count threads, child processes and open files of this process."""
    return {
        "threads of Python": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "open files": len(os.listdir("/proc/self/fd")),
    }


def _describe_leaks(base: dict[str, int], unchecked: str) -> str:
    """Describe resources beyond `base` that have not gone within five seconds; empty if there are none."""
    gc.collect()
    deadline_s = time.monotonic() + 5
    while more := [
        f"{count - base[name]} {name}"
        for name, count in _count_resources().items()
        if count > base[name] and name != unchecked
    ]:
        if time.monotonic() > deadline_s:
            frames = sys._current_frames()
            names = ", ".join(
                f"{thread.name} in {frames[thread.ident].f_code.co_name}"
                for thread in threading.enumerate()[1:]
                if thread.ident in frames
            )
            return f"left behind: {', '.join(more)} ({names})"
        time.sleep(0.01)
    return ""


ATTACKS = {
    "folders": Attack(_prepare, _damage_one, prepare_child=_limit_memory, case_s=12, chunk=20),
    "loaders": Attack(_prepare, _use_one, prepare_child=_prepare_loaders, case_s=20, chunk=50),
}
