"""Candidates of a comparison: pairs of a backend and a folder, which is opened once per command."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bench.report.gain import TODAY_BACKEND
from loaders.dataset import RAW, READS, SplitData, open_split
from precache.dataset.converted import open_dataset
from precache.errors import DatasetError, SettingError, SourceError, check_choice
from precache.storage.staging import temporary_folder
from precache.storage.urls import Location

_READS = {TODAY_BACKEND: (RAW,), "pytorch": READS["pytorch"], **READS}
"""Kinds of data that each backend reads: torchvision's ImageFolder, then backends of `loaders`."""
CHOICES = tuple(_READS)
"""Names for --backend, in the order of the table."""
DECODING_BACKENDS = ("pytorch", "webdataset")
"""Backends whose reader and decoder are this project's, so that reading and decoding can be timed apart."""
PROBED_PICTURES = 200  # pictures that are read and decoded for that
Rows: TypeAlias = npt.NDArray[np.int64]
"""int64 [n]: ascending positions of samples in a split."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend over a folder.

    Attributes:
        split: the training split of the folder; None until `open_candidates` has opened it.
        link_folder: folder of links to a part of a raw tree, where only that part is served; see
            `bench.measure.candidates.same_pictures`.
    """

    backend: str
    path: Location
    split: SplitData | None = field(default=None, compare=False, repr=False)
    link_folder: Path | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """Backend and folder, for messages."""
        return f"{self.backend} on {self.path}"

    @property
    def loader_path(self) -> Location:
        """The folder that the loader is given."""
        if self.link_folder is not None:
            return self.link_folder
        if self.backend == TODAY_BACKEND:  # it knows no splits: their class folders are its tree
            return class_root(self.data)
        return self.path

    @property
    def data(self) -> SplitData:
        """The training split of a candidate that `open_candidates` or `choose_candidates` returned."""
        if self.split is None:
            raise RuntimeError(f"{self.label}: was not opened")
        return self.split

    @property
    def has_own_recipe(self) -> bool:
        """Whether the loader may serve another dtype and fewer pictures of the tree than the others."""
        return self.backend == TODAY_BACKEND

    @property
    def image_bytes(self) -> float | None:
        """Mean bytes of a picture as it is stored; None for the backend `synthetic`, which reads none."""
        if self.backend == "synthetic":
            return None
        sizes: list[int] = self.data.shard_bytes.tolist() or [
            Path(file).stat().st_size for file in self.data.files
        ]
        return sum(sizes) / len(self.data)

    def probe_files(self) -> tuple[str, ...]:
        """Files of which reading and decoding are timed apart: some pictures of a tree, or all shards."""
        files = self.data.files
        if self.data.kind != RAW:
            return tuple(files)
        rows = np.unique(np.linspace(0, len(files) - 1, PROBED_PICTURES).round().astype(int))
        return tuple(files[row] for row in rows.tolist())


def class_root(tree: SplitData) -> Path:
    """Return the folder that holds the class folders of a raw tree: the tree itself, or its split."""
    root = Path(str(tree.path))
    first_folder = Path(tree.files[0]).relative_to(root).parts[0]
    # below it may follow more folders: pictures may lie deeper than their class folder
    is_split = first_folder != tree.classes[int(tree.labels[0])]
    return root / first_folder if is_split else root


def local_folder(location: Location) -> Path:
    """Return the folder whose files a loader reads; for a dataset at a URL, the cache with all its files."""
    if isinstance(location, Path):
        return location
    dataset = open_dataset(location)
    for file in dataset.manifest.files:
        with dataset.local_files(file):
            pass
    return dataset.path


