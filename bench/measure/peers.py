"""Loaders of other libraries ('peers') as candidates: their data, and a process for each of their trials."""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure.candidates import Candidate
from bench.measure.processes import run_command
from bench.peers import libraries
from bench.peers.libraries import PEERS
from bench.report.loaders import LIMIT
from bench.report.result import Trial
from loaders.dataset import RAW
from loaders.settings import CROP_RATIO
from precache.dataset.converted import is_converted, open_dataset
from precache.errors import DatasetError, SettingError, WorkerError, check_choice
from precache.formats import FORMATS
from precache.recipe import Recipe
from precache.sources.base import Scan
from precache.sources.tree import scan_tree

_MADE_FROM = "made-from.json"
"""File in a peer's folder that names the tree that its data was written from."""
_WORK = {"shards": "pixels", "webdataset": "jpeg", "dali": "jpeg"}
"""Kind of work that a centre crop takes, by format, as `bench.peers.libraries.Peer.work` names it."""

PictureWork = tuple[str, int]
"""Work of serving a picture: its kind, and the side of the stored square in pixels."""


@dataclass(frozen=True, slots=True)
class PeerCandidate:
    """A loader of another library over a folder.

    Attributes:
        name: name in `bench.peers.libraries.PEERS`.
        path: the folder that it reads.
        stored_side: side of the squares in the folder, pixels.
        python: the Python interpreter that runs it.
        source: the raw tree to write `path` from; None where it reads a format of this project, or no tree
            was given.
    """

    name: str
    path: Path
    stored_side: int
    python: str
    source: Path | None = None

    @property
    def label(self) -> str:
        """Name and folder, for messages."""
        return f"{self.name} on {self.path}"

    @property
    def description(self) -> str:
        """Format of the data, for tables."""
        return PEERS[self.name].reads

    @property
    def work(self) -> PictureWork:
        """Work of serving a picture."""
        return PEERS[self.name].work, self.stored_side


def work_per_picture(candidate: Candidate, size: int, augment: str = "eval") -> PictureWork | None:
    """Return the work of serving a picture of side `size`; None where no peer does the same work.

    Peers cut the middle out of stored squares; a backend of this project serves the same part of a picture
    where the squares have the side `_side_before_crop`.
    """
    if candidate.backend == "synthetic" or candidate.data.kind == RAW:
        return None
    work, stored = _WORK[candidate.data.kind], candidate.data.size
    if isinstance(stored, tuple) or candidate.data.shapes is not None:
        return None
    if augment == "eval":
        return (work, stored) if stored == _side_before_crop(size) else None
    return ("crops", stored) if work == "pixels" else None


def _side_before_crop(size: int) -> int:
    """Return the shorter side, in pixels, that validation resizes to before it crops a square of `size`."""
    return round(size / CROP_RATIO)


def choose_peers(
    names: Sequence[str], paths: Sequence[Path], size: int, python: str, peer_data: Path
) -> list[PeerCandidate]:
    """Choose the folder that each peer reads: one of `paths`, or a folder under `peer_data`.

    A folder under `peer_data` is written, see `write_data`, from the raw tree among `paths`, with squares as
    large as those of the shards there.

    Args:
        names: names in `bench.peers.libraries.PEERS`.
        size: side of the squares that are served, pixels.
        python: the Python interpreter that has the peers' packages.

    Raises:
        SettingError: unknown name, or no such `python`.
        DatasetError: no folder for a peer among `paths`.
    """
    check_python(python)
    recipes = {path: open_dataset(path).manifest.recipe for path in paths if is_converted(path)}
    peers = []
    for name in dict.fromkeys(names):
        check_choice("peer", name, PEERS)
        if PEERS[name].reads in FORMATS:
            peers.append(_choose_converted_folder(name, recipes, size, python))
        else:
            trees = [path for path in paths if path not in recipes]
            peers.append(_choose_own_folder(name, recipes, trees, size, python, peer_data))
    return peers


def _choose_converted_folder(name: str, recipes: dict[Path, Recipe], size: int, python: str) -> PeerCandidate:
    """Pair a peer that reads a format of this project with the first folder of that format."""
    reads = PEERS[name].reads
    path = next((path for path, recipe in recipes.items() if recipe.format == reads), None)
    if path is None:
        raise DatasetError(
            f"peer {name} reads {reads}, and no such folder is there", remedy="name one as DATA"
        )
    stored = recipes[path].stored_size
    if not isinstance(stored, int):
        raise DatasetError(
            f"peer {name} serves squares, and {path} holds other pictures",
            remedy=f"leave it out, or name a folder that was converted with --fit crop --size "
            f"{_side_before_crop(size)}",
        )
    return PeerCandidate(name, path, stored, python)


