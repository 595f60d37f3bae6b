"""Converted folders with one file changed or replaced, read by every backend, verified and inspected.

Each ends in the samples that are there (id, label and pixels as before), or in a PrecacheError of one line.
No other error, no wait, no other sample; and `verify` sees every change of a file.
"""

import contextlib
import io
import json
import random
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precache import PrecacheError, convert, open_dataset, verify
from precache.dataset import inspection
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.recipe import Recipe
from tests.building import build_loader
from tests.faults import mutations, nursery
from tests.faults.nursery import describe
from tests.faults.tally import RIGHT, Outcome, Tally
from tests.faults.worlds import FORMATS, SIZE, make_tree

try:
    import nvidia.dali  # noqa: F401 (here, so that it is not loaded in each child)

    _DALI = True
except ImportError:
    _DALI = False

CASE_S = 12.0  # loaders are given up at ten
_MOST_BYTES = 12 << 30  # of address space: torch alone takes some
_ARMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("shards", "shards", {}),
    ("shards", "shards", {"on_error": "skip"}),
    ("shards", "shards", {"shuffle": "window"}),
    ("shards", "shards", {"shuffle": False}),
    ("webdataset", "webdataset", {}),
    ("webdataset", "webdataset", {"on_error": "skip"}),
    ("dali", "webdataset", {}),
    ("dali", "dali", {}),
    ("dali", "dali", {"on_error": "skip"}),
    ("synthetic", "shards", {}),
    ("synthetic", "webdataset", {}),
    ("synthetic", "dali", {}),
)
_READERS = tuple(arm for arm in _ARMS if _DALI or arm[0] != "dali")
_TOOLS = ("verify", "inspect", "page", "open")

Samples = dict[int, tuple[int, bytes]]  # id -> label, pixels


@dataclass(frozen=True, slots=True)
class World:
    folder: Path
    samples: dict[str, Samples]  # by backend, format and split
    summaries: dict[str, str]


def attack(seed: int, count: int, tmp_path: Path, jobs: int = 1) -> Tally:
    return nursery.run(__name__, seed, count, tmp_path, jobs=jobs, chunk=20)


def prepare(world: Path) -> None:
    make_tree(world / "src")
    for name in FORMATS:
        recipe = Recipe(
            format=name, size=SIZE, fit="crop", shard_bytes=3 * SIZE * SIZE * 3, splits="train=0.7,val=0.3"
        )
        convert(world / "src", world / name, recipe, workers=0, max_rejects=0.5)
    truth: dict[str, Any] = {}
    for backend, name, settings in _READERS:
        if not settings:
            for split in ("train", "val"):
                epoch = _epochs(world / name, backend, {"split": split})[0]
                served = {id: (label, pixels.hex()) for id, (label, pixels) in epoch.items()}
                truth[f"{backend} {name} {split}"] = served
    (world / "truth.json").write_text(json.dumps(truth))


def load(world: Path) -> World:
    truth = json.loads((world / "truth.json").read_text())
    samples = {
        arm: {int(id): (label, bytes.fromhex(pixels)) for id, (label, pixels) in epoch.items()}
        for arm, epoch in truth.items()
    }
    summaries = {name: _summary(world / name) for name in FORMATS}
    return World(world, samples, summaries)


def warm(world: World) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))


