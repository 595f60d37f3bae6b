"""The journal of an unfinished conversion, `journal.jsonl`: its target, and its finished shards.

The first record (see `precache.storage.records`) holds the target, the numbers of the shards, from which the
names of all files follow, and what was asked for, see `precache.dataset.unfinished`. Each further record is a
finished shard, see `WrittenShard`. A folder with a journal is an unfinished conversion of ours, which the
same command continues.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from precache.dataset.files import FileEntry, file_problem, first_problem
from precache.dataset.index import INDEX_NAME, REJECTED_NAME, SOURCE, Array, Rejected
from precache.dataset.manifest import MANIFEST_NAME
from precache.dataset.shard_table import ShardEntry, file_names, shard_name
from precache.dataset.statistics import PixelSums
from precache.dataset.unfinished import JOURNAL_NAME
from precache.errors import DatasetError, SettingError, os_reason, shell_command
from precache.formats import FORMATS, Format
from precache.pictures.kinds import is_decodable_now
from precache.plan import ConvertPlan, ShardPlan
from precache.recipe import Recipe
from precache.reporting import abridge, quantity, warn
from precache.sources.base import Samples, Scan, changed_pictures
from precache.storage import (
    atomic_write,
    fsync_folder,
    open_append,
    open_regular,
    remove_leftovers,
)
from precache.storage.locks import foreign_names
from precache.storage.records import PROBED_BYTES, RecordFile, may_be_records

_KEY = "journal"
_VERSION = 2
_MAX_SHARDS = 10**7
_ANOTHER_SOURCE = "another source tree, or one that changed since"
MODIFIED_NS, SOURCE_CHECKSUMS = f"{SOURCE}modified_ns", f"{SOURCE}checksums"
COLUMNS: dict[str, tuple[type, tuple[int, ...]]] = {
    "source_sizes": (np.int32, (2,)),
    "checksums": (np.uint64, ()),
    MODIFIED_NS: (np.int64, ()),
    SOURCE_CHECKSUMS: (np.uint64, ()),
}
"""Columns that writing a shard fills, by the index's name of each: dtype and shape of a row."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a conversion: equal targets give equal bytes.

    Attributes:
        recipe: settings that change the bytes.
        source_digest: digest of the source.
        made_by: versions of the software that decodes and encodes.
    """

    recipe: Recipe
    source_digest: str
    made_by: dict[str, str]

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Return a phrase for each difference between `other`, a target as JSON, and this one."""
        phrases = recipe_differences(other.get("recipe", {}), self.recipe)
        if other.get("source_digest") != self.source_digest:
            phrases.append(_ANOTHER_SOURCE)
        made_by = other.get("made_by", self.made_by)
        phrases += [
            f"{name} {made_by.get(name)}, here {value}"
            for name, value in self.made_by.items()
            if made_by.get(name) != value
        ]
        return phrases

    def check_same(
        self, place: Path, other: dict[str, Any], *, is_finished: bool = False, changes: str = ""
    ) -> None:
        """Raise DatasetError if `other`, the target of the conversion in `place` as JSON, is another one.

        Args:
            changes: what changed in the source, for the message.
        """
        differences = self.differences(other)
        if not differences:
            return
        remedy = "choose another DST"
        if is_finished and differences == [_ANOTHER_SOURCE]:
            remedy = f"convert what is new into another DST with --without {shell_command(place)}"
        if changes:
            differences.append(changes)
        raise DatasetError(
            f"holds another conversion ({'; '.join(differences)})",
            path=place,
            remedy=f"{remedy}, or pass --overwrite to replace it",
        )


@dataclass(frozen=True, slots=True, eq=False)
class WrittenShard:
    """A shard as it was written; it has no files if every picture of it was rejected.

    Attributes:
        entry: the shard's entry in the index of the dataset.
        rejected: pictures of the plan that the shard lacks.
        columns: values by their names in the index. `source_sizes` and `checksums` have a row for each
            sample, in stored order; `source:modified_ns` and `source:checksums` have one for each picture of
            the plan, in its order, rejected ones too.
        sums: sums over the pixels of the samples.
    """

    entry: ShardEntry
    rejected: tuple[Rejected, ...]
    columns: Mapping[str, Array]
    sums: PixelSums

    def to_json(self) -> dict[str, Any]:
        """Return the shard as a record of the journal, without what the plan says of it."""
        return {
            "shard": self.entry.name,
            "files": [[file.bytes, file.crc32c] for file in self.entry.files],
            "rejected": [[picture.id, picture.reason] for picture in self.rejected],
            "columns": {name: column.tolist() for name, column in self.columns.items()},
            "sums": [self.sums.pixels, self.sums.sums, self.sums.squares],
        }

    @classmethod
    def from_json(
        cls, content: Mapping[str, Any], plan: ShardPlan, samples: Samples, form: Format
    ) -> "WrittenShard":
        """Return the shard of `plan` from a record that `to_json` gave."""
        row_of = dict(zip(samples.ids[plan.rows].tolist(), plan.rows.tolist(), strict=True))
        rejected = tuple(
            Rejected(samples[row_of.pop(id_)].path, reason, id_) for id_, reason in content["rejected"]
        )
        names = file_names(plan.name, form) if row_of else ()
        files = tuple(
            FileEntry(name, size, checksum)
            for name, (size, checksum) in zip(names, content["files"], strict=True)
        )
        pixels, sums, squares = content["sums"]
        return cls(
            ShardEntry(plan.name, plan.split, len(row_of), files),
            rejected,
            {name: make_column(name, values) for name, values in content["columns"].items()},
            PixelSums(pixels, tuple(sums), tuple(squares)),
        )


