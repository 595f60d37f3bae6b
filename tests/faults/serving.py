"""What loaders serve of the small tree in each format: as it is stored, and in a case that is watched."""

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from precache import Recipe, convert
from tests.building import build_loader
from tests.faults.nursery import describe
from tests.faults.tally import Outcome
from tests.faults.worlds import FORMATS, SIZE

try:
    import nvidia.dali  # noqa: F401 (here, so that it is not loaded in each child)

    _DALI = True
except ImportError:
    _DALI = False

Arm = tuple[str, str, dict[str, Any]]
"""Backend, what it reads, settings."""
Rows = Iterator[tuple[int, int, bytes]]
Samples = dict[int, tuple[int, bytes]]
"""id -> label, pixels."""


class Wrong(Exception):
    """What was served is not what is stored."""


def installed(*arms: Arm) -> list[Arm]:
    """Those of which the packages are here."""
    return [arm for arm in arms if _DALI or arm[0] != "dali"]


def prepare(world: Path, tree: Path, arms: list[Arm], splits: str) -> None:
    """Convert the tree to each format, and write down what each of `arms` serves of it."""
    for name in FORMATS:
        recipe = Recipe(format=name, size=SIZE, fit="crop", shard_bytes=3 * SIZE * SIZE * 3, splits=splits)
        convert(tree, world / name, recipe, workers=0, max_rejects=0.5)
    truth: dict[str, Any] = {}
    for backend, name in {arm[:2]: arm for arm in arms}:
        for split in (part.partition("=")[0] for part in splits.split(",")):
            with build(world, backend, name, {"split": split}) as loader:
                served = {id: (label, pixels.hex()) for id, label, pixels in rows(loader)}
            assert served
            truth[f"{backend} {name} {split}"] = served
    (world / "truth.json").write_text(json.dumps(truth))


def load(world: Path) -> dict[str, Samples]:
    """What was written down, by backend, format and split."""
    truth = json.loads((world / "truth.json").read_text())
    return {
        arm: {int(id): (label, bytes.fromhex(pixels)) for id, (label, pixels) in served.items()}
        for arm, served in truth.items()
    }


def build(folder: Path, backend: str, name: str, settings: dict[str, Any]) -> Any:
    return build_loader(folder / name, backend=backend, **{"size": SIZE, "workers": 1, **settings})


def rows(batches: Iterable[Any]) -> Rows:
    """(id, label, pixels) of all samples of `batches`."""
    for batch in batches:
        for id, label, picture in zip(batch.ids.tolist(), batch.labels.tolist(), batch.images, strict=True):
            yield id, label, picture.contiguous().numpy().tobytes()


def checked(served: Rows, truth: Samples, backend: str) -> Iterator[int]:
    """The ids, each once and as stored; pixels of `synthetic` are noise. Raises Wrong."""
    seen: set[int] = set()
    for id, label, pixels in served:
        if id in seen or id not in truth:
            raise Wrong(f"sample {id} {'was served twice' if id in seen else 'does not exist'}")
        if label != truth[id][0]:
            raise Wrong(f"sample {id} has label {label}, not {truth[id][0]}")
        if backend != "synthetic" and pixels != truth[id][1]:
            raise Wrong(f"sample {id} has other pixels")
        seen.add(id)
        yield id


def watched(do: Callable[[], Outcome | None], accepted: tuple[type[Exception], ...] = ()) -> Outcome | None:
    """How it ends: what was wrong, or nothing; also what was raised where nobody hears it.

    `accepted` is raised to the caller.
    """
    behind: list[str] = []
    threading.excepthook = lambda args: behind.append(describe(args.exc_value or SystemExit()))
    sys.unraisablehook = lambda args: behind.append(describe(args.exc_value or SystemExit()))
    try:
        bad = do()
    except accepted:
        raise
    except Wrong as error:
        bad = Outcome("wrong", str(error))
    except BaseException as error:
        bad = Outcome("traceback", describe(error))
    if bad is None and behind:
        kind = "loss" if "KeyboardInterrupt" in behind[0] else "traceback"
        bad = Outcome(kind, f"unheard: {behind[0]}")
    return bad
