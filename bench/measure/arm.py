"""What is measured: a backend over a folder, whose data is opened once a command."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import loaders
from bench.measure import imagefolder
from loaders.dataset import RAW, SplitData, open_split
from precache.dataset.converted import open_dataset
from precache.errors import DatasetError, SettingError, SourceError, check_choice
from precache.storage.urls import Location, Url

CHOICES = (imagefolder.NAME, "pytorch", *sorted(loaders.BACKENDS.keys() - {"pytorch"}))
"""Names for --backend, in the order of the table: what people have today, then what changes one line."""
READS = {**loaders.READS, imagefolder.NAME: (RAW,)}
"""Kinds of folders that each reads, first the one that it is made for."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One thing to measure: a backend over a folder.

    Attributes:
        opened: what the folder holds; None until `open_arms` was asked.
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
            return Path(self.data.files[0]).parent.parent
        return self.path

    @property
    def data(self) -> SplitData:
        """What the folder holds, of an arm that `open_arms` or `choose_arms` gave."""
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

    @property
    def file_bytes(self) -> int:
        """Of all files in its folder, those of sub-folders left out; of a converted one that is all."""
        if isinstance(self.path, Url):
            return sum(self.data.shard_bytes)
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())


def folder_of(place: Location) -> Path:
    """Where the files lie that are read: of a dataset at a URL all of them, in the cache of this machine."""
    if isinstance(place, Path):
        return place
    dataset = open_dataset(place)
    for file in dataset.manifest.files:
        with dataset.held(file):
            pass
    return dataset.path


def choose_arms(data: Sequence[Location], backends: Sequence[str], root: Path) -> list[Arm]:
    """Which backend reads which folder.

    Given folders go to every backend that reads them, and are opened; without any, each backend gets the
    folder under `root` that it is made for, there or not. An unknown backend is a SettingError.
    """
    for backend in backends:
        check_choice("backend", backend, [*CHOICES, "all"])
    names = CHOICES if "all" in backends else tuple(dict.fromkeys(backends))
    if not data:
        return [Arm(name, root / READS[name][0]) for name in names]
    opened = {path: open_split(path, "train") for path in data}
    arms = [
        Arm(name, path, split)
        for name in names
        for path, split in opened.items()
        if split.kind in READS[name]
    ]
    if not arms:
        held = ", ".join(f"{path} holds {split.kind}" for path, split in opened.items())
        raise DatasetError(f"{held}: none of it is read by backend {', '.join(names)}; use --backend all")
    return arms


def open_arms(arms: Sequence[Arm]) -> tuple[list[Arm], dict[str, str]]:
    """The arms, opened, a folder once whoever reads it; and why the others cannot be, by name."""
    found: dict[Location, SplitData | Exception] = {
        arm.path: arm.opened for arm in arms if arm.opened is not None
    }
    opened, failed = [], {}
    for arm in arms:
        if arm.path not in found:
            try:
                found[arm.path] = open_split(arm.path, "train")
            except (DatasetError, SourceError, SettingError) as error:
                found[arm.path] = error
        data = found[arm.path]
        if isinstance(data, Exception):
            failed[arm.label] = str(data)
        else:
            opened.append(replace(arm, opened=data))
    kinds = Counter(data.kind for data in found.values() if isinstance(data, SplitData))
    return [replace(arm, alike=kinds[arm.data.kind] > 1) for arm in opened], failed