def make_column(name: str, values: Sequence[Any]) -> Array:
    """Return `values` as the column `name` of `COLUMNS`."""
    dtype, row_shape = COLUMNS[name]
    return np.array(values, dtype).reshape(-1, *row_shape)


class Journal:
    """The journal of a conversion, open for writing.

    Opening it starts a conversion in an empty or missing folder, or continues an unfinished one:
    then `finished` holds the shards that fit the plan and whose files are intact. With `overwrite`, an
    unfinished conversion of another target is removed: only the files that its journal lists.

    Args:
        request: what was asked for, see `precache.dataset.unfinished`.

    Attributes:
        folder: folder of the dataset.
        finished: shards on record, by name.

    Raises:
        DatasetError: the folder holds something else, or an unfinished conversion of another target.
    """

    def __init__(
        self,
        folder: Path,
        target: Target,
        plan: ConvertPlan,
        scan: Scan,
        *,
        request: Mapping[str, Any],
        overwrite: bool = False,
    ) -> None:
        self.folder = folder
        self.finished: dict[str, WrittenShard] = {}
        self._path = folder / JOURNAL_NAME
        self._header = _make_header(target, plan, request)
        self._names = own_names(self._header)
        self._plans = {shard.name: shard for shard in plan.shards}
        self._scan = scan
        self._form = FORMATS[plan.recipe.format]
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_folder(folder.parent)
        if os.path.lexists(self._path):
            with closing(RecordFile(_open_journal(self._path))) as records:
                self._continue(records, target, overwrite)
        else:
            check_empty(folder)
        remove_leftovers(folder, self._names)
        self._records = self._rewrite()

    def record(self, shard: WrittenShard) -> None:
        """Record that `shard` is finished; the record is durable when this returns."""
        self._records.append(shard.to_json())
        self.finished[shard.entry.name] = shard

    def kept_message(self) -> str:
        """Return the part of an interruption's message that says how many pictures are kept."""
        done = sum(len(self._plans[name].rows) for name in self.finished)
        if not done:
            return "before the first shard was finished; nothing is kept, and the same command starts again"
        pictures = quantity(sum(len(shard.rows) for shard in self._plans.values()), "picture")
        return (
            f"after {done:,} of {pictures} were finished; these are kept, and the same command continues "
            f"with the rest"
        )

    def check_whole(self) -> None:
        """Raise DatasetError unless the files of all finished shards are there, with their sizes."""
        files = (file for shard in self.finished.values() for file in shard.entry.files)
        if problem := first_problem(self.folder, files):
            raise DatasetError(
                problem,
                remedy="nothing else may write there during a conversion: run the same command again",
            )

    def remove(self) -> None:
        """Delete the journal, once the manifest is written."""
        remove_leftovers(self.folder, self._names)  # from workers that died
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
        self._records.close()

    def _continue(self, records: RecordFile, target: Target, overwrite: bool) -> None:
        """Continue with the journal in the folder; or remove the files that it lists for another target."""
        lines = records.read()
        header = next(lines, None)
        if header is None:
            self._start_over()
        elif not own_names(header):
            raise _foreign_journal_error(self._path)
        elif overwrite and target.differences(header):
            self._discard(own_names(header))
        else:
            target.check_same(self.folder, header)
            self._load_finished(lines, records)

    def _start_over(self) -> None:
        """Begin anew where the journal's first line is damaged; only in a folder without other files."""
        if others := foreign_names(self.folder, self._names):
            raise DatasetError(
                f"is damaged, and the folder holds other files ({abridge(others)})",
                path=self._path,
                remedy="move them elsewhere, or choose another DST",
            )
        warn(f"{self._path}: its first line is damaged; all shards are converted again")

    def _discard(self, names: frozenset[str]) -> None:
        """Remove the files of an unfinished conversion; its journal is replaced later."""
        # temporary files first, so that a worker that outlives its parent cannot rename them
        remove_leftovers(self.folder, names)
        for name in names - {JOURNAL_NAME}:
            (self.folder / name).unlink(missing_ok=True)

    def _load_finished(self, lines: Iterator[dict[str, Any]], records: RecordFile) -> None:
        """Fill `finished` with the shards on record that are still whole; warn of the others."""
        problems: list[str] = []
        for line in lines:
            plan = self._plans[line["shard"]]
            shard = WrittenShard.from_json(line, plan, self._scan.samples, self._form)
            self.finished.pop(shard.entry.name, None)
            problem = self._shard_problem(shard)
            if problem is not None:
                problems.append(problem)
                continue
            times = self._scan.samples.modified_ns[plan.rows]
            self.finished[shard.entry.name] = replace(shard, columns={**shard.columns, MODIFIED_NS: times})
        if records.damaged:
            warn(
                f"{self._path}: line {records.count + 1} is damaged or cut off; its shard and those "
                f"of the lines below are converted again"
            )
        if problems:
            warn(f"{problems[0]}; {quantity(len(problems), 'finished shard')} must be converted again")

    def _shard_problem(self, shard: WrittenShard) -> str | None:
        """Return why the shard must be converted again, in a phrase; None if it need not be."""
        rows, columns = self._plans[shard.entry.name].rows, shard.columns
        for path in changed_pictures(self._scan, rows, columns[MODIFIED_NS], columns[SOURCE_CHECKSUMS]):
            return f"{path}: has changed since it was converted"
        for picture in shard.rejected:
            if is_decodable_now(picture.reason):
                return f"{picture.path}: can be decoded now"
        for file in shard.entry.files:
            problem = file_problem(self.folder, file)
            if problem is not None:
                return problem
        return None

    def _rewrite(self) -> RecordFile:
        """Replace the journal by one of the shards in `finished`, open for more records."""
        with atomic_write(self._path) as file:
            records = RecordFile(file.fileno())
            records.append(self._header, durable=False)
            for shard in self.finished.values():
                records.append(shard.to_json(), durable=False)
        records = RecordFile(open_append(self._path))
        for _ in records.read():
            pass
        return records


