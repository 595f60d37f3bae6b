"""Converted folders with one file changed or replaced, read by every backend, verified and inspected.

Each ends in the samples that are there (id, label and pixels as before), or in a PrecacheError of one line.
No other error, no wait, no other sample; and `verify` sees every change of a file.
"""

import contextlib
import io
import json
import random
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precache import PrecacheError, open_dataset, verify
from precache.dataset import inspection
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from tests.faults import mutations, nursery, serving
from tests.faults.serving import Samples, Wrong
from tests.faults.tally import RIGHT, Outcome
from tests.faults.worlds import FORMATS, make_tree

CASE_S, CHUNK = 12.0, 20  # loaders are given up at ten
_MOST_BYTES = 12 << 30  # of address space: torch alone takes some
_READERS = serving.installed(
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


@dataclass(frozen=True, slots=True)
class World:
    folder: Path
    samples: dict[str, Samples]  # by backend, format and split
    summaries: dict[str, str]


def prepare(world: Path) -> None:
    make_tree(world / "src")
    serving.prepare(world, world / "src", _READERS, "train=0.7,val=0.3")


def load(world: Path) -> World:
    return World(world, serving.load(world), {name: _summary(world / name) for name in FORMATS})


def warm(world: World) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))


def case(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    reads = draw.random() < 0.75
    backend, name, settings = draw.choice(_READERS)
    tool = draw.choice(sorted(_TOOLS))
    data = Path(shutil.copytree(world.folder / name, folder / name))
    (folder / "elsewhere").mkdir()
    path, change = _damage(data, draw, folder / "elsewhere")
    split = "val" if path.name.startswith("val") else "train"
    settings = {"split": split, "batch_size": draw.choice((1, 4, 64)), **settings}
    did = f"{name}: {path.name} {change}; {f'{backend} {settings}' if reads else tool}"
    nursery.say(did)

    def use() -> Outcome | None:
        if not reads:
            return _TOOLS[tool](world, data)
        truth = world.samples[f"{backend} {name} {split}"]
        with serving.build(folder, backend, name, settings) as loader:
            for _ in range(2):
                served = len(list(serving.checked(serving.rows(loader), truth, backend)))
                if served < len(truth) and settings.get("on_error") != "skip":
                    raise Wrong(f"{served} of {len(truth)} samples")
        return None

    try:
        bad = serving.watched(use, (PrecacheError,))
    except PrecacheError as error:
        text = str(error)
        if "\n" not in text and len(text) <= 2000:
            return Outcome("clean")
        bad = Outcome("traceback", f"an error of {len(text)} characters: {text[:100]!r}")
    return RIGHT if bad is None else Outcome(bad.kind, f"{did}: {bad.detail}")


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


def _verify(world: World, data: Path) -> Outcome | None:
    problems = verify(data)
    if long := [problem for problem in problems if "\n" in problem]:
        return Outcome("traceback", f"a problem of several lines: {long[0][:100]!r}")
    original = world.folder / data.name
    listed = {p.name for p in original.iterdir()} - {REJECTED_NAME}
    changed = sorted(file for file in listed if not _same(data / file, original / file))
    if changed and not problems:
        return Outcome("wrong", f"verify does not see that {changed[0]} changed")
    return None


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


def _inspect(world: World, data: Path) -> Outcome | None:
    dataset = open_dataset(data)
    with contextlib.redirect_stdout(io.StringIO()):
        inspection.facts(dataset)
    same = _summary(data) == world.summaries[data.name]
    return None if same else Outcome("wrong", "inspect shows what was not converted")


def _page(world: World, data: Path) -> Outcome | None:
    inspection.write_html(open_dataset(data), data.parent / "page.html")
    return None


def _open(world: World, data: Path) -> Outcome | None:
    def index(path: Path) -> list[Any]:
        found = open_dataset(path).read_index()
        return [column.tolist() for column in (found.ids, found.labels, found.source_sizes)]

    same = index(data) == index(world.folder / data.name)
    return None if same else Outcome("wrong", "other ids, labels or source sizes")


_TOOLS: dict[str, Callable[[World, Path], Outcome | None]] = {
    "verify": _verify,
    "inspect": _inspect,
    "page": _page,
    "open": _open,
}