def choose_candidates(data: Sequence[Location], backends: Sequence[str], root: Path) -> list[Candidate]:
    """Pair each backend with the folders that it reads.

    Args:
        data: folders, which are opened; if it is empty, each backend gets the folder under `root` that it is
            made for, whether or not that exists.
        backends: names of CHOICES, or `all`.

    Raises:
        SettingError: unknown backend.
        DatasetError: none of the backends reads any of the folders.
    """
    for backend in backends:
        check_choice("backend", backend, [*CHOICES, "all"])
    names = CHOICES if "all" in backends else tuple(dict.fromkeys(backends))
    if not data:
        return [Candidate(name, root / _READS[name][0]) for name in names]
    splits = {path: open_split(path, "train") for path in data}
    candidates = [
        Candidate(name, path, split)
        for name in names
        for path, split in splits.items()
        if split.kind in _READS[name]
    ]
    if not candidates:
        kinds = ", ".join(f"{path} holds {split.kind}" for path, split in splits.items())
        raise DatasetError(
            f"{kinds}: none of it is read by backend {', '.join(names)}", remedy="use --backend all"
        )
    return candidates


def open_candidates(candidates: Sequence[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    """Open the candidates' folders, each once.

    Returns:
        The candidates that could be opened, and why the others could not, by their labels.
    """
    splits: dict[Location, SplitData | Exception] = {
        candidate.path: candidate.split for candidate in candidates if candidate.split is not None
    }
    opened, failures = [], {}
    for candidate in candidates:
        if candidate.path not in splits:
            try:
                splits[candidate.path] = open_split(candidate.path, "train")
            except (DatasetError, SourceError, SettingError) as error:
                splits[candidate.path] = error
        split = splits[candidate.path]
        if isinstance(split, Exception):
            failures[candidate.label] = str(split)
        else:
            opened.append(replace(candidate, split=split))
    return opened, failures


@contextmanager
def same_pictures(candidates: Sequence[Candidate]) -> Iterator[tuple[list[Candidate], list[str]]]:
    """Cut raw trees down to the pictures that the converted folders among `candidates` hold.

    `precache convert --splits` puts a part of a tree into the split that is measured, and `--max-rejects`
    leaves pictures out. The part becomes a tree of links in a temporary folder, which every loader reads as
    it reads any tree; the folder is removed after the block.

    Args:
        candidates: opened by `open_candidates`.

    Yields:
        The candidates, with the links in the place of their trees; and for each such tree a clause that says
        how many pictures are served.
    """
    served, notes = list(candidates), []
    with ExitStack() as folders:
        trees = {candidate.path: candidate.data for candidate in candidates if candidate.data.kind == RAW}
        for path, tree in trees.items():
            rows = _find_common_rows(tree, candidates)
            if rows is None or not isinstance(path, Path):
                continue
            folder = folders.enter_context(temporary_folder())
            part = _link_pictures(tree, rows, folder)
            for number, candidate in enumerate(served):
                if candidate.path == path:
                    served[number] = replace(candidate, split=part, link_folder=folder)
            notes.append(
                f"of {path} only the {len(rows):,} of {len(tree):,} pictures are served that the "
                f"data set holds"
            )
        yield served, notes


def _find_common_rows(tree: SplitData, candidates: Sequence[Candidate]) -> Rows | None:
    """Return the rows of `tree` that the first converted part of it holds; None where there is no part."""
    for candidate in candidates:
        rows = _common_rows(tree, candidate.data)
        if rows is not None:
            return rows
    return None


def _common_rows(tree: SplitData, other: SplitData) -> Rows | None:
    """Return the rows of `tree` whose paths `other` holds; None for all of them, or if it has other paths."""
    if other.kind == RAW or len(other) >= len(tree):
        return None
    row_of = {os.path.relpath(file, str(tree.path)): row for row, file in enumerate(tree.files)}
    paths = (other.index.path(row) for row in range(len(other)))
    rows = [row_of.get(path, -1) if path is not None else -1 for path in paths]
    return np.sort(np.array(rows, np.int64)) if min(rows, default=-1) >= 0 else None


def _link_pictures(tree: SplitData, rows: Rows, folder: Path) -> SplitData:
    """Link pictures of `tree` into `folder`, below their class folders, and return the split of the links."""
    files, root = [], class_root(tree)
    for row in rows.tolist():
        file = Path(tree.files[row])
        link = folder / file.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
        files.append(str(link))
    identity = f"{tree.digest} rows {rows.tolist()}"
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return replace(
        tree,
        datasets=(replace(tree.datasets[0], path=folder, digest=digest),),
        index=tree.index.view_rows(rows),
        files=tuple(files),
        shard_samples=np.array([len(rows)]),
        digest=digest,
    )
