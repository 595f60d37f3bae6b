"""Other libraries' loaders beside ours: the data that they read, and a process of its own for each trial."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from bench.measure.candidates import Candidate
from bench.measure.fresh import run_watched
from bench.peers import serving, writing
from bench.peers.serving import LIMIT, PEERS
from bench.report.result import Trial
from bench.report.verdict import RAW_TREE
from loaders.dataset import RAW
from loaders.settings import CROP_RATIO
from precache.dataset.converted import is_converted, open_dataset
from precache.errors import DatasetError, SettingError, WorkerError, check_choice
from precache.recipe import Recipe

_MADE_FROM = "made-from.json"
_KINDS = {"shards": "pixels", "webdataset": "jpeg", "dali": "jpeg", RAW: "tree"}

Work = tuple[str, int]
"""What serving costs: kind of pictures, see `bench.peers.serving.Peer`, and side of the stored squares."""


@dataclass(frozen=True, slots=True)
class PeerCandidate:
    """One loader of another library over a folder.

    Attributes:
        name: of `bench.peers.serving.PEERS`.
        path: the folder that it reads.
        described: what kind of data that is, for tables.
        stored: side of the squares in it, pixels; 0 for a raw tree.
        quality: of its JPEGs.
        python: the Python that runs it.
        source: the raw tree to write `path` from, by the one of `bench.peers.writing.WRITERS` that
            `described` names; None where the data are not its own, or no tree was given.
    """

    name: str
    path: Path
    described: str
    stored: int
    quality: int
    python: str
    source: Path | None = None

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.name} on {self.path}"

    @property
    def work(self) -> Work:
        """What serving costs."""
        return PEERS[self.name].kind, self.stored


def work_of(candidate: Candidate, size: int, augment: str = "eval") -> Work | None:
    """What serving `size` costs a backend of ours; None for noise, and where no peer does the same.

    Peers cut the middle out of squares, which is the part that ours show where `_shown` is stored.
    """
    kind = None if candidate.backend == "synthetic" else _KINDS[candidate.data.kind]
    if kind == "tree":
        return (kind, 0) if augment == "eval" else None
    if kind is None or isinstance(candidate.data.size, tuple) or candidate.data.shapes is not None:
        return None
    if augment == "eval":
        return (kind, candidate.data.size) if candidate.data.size == _shown(size) else None
    return ("crops", candidate.data.size) if kind == "pixels" else None


def _shown(size: int) -> int:
    """The shorter side that validation cuts `size` out of."""
    return round(size / CROP_RATIO)


def choose_peers(
    names: Sequence[str], paths: Sequence[Path], size: int, python: str, peer_data: Path
) -> list[PeerCandidate]:
    """Which peer reads which folder: one of `paths`, or one of its own under `peer_data`.

    That is written from the raw tree among `paths`, like what `paths` holds of the same kind.

    Raises:
        SettingError: unknown name, or no such `python`.
        DatasetError: no folder for a peer among `paths`.
    """
    check_python(python)
    folders: dict[str, tuple[Path, Recipe | None]] = {}
    for path in paths:
        recipe = _recipe_of(path)
        folders.setdefault(recipe.format if recipe else RAW, (path, recipe))
    chosen = []
    for name in dict.fromkeys(names):
        check_choice("peer", name, PEERS)
        reads = PEERS[name].reads
        given = next((folders[kind] for kind in reads if kind in folders), None)
        if given is not None:
            chosen.append(_reading(name, *given, size, python))
        elif reads[0] in _KINDS:
            raise DatasetError(
                f"peer {name} reads {' or '.join(reads)}, and no such folder is there; name one as DATA"
            )
        else:
            chosen.append(_with_own_data(name, folders, size, python, peer_data))
    return chosen


def check_python(python: str) -> None:
    """Raise SettingError unless there is such a program."""
    if shutil.which(python) is None:
        raise SettingError(f"{python}: cannot be run; name a Python with --peer-python")


def _reading(name: str, path: Path, recipe: Recipe | None, size: int, python: str) -> PeerCandidate:
    if recipe is None:
        return PeerCandidate(name, path, RAW_TREE, 0, 0, python)
    if (stored := _side(recipe)) is None:
        raise DatasetError(
            f"peer {name} serves squares, and {path} holds other pictures; leave it out, or name a "
            f"folder that was converted with --fit crop --size {_shown(size)}"
        )
    return PeerCandidate(name, path, recipe.format, stored, recipe.quality, python)


def _with_own_data(
    name: str, folders: dict[str, tuple[Path, Recipe | None]], size: int, python: str, peer_data: Path
) -> PeerCandidate:
    peer = PEERS[name]
    kind = "pixels" if peer.kind == "crops" else peer.kind
    squares = [
        (side, recipe.quality)
        for form, (_, recipe) in folders.items()
        if recipe and _KINDS[form] == kind and (side := _side(recipe))
    ]
    stored, quality = squares[0] if squares else (_shown(size), Recipe(format="webdataset").quality)
    path = peer_data / f"{peer.reads[0]}-{stored}{f'-q{quality}' if kind == 'jpeg' else ''}"
    source = folders[RAW][0].resolve() if RAW in folders else None
    if source is None and not path.exists():
        raise DatasetError(f"peer {name}: {path} does not exist; name the raw tree to write it from as DATA")
    return PeerCandidate(name, path, peer.reads[0], stored, quality, python, source)


def limits(paths: Sequence[Path]) -> list[PeerCandidate]:
    """The limit of each folder of shards of squares among `paths`; needs NumPy only."""
    return [
        PeerCandidate(LIMIT, path, "shards", side, recipe.quality, sys.executable)
        for path in paths
        if (recipe := _recipe_of(path)) and recipe.format == "shards" and (side := _side(recipe))
    ]


def _recipe_of(path: Path) -> Recipe | None:
    """That a folder was converted with; None of a raw tree."""
    return open_dataset(path).manifest.recipe if is_converted(path) else None


def _side(recipe: Recipe) -> int | None:
    """Of the squares that it makes; None if it makes others."""
    return recipe.stored_size if isinstance(recipe.stored_size, int) else None


def write_data(peer: PeerCandidate, workers: int) -> None:
    """Write what `peer` reads, unless it is there.

    Raises:
        WorkerError: the writer failed; holds its last line.
        DatasetError: what is there was written from another tree.
    """
    if peer.source is None:
        return
    note = peer.path / _MADE_FROM
    if peer.path.exists():
        source = json.loads(note.read_text(encoding="utf-8")) if note.exists() else "something else"
        if source != str(peer.source):
            raise DatasetError(
                f"{peer.path}: was written from {source}, not from {peer.source}; "
                f"remove it, or name another --peer-data"
            )
        return
    partial = peer.path.with_name(f"{peer.path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    settings = {"size": peer.stored, "quality": peer.quality, "workers": max(1, workers)}
    run_watched(script(peer.python, writing, peer.described, peer.source, partial, **settings))
    (partial / note.name).write_text(json.dumps(str(peer.source)), encoding="utf-8")
    partial.rename(peer.path)


def script(python: str, module: ModuleType, *arguments: str | Path, **settings: object) -> list[str]:
    """The command that runs a module of `bench.peers` by another Python, which has nothing of ours."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return [python, str(module.__file__), *map(str, arguments), *flags]


def run_peer(
    peer: PeerCandidate, *, batch_size: int, size: int, workers: int, warmup: int, batches: int
) -> Trial:
    """Run one trial in a fresh process; its fact `version` is the library's name and version.

    Raises:
        WorkerError: it failed; holds its last line.
    """
    settings = {"stored": peer.stored, "batch_size": batch_size, "size": size, "workers": workers}
    timing = {"warmup": warmup, "batches": batches}
    command = script(peer.python, serving, peer.name, peer.path, **settings, **timing)
    answers = [line for line in run_watched(command)[1].splitlines() if line.startswith('{"version"')]
    if not answers:
        raise WorkerError(f"{' '.join(command)}: printed no result")
    answer = json.loads(answers[-1])
    batch_s = tuple(answer["batch_s"])
    return Trial(
        numbers={
            "images_per_s": answer["images"] / sum(batch_s),
            "first_batch_s": answer["first_batch_s"],
            "images": float(answer["images"]),
        },
        series={"batch_s": batch_s, "epoch_starts": tuple(map(float, answer["epoch_starts"]))},
        facts={"version": answer["version"]},
    )
