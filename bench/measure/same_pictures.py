"""A raw tree beside a data set that holds a part of it: only that part is served, so that both do equal work.

`precache convert --splits` puts a part of the tree into the split that is measured, and `--max-rejects`
leaves pictures out. The part is a tree of links in a temporary folder: every loader reads it as it is.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.measure.arm import Arm
from loaders.dataset import RAW, SplitData


@dataclass(frozen=True, slots=True)
class Served:
    """What is measured.

    Attributes:
        arms: those that were given, of a tree that is served in part with the part as their data.
        linked: tree -> the folder of links to its part.
        notes: a clause for each of these trees.
    """

    arms: list[Arm]
    linked: dict[Path, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@contextmanager
def same_pictures(arms: Sequence[Arm]) -> Iterator[Served]:
    """Opened `arms`, their raw trees cut down to what the data sets among them hold; links end with this."""
    served = Served(list(arms))
    with ExitStack() as links:
        trees = (arm.path for arm in arms if arm.data.kind == RAW)
        for tree in dict.fromkeys(path for path in trees if isinstance(path, Path)):
            whole = next(arm.data for arm in arms if arm.path == tree)
            part = next((rows for arm in arms if (rows := _part(whole, arm.data)) is not None), None)
            if part is None:
                continue
            folder = Path(links.enter_context(tempfile.TemporaryDirectory(prefix="bench-split-")))
            data = _link(whole, part, folder)
            for number, arm in enumerate(served.arms):
                if arm.path == tree:
                    served.arms[number] = replace(arm, opened=data, linked=folder)
            served.linked[tree] = folder
            served.notes.append(
                f"of {tree} the {len(part):,} of {len(whole.ids):,} pictures that the data set holds"
            )
        yield served


def _part(tree: SplitData, other: SplitData) -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
    """Rows of `tree` that `other` holds, by path; None if all of it, or if `other` has other pictures."""
    if other.kind == RAW or other.index is None or len(other.ids) >= len(tree.ids):
        return None
    row_of = {os.path.relpath(file, str(tree.path)): row for row, file in enumerate(tree.files)}
    paths = (other.index.path(row) for row in range(len(other.ids)))
    rows = [row_of.get(path, -1) if path is not None else -1 for path in paths]
    return np.sort(np.array(rows, np.int64)) if min(rows, default=-1) >= 0 else None


def _link(tree: SplitData, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]", folder: Path) -> SplitData:
    """Link these pictures into `folder`, class by class; their data."""
    files = []
    for row in rows.tolist():
        file = Path(tree.files[row])
        link = folder / file.parent.name / file.name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(file.resolve())
        files.append(str(link))
    identity = f"{tree.digest} rows {rows.tolist()}"
    return replace(
        tree,
        ids=tree.ids[rows],
        labels=tree.labels[rows],
        files=tuple(files),
        shard_samples=np.array([len(rows)]),
        digest=hashlib.sha256(identity.encode()).hexdigest(),
    )