def _choose_own_folder(
    name: str, recipes: dict[Path, Recipe], trees: Sequence[Path], size: int, python: str, peer_data: Path
) -> PeerCandidate:
    """Pair a peer that reads a format of its own with its folder under `peer_data`, there or not."""
    sides = [recipe.stored_size for recipe in recipes.values() if recipe.format == "shards"]
    stored = next((side for side in sides if isinstance(side, int)), _side_before_crop(size))
    path = peer_data / f"{PEERS[name].reads}-{stored}"
    source = trees[0].resolve() if trees else None
    if source is None and not path.exists():
        raise DatasetError(
            f"peer {name}: {path} does not exist", remedy="name the raw tree to write it from as DATA"
        )
    return PeerCandidate(name, path, stored, python, source)


def check_python(python: str) -> None:
    """Raise SettingError unless there is such a program."""
    if shutil.which(python) is None:
        raise SettingError("cannot be run", path=python, remedy="name a Python with --peer-python")


def limit_candidates(paths: Sequence[Path]) -> list[PeerCandidate]:
    """Return the peer LIMIT, which only copies pixels, for each folder of shards of squares among `paths`."""
    candidates = []
    for path in paths:
        recipe = open_dataset(path).manifest.recipe if is_converted(path) else None
        if recipe is not None and recipe.format == "shards" and isinstance(recipe.stored_size, int):
            candidates.append(PeerCandidate(LIMIT, path, recipe.stored_size, sys.executable))
    return candidates


def write_data(peer: PeerCandidate, workers: int) -> None:
    """Write the data that `peer` reads, unless it is there.

    Raises:
        WorkerError: the writer failed; the message has the last line that it printed.
        DatasetError: the data that is there was written from another tree.
    """
    if peer.source is None:
        return
    note = peer.path / _MADE_FROM
    if peer.path.exists():
        source = json.loads(note.read_text(encoding="utf-8")) if note.exists() else "something else"
        if source != str(peer.source):
            raise DatasetError(
                f"was written from {source}, not from {peer.source}",
                path=peer.path,
                remedy="remove it, or name another --peer-data",
            )
        return
    partial = peer.path.with_name(f"{peer.path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    size = 0 if PEERS[peer.name].whole else peer.stored_side
    write_squares(PEERS[peer.name].reads, scan_tree(peer.source), partial, size, max(1, workers), peer.python)
    (partial / note.name).write_text(json.dumps(str(peer.source)), encoding="utf-8")
    partial.rename(peer.path)


def write_squares(writer: str, scan: Scan, folder: Path, size: int, workers: int, python: str) -> float:
    """Write the pictures of a scanned tree into a new `folder`, as squares of raw pixels.

    Args:
        writer: a peer of `bench.peers.libraries.WRITERS`.
        size: side of the squares, pixels; 0: `writer` stores whole pictures.
        python: the Python interpreter that has its package.

    Returns:
        Seconds that the process took.

    Raises:
        WorkerError: the writer failed, or wrote fewer bytes than the pictures have.
    """
    samples = [scan.samples[row] for row in range(len(scan.samples))]
    paths = [str(scan.folder.absolute() / sample.path) for sample in samples]
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as pictures:
        json.dump([paths, [sample.label for sample in samples]], pictures)
        pictures.flush()
        words = ("write", writer, pictures.name, str(folder), "--size", size, "--workers", workers)
        wall_s, _ = _run_libraries(python, *words)
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    expected = len(samples) * size**2 * 3
    if written < expected:
        raise WorkerError(
            f"{writer} wrote {written:,} bytes to {folder}; {len(samples):,} pictures of {size}x{size} have "
            f"{expected:,}"
        )
    return wall_s


def read_version(name: str, python: str) -> str:
    """Return the name and version of a peer's library in that Python; WorkerError where it is missing."""
    _, answer = _run_libraries(python, "version", name)
    version: str = answer["version"]
    return version


def run_peer(
    peer: PeerCandidate, *, batch_size: int, size: int, workers: int, warmup: int, batches: int
) -> Trial:
    """Measure one trial of a peer in a process of its own.

    Its fact `version` is the library's name and version.

    Args:
        size: side of the squares that are served, pixels.
        warmup, batches: batches before the timed ones, after the first, and timed batches.

    Raises:
        WorkerError: the process failed; the message has the last line that it printed.
    """
    words = ("serve", peer.name, str(peer.path), "--stored", peer.stored_side, "--size", size)
    timing = ("--batch-size", batch_size, "--workers", workers, "--warmup", warmup, "--batches", batches)
    _, answer = _run_libraries(peer.python, *words, *timing)
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


def _run_libraries(python: str, *words: object) -> tuple[float, dict[str, Any]]:
    """Run `bench.peers.libraries` with that Python; return the seconds that it took and its JSON answer."""
    wall_s, text = run_command([python, str(libraries.__file__), *map(str, words)])
    lines = [line for line in text.splitlines() if line.startswith(('{"version"', '{"refused"'))]
    if not lines:
        raise WorkerError(f"{python} {libraries.__file__} {words[0]} {words[1]}: printed no result")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "refused" in answer:
        raise WorkerError(answer["refused"])
    return wall_s, answer
