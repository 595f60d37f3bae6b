"""`journal.jsonl`: which shards of an unfinished conversion are done.

The first line says what is being made, each further one is a finished shard with its checksums. A
folder with a journal is an unfinished conversion of ours; the same command continues it.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from precache.errors import DatasetError
from precache.files import FileEntry, check_file
from precache.index import Checksums, Ints, Sizes
from precache.manifest import RejectedSample, ShardEntry
from precache.recipe import Recipe
from precache.storage import TEMPORARY_SUFFIX, atomic_write, fsync_folder

JOURNAL_NAME = "journal.jsonl"
_SHARD_FILES = "*-[0-9][0-9][0-9][0-9][0-9].*"


@dataclass(frozen=True, slots=True)
class Target:
    """What a conversion makes: two with equal targets write equal bytes."""

    recipe: Recipe
    source_digest: str
    made_by: dict[str, str]

    def differences(self, found: dict[str, Any]) -> list[str]:
        """How `found`, another target as JSON, differs from this one; one phrase each."""
        recipe = found.get("recipe", {})
        phrases = [
            f"{name} {recipe.get(name)}, asked for {value}"
            for name, value in self.recipe.to_json().items()
            if recipe.get(name) != value
        ]
        if found.get("source_digest") != self.source_digest:
            phrases.append("another source tree, or one that changed since")
        made_by = found.get("made_by", self.made_by)
        phrases += [
            f"{name} {made_by.get(name)}, here {value}"
            for name, value in self.made_by.items()
            if made_by.get(name) != value
        ]
        return phrases

    def check_same(self, folder: Path, found: dict[str, Any]) -> None:
        """Raise DatasetError with the differences, unless `folder` holds this target."""
        if differences := self.differences(found):
            raise DatasetError(
                f"{folder}: holds another conversion ({'; '.join(differences)}); "
                f"choose another DST, or pass --overwrite to replace it"
            )


@dataclass(frozen=True, slots=True, eq=False)
class FinishedShard:
    """A shard that is written; without files if every picture of it was rejected.

    Attributes:
        entry: its line in the manifest.
        rejected: the pictures that it lacks.
        source_sizes: int32 [n, 2], width and height of the upright source pictures, in stored order.
        checksums: uint64 [n], XXH3-64 of what is stored of each, in stored order.
        source_modified_ns: int64 [m], of all pictures that the plan has in the shard, in its order, rejected
            ones too: when they had last been written.
        source_checksums: uint64 [m], of the same: XXH3-64 of the files.
    """

    entry: ShardEntry
    rejected: tuple[RejectedSample, ...]
    source_sizes: Sizes
    checksums: Checksums
    source_modified_ns: Ints
    source_checksums: Checksums


class Journal:
    """The journal of the conversion in `folder`, open for writing.

    Opening it starts a conversion in an empty or missing folder, or continues an unfinished one:
    then `finished` holds the shards whose files are intact.

    Raises:
        DatasetError: the folder holds something else, or an unfinished conversion of another target.
    """

    def __init__(self, folder: Path, target: Target, *, replace: bool = False) -> None:
        self.folder = folder
        self._path = folder / JOURNAL_NAME
        folder.mkdir(parents=True, exist_ok=True)
        lines = _read_lines(self._path)
        if lines is None and any(folder.iterdir()):
            raise DatasetError(
                f"{folder}: exists, is not empty and holds no conversion of ours; "
                f"choose another DST or empty it yourself"
            )
        header, *shards = lines or [asdict(target)]
        if not {"recipe", "source_digest"} <= header.keys():
            raise DatasetError(
                f"{self._path}: not a journal of ours; choose another DST or remove it yourself"
            )
        if replace and target.differences(header):
            shards = []
            for stray in folder.glob(_SHARD_FILES):
                stray.unlink()
        else:
            target.check_same(folder, header)
        for leftover in folder.glob(f"{_SHARD_FILES}{TEMPORARY_SUFFIX}"):
            leftover.unlink()
        intact = [line for line in shards if _is_intact(folder, _decode(line))]
        with atomic_write(self._path) as file:
            file.write("".join(_encode(line) for line in [asdict(target), *intact]).encode())
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        self.finished = {shard.entry.name: shard for shard in map(_decode, intact)}

    def record(self, shard: FinishedShard) -> None:
        """Note that `shard` is finished; durable when this returns."""
        line = {
            "entry": asdict(shard.entry),
            "rejected": [asdict(sample) for sample in shard.rejected],
            "source_sizes": shard.source_sizes.tolist(),
            "checksums": shard.checksums.tolist(),
            "source_modified_ns": shard.source_modified_ns.tolist(),
            "source_checksums": shard.source_checksums.tolist(),
        }
        self._file.write(_encode(line))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.finished[shard.entry.name] = shard

    def remove(self) -> None:
        """Delete the journal: the manifest is written."""
        self._path.unlink()
        fsync_folder(self._path.parent)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _encode(line: dict[str, Any]) -> str:
    return json.dumps(line) + "\n"


def _is_intact(folder: Path, shard: FinishedShard) -> bool:
    return all(check_file(folder, file) is None for file in shard.entry.files)


def _read_lines(path: Path) -> list[dict[str, Any]] | None:
    """The journal's lines, up to the first that a killed run left incomplete; None without journal."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    lines = []
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            break
        lines.append(content if isinstance(content, dict) else {})
    return lines


def _decode(line: dict[str, Any]) -> FinishedShard:
    entry = dict(line["entry"])
    files = tuple(FileEntry(**file) for file in entry.pop("files"))
    rejected = tuple(RejectedSample(**sample) for sample in line["rejected"])
    sizes = np.array(line["source_sizes"], np.int32).reshape(-1, 2)
    return FinishedShard(
        ShardEntry(files=files, **entry),
        rejected,
        sizes,
        np.array(line["checksums"], np.uint64),
        np.array(line["source_modified_ns"], np.int64),
        np.array(line["source_checksums"], np.uint64),
    )