def case(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    reads = draw.random() < 0.75
    backend, name, settings = draw.choice(_READERS)
    tool = draw.choice(_TOOLS)
    data = mutations.copy(world.folder / name, folder / "data")
    (folder / "elsewhere").mkdir()
    path, change = _damage(data, draw, folder / "elsewhere")
    settings = {
        "split": "val" if path.name.startswith("val") else "train",
        "batch_size": draw.choice((1, 4, 64)),
        **settings,
    }
    did = f"{name}: {path.name} {change}; {f'{backend} {settings}' if reads else tool}"
    nursery.say(did)
    behind: list[str] = []
    threading.excepthook = lambda args: behind.append(describe(args.exc_value or SystemExit()))
    sys.unraisablehook = lambda args: behind.append(describe(args.exc_value or SystemExit()))
    try:
        bad = _read(world, data, backend, name, settings) if reads else _TOOL[tool](world, data, name, path)
    except PrecacheError as error:
        text = str(error)
        if "\n" in text or len(text) > 2000:
            return Outcome("traceback", f"{did}: an error of {len(text)} characters: {text[:100]!r}")
        return Outcome("clean")
    except BaseException as error:
        return Outcome("traceback", f"{did}: {describe(error)}")
    if behind and bad is None:
        bad = Outcome("traceback", f"behind the scenes: {behind[0]}")
    return RIGHT if bad is None else Outcome(bad.kind, f"{did}: {bad.detail}")


def _damage(data: Path, draw: random.Random, elsewhere: Path) -> tuple[Path, str]:
    """Change one file; which, and how."""
    files = sorted(data.iterdir())
    kinds = sorted({file.suffix for file in files})
    kind = draw.choice(kinds)  # the manifest as often as the shards
    path = draw.choice([file for file in files if file.suffix == kind])
    if draw.random() < 0.2:
        return path, mutations.replace_file(path, draw, elsewhere)
    content, other = path.read_bytes(), draw.choice(files).read_bytes()
    spoil = (
        mutations.spoil_json
        if path.suffix in (".json", ".idx", ".index", ".safetensors")
        else mutations.spoil
    )
    path.write_bytes(spoil(content, draw, other))
    return path, f"changed ({len(content)} to {path.stat().st_size} bytes)"


def _epochs(data: Path, backend: str, settings: dict[str, Any]) -> list[Samples]:
    epochs = []
    with build_loader(data, backend=backend, workers=1, **settings) as loader:
        for _ in range(2):
            epoch: Samples = {}
            for batch in loader:
                rows = zip(batch.ids.tolist(), batch.labels.tolist(), batch.images, strict=True)
                for id, label, picture in rows:
                    if id in epoch:
                        raise AssertionError(f"sample {id} was served twice")
                    epoch[id] = (label, picture.contiguous().numpy().tobytes())
            epochs.append(epoch)
    return epochs


def _read(world: World, data: Path, backend: str, name: str, settings: dict[str, Any]) -> Outcome | None:
    truth = world.samples[f"{backend} {name} {settings['split']}"]
    try:
        epochs = _epochs(data, backend, settings)
    except AssertionError as error:
        return Outcome("wrong", str(error))
    for number, epoch in enumerate(epochs):
        for id, (label, pixels) in epoch.items():
            if id not in truth:
                return Outcome("wrong", f"epoch {number}: sample {id} does not exist")
            if label != truth[id][0]:
                return Outcome("wrong", f"epoch {number}: sample {id} has label {label}, not {truth[id][0]}")
            if backend != "synthetic" and pixels != truth[id][1]:
                return Outcome("wrong", f"epoch {number}: sample {id} has other pixels")
        if len(epoch) < len(truth) and settings.get("on_error") != "skip":
            return Outcome("wrong", f"epoch {number}: {len(epoch)} of {len(truth)} samples")
    return None


def _summary(data: Path) -> str:
    return json.dumps(inspection.summary(open_dataset(data).manifest), sort_keys=True)


def _verify(world: World, data: Path, name: str, path: Path) -> Outcome | None:
    problems = verify(data)
    if long := [problem for problem in problems if "\n" in problem]:
        return Outcome("traceback", f"a problem of several lines: {long[0][:100]!r}")
    listed = {p.name for p in (world.folder / name).iterdir()} - {REJECTED_NAME}
    changed = {file for file in listed if not _same(data / file, world.folder / name / file)}
    return (
        Outcome("wrong", f"verify does not see that {sorted(changed)[0]} changed")
        if changed and not problems
        else None
    )


def _same(path: Path, original: Path) -> bool:
    if not path.is_file():
        return False
    before = original.read_bytes()
    try:
        content = path.read_bytes()
    except OSError:  # a link to a device that has nothing to read
        return False
    if path.name != MANIFEST_NAME or content == before:
        return content == before
    try:  # other blanks say the same
        return bool(json.loads(content) == json.loads(before))
    except (ValueError, RecursionError):
        return False


def _inspect(world: World, data: Path, name: str, path: Path) -> Outcome | None:
    dataset = open_dataset(data)
    with contextlib.redirect_stdout(io.StringIO()):
        inspection.facts(dataset)
    same = _summary(data) == world.summaries[name]
    return None if same else Outcome("wrong", "inspect shows what was not converted")


def _index(dataset: Any, split: str) -> list[list[int]]:
    index = dataset.read_index(split)
    arrays = index if isinstance(index, tuple) else (index.ids, index.labels)
    return [array.tolist() for array in arrays]


def _page(world: World, data: Path, name: str, path: Path) -> Outcome | None:
    inspection.write_html(open_dataset(data), data.parent / "page.html")
    return None


def _open(world: World, data: Path, name: str, path: Path) -> Outcome | None:
    dataset, before = open_dataset(data), open_dataset(world.folder / name)
    for split in ("train", "val"):
        if _index(dataset, split) != _index(before, split):
            return Outcome("wrong", f"other ids or labels of {split}")
    if dataset.read_index().source_sizes.tolist() != before.read_index().source_sizes.tolist():
        return Outcome("wrong", "other source sizes")
    return None


_TOOL: dict[str, Callable[[World, Path, str, Path], Outcome | None]] = {
    "verify": _verify,
    "inspect": _inspect,
    "page": _page,
    "open": _open,
}
