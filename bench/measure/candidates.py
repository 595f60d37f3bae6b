"""What is measured: a backend over a folder, whose data is opened once a command."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import loaders
from bench.measure import imagefolder
from loaders.dataset import RAW, SplitData, open_split
from precache.dataset.converted import open_dataset
from precache.errors import DatasetError, SettingError, SourceError, check_choice
from precache.storage.staging import temporary_folder
from precache.storage.urls import Location

CHOICES = (imagefolder.NAME, "pytorch", *sorted(loaders.BACKENDS.keys() - {"pytorch"}))
"""Names for --backend, in the order of the table: what people have today, then what changes one line."""
READS = {**loaders.READS, imagefolder.NAME: (RAW,)}
"""Kinds of folders that each reads, first the one that it is made for."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing to measure: a backend over a folder.

    Attributes:
        opened: what the folder holds; None until `open_candidates` was asked.
        linked: links to a part of a raw tree, where only that part is served; see
            `bench.measure.same_pictures`.
        alike: whether another folder that is measured holds the same kind of data.
    """

    backend: str
    path: Location
    opened: SplitData | None = field(default=None, compare=False, repr=False)
    linked: Path | None = field(default=None, compare=False, repr=False)
    alike: bool = field(default=False, compare=False, repr=False)

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.backend} on {self.path}"

    @property
    def reads(self) -> Location:
        """The folder that the loader is given."""
        if self.linked is not None:
            return self.linked
        if self.backend == imagefolder.NAME:  # which knows no splits
            return class_root(self.data)
        return self.path

    @property
    def data(self) -> SplitData:
        """What the folder holds, of an candidate that `open_candidates` or `choose_candidates` gave."""
        if self.opened is None:
            raise RuntimeError(f"{self.label}: was not opened")
        return self.opened

    @property
    def has_own_recipe(self) -> bool:
        """Whether it delivers what its own recipe says: another dtype, other pictures of the tree."""
        return self.backend == imagefolder.NAME

    @property
    def described(self) -> str:
        """What kind of data it is, for tables, and its folder where the kind alone does not tell."""
        kind = self.data.kind if self.data.kind != RAW else "raw tree"
        return f"{kind} {self.path.name}" if self.alike else kind

    @property
    def image_bytes(self) -> float | None:
        """Of a picture as it is stored, on average; None of noise."""
        if self.backend == "synthetic":
            return None
        sizes: list[int] = self.data.shard_bytes.tolist() or [
            Path(file).stat().st_size for file in self.data.files
        ]
        return sum(sizes) / len(self.data)


def class_root(tree: SplitData) -> Path:
    """The folder of the class folders in a raw tree: the tree itself, or that of its split."""
    root = Path(str(tree.path))
    above = Path(tree.files[0]).relative_to(root).parts[:-1]
    # pictures may lie in folders of their class folder
    is_split = above[0] != tree.classes[int(tree.labels[0])]
    return root / above[0] if is_split else root


def folder_of(place: Location) -> Path:
    """Where the files lie that are read: of a dataset at a URL all of them, in the cache of this machine."""
    if isinstance(place, Path):
        return place
    dataset = open_dataset(place)
    for file in dataset.manifest.files:
        with dataset.local_files(file):
            pass
    return dataset.path


def choose_candidates(data: Sequence[Location], backends: Sequence[str], root: Path) -> list[Candidate]:
    """Which backend reads which folder.

    Given folders go to every backend that reads them, and are opened; without any, each backend gets the
    folder under `root` that it is made for, there or not. An unknown backend is a SettingError.
    """
    for backend in backends:
        check_choice("backend", backend, [*CHOICES, "all"])
    names = CHOICES if "all" in backends else tuple(dict.fromkeys(backends))
    if not data:
        return [Candidate(name, root / READS[name][0]) for name in names]
    opened = {path: open_split(path, "train") for path in data}
    candidates = [
        Candidate(name, path, split)
        for name in names
        for path, split in opened.items()
        if split.kind in READS[name]
    ]
    if not candidates:
        held = ", ".join(f"{path} holds {split.kind}" for path, split in opened.items())
        raise DatasetError(f"{held}: none of it is read by backend {', '.join(names)}; use --backend all")
    return candidates


def open_for(backend: str, folder: Location) -> SplitData:
    """The training split in `folder`; DatasetError where `backend`, unless it is auto, does not read it."""
    data = open_split(folder, "train")
    if backend != "auto" and data.kind not in READS[backend]:
        kind = "pytorch" if data.kind == RAW else data.kind
        raise DatasetError(
            f"{folder}: holds {data.kind}, which {backend} does not read; use backend {kind!r}"
        )
    return data


def open_candidates(candidates: Sequence[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates, opened, a folder once whoever reads it; and why the others cannot be, by name."""
    found: dict[Location, SplitData | Exception] = {
        candidate.path: candidate.opened for candidate in candidates if candidate.opened is not None
    }
    opened, failed = [], {}
    for candidate in candidates:
        if candidate.path not in found:
            try:
                found[candidate.path] = open_split(candidate.path, "train")
            except (DatasetError, SourceError, SettingError) as error:
                found[candidate.path] = error
        data = found[candidate.path]
        if isinstance(data, Exception):
            failed[candidate.label] = str(data)
        else:
            opened.append(replace(candidate, opened=data))
    kinds = Counter(data.kind for data in found.values() if isinstance(data, SplitData))
    return [replace(candidate, alike=kinds[candidate.data.kind] > 1) for candidate in opened], failed


