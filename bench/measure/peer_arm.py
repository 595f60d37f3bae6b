"""Other libraries' loaders as arms of a comparison: their data, and a process of their own per trial."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure.candidates import Candidate
from bench.measure.fresh import run_watched
from bench.measure.trial import Trial
from bench.peers import serving, writing
from bench.peers.serving import LIMIT, PEERS
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
class PeerArm:
    """One loader of another library over a folder.

    Attributes:
        name: of `bench.peers.serving.PEERS`.
        path: the folder that it reads.
        stored: side of the squares in it, pixels; 0 for a raw tree.
        quality: of its JPEGs.
        python: the Python that runs it.
        source: the raw tree to write `path` from where it is missing.
    """

    name: str
    path: Path
    stored: int
    quality: int
    python: str
    source: Path | None

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.name} on {self.path}"

    @property
    def work(self) -> Work:
        """What serving costs."""
        return PEERS[self.name].kind, self.stored

    @property
    def described(self) -> str:
        """What kind of data it reads, for tables."""
        if self.writer is not None:
            return self.writer
        return open_dataset(self.path).manifest.recipe.format if is_converted(self.path) else "raw tree"

    @property
    def writer(self) -> str | None:
        """Of `path`, a name of `bench.peers.writing.WRITERS`; None if that is ours."""
        (reads, *_) = PEERS[self.name].reads
        return reads if reads in writing.WRITERS and reads not in _KINDS else None


def work_of(arm: Candidate, size: int, augment: str = "eval") -> Work | None:
    """What serving `size` costs a backend of ours; None for noise, and where no peer does the same.

    Peers cut the middle out of squares, which is the part that ours show where `_shown` is stored.
    """
    kind = None if arm.backend == "synthetic" else _KINDS[arm.data.kind]
    if kind == "tree":
        return (kind, 0) if augment == "eval" else None
    if kind is None or isinstance(arm.data.size, tuple) or arm.data.shapes is not None:
        return None
    if augment == "eval":
        return (kind, arm.data.size) if arm.data.size == _shown(size) else None
    return ("crops", arm.data.size) if kind == "pixels" else None


def _shown(size: int) -> int:
    """The shorter side that validation cuts `size` out of."""
    return round(size / CROP_RATIO)


def choose_peers(
    names: Sequence[str], paths: Sequence[Path], size: int, python: str, peer_data: Path
) -> list[PeerArm]:
    """Which peer reads which folder: one of `paths`, or one of its own under `peer_data`.

    That is written from the raw tree among `paths`, like what `paths` holds of the same kind.

    Raises:
        SettingError: unknown name, or no such `python`.
        DatasetError: no folder for a peer among `paths`.
    """
    if shutil.which(python) is None:
        raise SettingError(f"{python}: cannot be run; name a Python with --peer-python")
    folders: dict[str, tuple[Path, Recipe | None]] = {}
    for path in paths:
        recipe = open_dataset(path).manifest.recipe if is_converted(path) else None
        folders.setdefault(recipe.format if recipe else RAW, (path, recipe))
    chosen = []
    for name in dict.fromkeys(names):
        check_choice("peer", name, PEERS)
        peer = PEERS[name]
        given = [folders[kind] for kind in peer.reads if kind in folders]
        if given:
            path, recipe = given[0]
            stored, quality = (_side(recipe), recipe.quality) if recipe else (0, 0)
            if stored is None:
                raise DatasetError(
                    f"peer {name} serves squares, and {path} holds other pictures; leave it out, or name a "
                    f"folder that was converted with --fit crop --size {_shown(size)}"
                )
            chosen.append(PeerArm(name, path, stored, quality, python, None))
        elif peer.reads[0] in _KINDS:
            raise DatasetError(
                f"peer {name} reads {' or '.join(peer.reads)}, and no such folder is there; name one as DATA"
            )
        else:
            chosen.append(_with_own_data(name, folders, size, python, peer_data))
    return chosen


def _with_own_data(
    name: str, folders: dict[str, tuple[Path, Recipe | None]], size: int, python: str, peer_data: Path
) -> PeerArm:
    peer = PEERS[name]
    kind = "pixels" if peer.kind == "crops" else peer.kind
    given = [recipe for form, (_, recipe) in folders.items() if recipe and _KINDS[form] == kind]
    recipes = [recipe for recipe in given if _side(recipe)]
    like = recipes[0] if recipes else Recipe(format="shards", size=_shown(size), fit="crop")
    stored = _side(like)
    assert stored is not None
    path = peer_data / f"{peer.reads[0]}-{stored}{f'-q{like.quality}' if kind == 'jpeg' else ''}"
    source = folders[RAW][0].resolve() if RAW in folders else None
    if source is None and not path.exists():
        raise DatasetError(f"peer {name}: {path} does not exist; name the raw tree to write it from as DATA")
    return PeerArm(name, path, stored, like.quality, python, source)


def _side(recipe: Recipe) -> int | None:
    """Of the squares that it makes; None if it makes others."""
    return recipe.stored_size if isinstance(recipe.stored_size, int) else None


def limits(paths: Sequence[Path]) -> list[PeerArm]:
    """The limit of each folder of shards of squares among `paths`; needs NumPy only."""
    recipes = {path: open_dataset(path).manifest.recipe for path in paths if is_converted(path)}
    return [
        PeerArm(LIMIT, path, side, recipe.quality, sys.executable, None)
        for path, recipe in recipes.items()
        if recipe.format == "shards" and (side := _side(recipe))
    ]


def write_data(arm: PeerArm, workers: int) -> None:
    """Write what `arm` reads, unless it is there.

    Raises:
        WorkerError: the writer failed; holds its last line.
        DatasetError: what is there was written from another tree.
    """
    if arm.writer is None or arm.source is None:
        return
    note = arm.path / _MADE_FROM
    if arm.path.exists():
        source = json.loads(note.read_text(encoding="utf-8")) if note.exists() else "something else"
        if source != str(arm.source):
            raise DatasetError(
                f"{arm.path}: was written from {source}, not from {arm.source}; "
                f"remove it, or name another --peer-data"
            )
        return
    partial = arm.path.with_name(f"{arm.path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    settings = {"size": arm.stored, "quality": arm.quality, "workers": max(1, workers)}
    command = [arm.python, writing.__file__, arm.writer, str(arm.source), str(partial)]
    run_watched([*command, *_flags(settings)])
    (partial / note.name).write_text(json.dumps(str(arm.source)), encoding="utf-8")
    partial.rename(arm.path)


def run_peer(
    arm: PeerArm, *, batch_size: int, size: int, workers: int, warmup: int, batches: int
) -> tuple[Trial, str]:
    """One trial in a fresh process, and the library's name and version.

    Raises:
        WorkerError: it failed; holds its last line.
    """
    command = [arm.python, serving.__file__, arm.name, str(arm.path)]
    settings = {
        "stored": arm.stored, "batch-size": batch_size, "size": size, "workers": workers,
        "warmup": warmup, "batches": batches,
    }  # fmt: skip
    output = run_watched([*command, *_flags(settings)]).output
    answers = [line for line in output.splitlines() if line.startswith('{"version"')]
    if not answers:
        raise WorkerError(f"{' '.join(command)}: printed no result")
    answer = json.loads(answers[-1])
    trial = Trial(
        answer["first_batch_s"], answer["images"], tuple(answer["batch_s"]), tuple(answer["epoch_starts"])
    )
    return trial, answer["version"]


def _flags(settings: dict[str, int]) -> list[str]:
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]