def check_empty(folder: Path) -> None:
    """Raise DatasetError if `folder` holds anything but a conversion of ours."""
    is_ours = any(os.path.lexists(folder / name) for name in (JOURNAL_NAME, MANIFEST_NAME))
    if is_ours or not folder.is_dir():
        return
    if others := foreign_names(folder, frozenset({JOURNAL_NAME})):
        raise DatasetError(
            f"is not empty, and not a folder that precache made ({abridge(others)})",
            path=folder,
            remedy="choose another DST, or empty it yourself",
        )


def own_names(header: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names of all files that the conversion of this journal makes.

    The result is empty without a header, and for a header that no journal of this release has.
    """
    try:
        if header is None or header[_KEY] != _VERSION or not header["made_by"].keys():
            return frozenset()
        form = FORMATS[header["recipe"]["format"]]
        names = {JOURNAL_NAME, REJECTED_NAME, INDEX_NAME, MANIFEST_NAME}
        for split, (first, count) in header["shards"].items():
            for number in range(first, first + min(count, _MAX_SHARDS)):
                names.update(file_names(shard_name(split, number), form))
    except (LookupError, TypeError, ValueError, AttributeError, SettingError):
        return frozenset()
    return frozenset(names)


def read_header(path: Path) -> dict[str, Any] | None:
    """Return the first record of the journal at `path`; None if it is missing or damaged."""
    try:
        file = open_regular(path, getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    with file:
        return next(RecordFile(file.fileno()).read(), None)


def _make_header(target: Target, plan: ConvertPlan, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first record of the journal, in the form in which JSON gives it back."""
    shards: dict[str, list[int]] = {}  # split -> number of its first shard, number of shards
    for shard in plan.shards:
        shards.setdefault(shard.split, [shard.number, 0])[1] += 1
    header: dict[str, Any] = json.loads(
        json.dumps({_KEY: _VERSION, **asdict(target), "shards": shards, "request": request})
    )
    return header


def recipe_differences(existing: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Return a phrase for each setting that differs between `existing`, a recipe as JSON, and `recipe`."""
    return [
        f"{name} {_setting_text(existing.get(name))}, asked for {_setting_text(value)}"
        for name, value in recipe.to_json().items()
        if existing.get(name) != value
    ]


def _setting_text(value: object) -> object:
    """Return a setting as it is typed: a list, which is a size [height, width], as WIDTHxHEIGHT."""
    return "x".join(map(str, reversed(value))) if isinstance(value, list) else value


def _open_journal(path: Path) -> int:
    """Return a descriptor of the journal; DatasetError if the file is no journal."""
    try:
        file = open_regular(path, getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        raise DatasetError(
            f"cannot be read as the journal of a conversion ({os_reason(error)})",
            path=path,
            remedy="choose another DST, or remove the file",
        ) from error
    with file:
        if may_be_records(os.pread(file.fileno(), PROBED_BYTES, 0), _KEY):
            return os.dup(file.fileno())
    raise _foreign_journal_error(path)


def _foreign_journal_error(path: Path) -> DatasetError:
    return DatasetError(
        "not a journal that this release can read",
        path=path,
        remedy="choose another DST, or remove the file",
    )