@contextmanager
def same_pictures(candidates: Sequence[Candidate]) -> Iterator[tuple[list[Candidate], list[str]]]:
    """Opened `candidates`, their raw trees cut down to what data sets among them hold; links end with this.

    Yields them, and a clause for each of these trees.

    `precache convert --splits` puts a part of the tree into the split that is measured, and `--max-rejects`
    leaves pictures out. The part is a tree of links in a temporary folder: every loader reads it as it is.
    """
    served, notes = list(candidates), []
    with ExitStack() as links:
        trees = (candidate.path for candidate in candidates if candidate.data.kind == RAW)
        for tree in dict.fromkeys(path for path in trees if isinstance(path, Path)):
            whole = next(candidate.data for candidate in candidates if candidate.path == tree)
            part = next(
                (rows for candidate in candidates if (rows := _part(whole, candidate.data)) is not None), None
            )
            if part is None:
                continue
            folder = links.enter_context(temporary_folder())
            data = _link(whole, part, folder)
            for number, candidate in enumerate(served):
                if candidate.path == tree:
                    served[number] = replace(candidate, opened=data, linked=folder)
            notes.append(
                f"of {tree} only the {len(part):,} of {len(whole):,} pictures are served that the "
                f"data set holds"
            )
        yield served, notes


def _part(tree: SplitData, other: SplitData) -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
    """Rows of `tree` that `other` holds, by path; None if all of it, or if `other` has other pictures."""
    if other.kind == RAW or len(other) >= len(tree):
        return None
    row_of = {os.path.relpath(file, str(tree.path)): row for row, file in enumerate(tree.files)}
    paths = (other.index.path(row) for row in range(len(other)))
    rows = [row_of.get(path, -1) if path is not None else -1 for path in paths]
    return np.sort(np.array(rows, np.int64)) if min(rows, default=-1) >= 0 else None


def _link(tree: SplitData, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]", folder: Path) -> SplitData:
    """Link these pictures into `folder`, as they lie in their class folders; their data."""
    files, root = [], class_root(tree)
    for row in rows.tolist():
        file = Path(tree.files[row])
        link = folder / file.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
        files.append(str(link))
    identity = f"{tree.digest} rows {rows.tolist()}"
    return replace(
        tree,
        path=folder,
        index=tree.index.at(rows),
        files=tuple(files),
        shard_samples=np.array([len(rows)]),
        digest=hashlib.sha256(identity.encode()).hexdigest(),
    )
