"""`journal.jsonl`: what an unfinished conversion makes, and which of its shards are finished.

The first record (see `precache.storage.records`) says what is made, and the numbers of its shards: they give
the names of all files. Each further record is a finished shard, see `WrittenShard`. A folder with a journal
is an unfinished conversion of ours; the same command continues it.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from precache.dataset.files import FileEntry, check_file, first_problem
from precache.dataset.index import REJECTED_NAME, SOURCE, Array, Rejected, index_name
from precache.dataset.manifest import MANIFEST_NAME
from precache.dataset.shard_table import ShardEntry, file_names, shard_name
from precache.dataset.statistics import PixelSums
from precache.errors import DatasetError, SettingError, os_reason
from precache.formats import FORMATS, Format
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
from precache.storage.locks import others_in
from precache.storage.records import PROBED_BYTES, RecordFile, may_be_records
from precache.storage.urls import Location, Url

if TYPE_CHECKING:
    from precache.conversion.url import FilesAtUrl

JOURNAL_NAME = "journal.jsonl"
_KEY = "journal"
_VERSION = 2
_MAX_SHARDS = 10**7
_ANOTHER_SOURCE = "another source tree, or one that changed since"
_REPLACED_BY_UPDATES = frozenset((REJECTED_NAME, MANIFEST_NAME))
MODIFIED_NS, SOURCE_CHECKSUMS = f"{SOURCE}modified_ns", f"{SOURCE}checksums"
COLUMNS: dict[str, tuple[type, tuple[int, ...]]] = {
    "source_sizes": (np.int32, (2,)),
    "checksums": (np.uint64, ()),
    "mask_checksums": (np.uint64, ()),
    MODIFIED_NS: (np.int64, ()),
    SOURCE_CHECKSUMS: (np.uint64, ()),
}
"""What is found out of a shard's pictures: dtype, and shape of a row, by the names that the index has."""
NOTHING_ELSE_MAY_WRITE = "nothing else may write there during a conversion: run the same command again"


@dataclass(frozen=True, slots=True)
class Target:
    """What a conversion makes: two with equal targets write equal bytes.

    `update` is the number of the update of a finished dataset, whose `source_digest` is over what it adds and
    to what; 0 for a conversion.
    """

    recipe: Recipe
    source_digest: str
    made_by: dict[str, str]
    update: int = 0

    def differences(self, found: dict[str, Any]) -> list[str]:
        """How `found`, another target as JSON, differs from this one; one phrase each."""
        phrases = recipe_differences(found.get("recipe", {}), self.recipe)
        if found.get("source_digest") != self.source_digest:
            phrases.append(_ANOTHER_SOURCE)
        if found.get("update", 0) != self.update:
            phrases.append("an update")
        made_by = found.get("made_by", self.made_by)
        phrases += [
            f"{name} {made_by.get(name)}, here {value}"
            for name, value in self.made_by.items()
            if made_by.get(name) != value
        ]
        return phrases

    def check_same(self, place: Location, found: dict[str, Any], *, finished: bool = False) -> None:
        """Raise DatasetError with the differences, unless `place` holds this target, finished or not."""
        if differences := self.differences(found):
            follow = "--update to follow the source " if finished and differences == [_ANOTHER_SOURCE] else ""
            replace = f", or pass {follow and f'{follow}or '}--overwrite to replace it"
            raise DatasetError(
                f"{place}: holds another conversion ({'; '.join(differences)}); "
                f"choose another DST{'' if finished and isinstance(place, Url) else replace}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class WrittenShard:
    """A shard that is written; without files if every picture of it was rejected.

    Attributes:
        entry: the shard, as the dataset's index has it.
        rejected: the pictures that it lacks.
        columns: by the names that the index has for them. Of its samples, in stored order: `source_sizes`,
            `checksums` and `mask_checksums`, empty where there are no masks. Of all pictures that the plan
            has in the shard, in its order, rejected ones too: `source:modified_ns` and `source:checksums`.
        sums: of the pixels of its samples.
    """

    entry: ShardEntry
    rejected: tuple[Rejected, ...]
    columns: Mapping[str, Array]
    sums: PixelSums

    def to_json(self) -> dict[str, Any]:
        """As a record of the journal; what the plan says of the shard is left out."""
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
        """What `to_json` gave of the shard of this plan."""
        row_of = dict(zip(samples.ids[plan.rows].tolist(), plan.rows.tolist(), strict=True))
        rejected = tuple(
            Rejected(samples[row_of.pop(number)].path, reason, number)
            for number, reason in content["rejected"]
        )
        names = file_names(plan.name, form) if row_of else ()
        files = tuple(FileEntry(name, *of) for name, of in zip(names, content["files"], strict=True))
        pixels, sums, squares = content["sums"]
        return cls(
            ShardEntry(plan.name, plan.split, len(row_of), files),
            rejected,
            {name: column_of(name, values) for name, values in content["columns"].items()},
            PixelSums(pixels, tuple(sums), tuple(squares)),
        )


def column_of(name: str, values: Sequence[Any]) -> Array:
    """A column of `COLUMNS`."""
    dtype, row_shape = COLUMNS[name]
    return np.array(values, dtype).reshape(-1, *row_shape)


class Journal:
    """The journal of a conversion, open for writing.

    Opening it starts a conversion in an empty or missing folder, or continues an unfinished one:
    then `finished` holds the shards that fit the plan and whose files are intact. With `overwrite`, an
    unfinished conversion of another target is removed: the files that its journal lists, no others. An update
    goes on in the folder of the dataset, see `FilesInFolder`; an unfinished one of
    another source is removed likewise.

    Attributes:
        files: those of the conversion, in a folder or at a URL.
        finished: shards on record, by their names.

    Raises:
        DatasetError: there is something else, or an unfinished conversion of another target.
    """

    def __init__(
        self,
        files: "FilesInFolder | FilesAtUrl",
        target: Target,
        plan: ConvertPlan,
        scan: Scan,
        *,
        overwrite: bool = False,
    ) -> None:
        self.files = files
        self.finished: dict[str, WrittenShard] = {}
        folder = files.folder
        self._path = folder / JOURNAL_NAME
        self._header = _header_of(target, plan)
        self._names = own_names(self._header)
        self._plans = {shard.name: shard for shard in plan.shards}
        self._scan = scan
        self._form = FORMATS[plan.recipe.format]
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_folder(folder.parent)
        if os.path.lexists(self._path):
            with closing(RecordFile(_open(self._path))) as records:
                self._continue(records, target, overwrite)
        else:
            self._check_free()
        remove_leftovers(folder, self._names | _REPLACED_BY_UPDATES)
        self._records = self._rewrite()

    def record(self, shard: WrittenShard) -> None:
        """Note that `shard` is finished; durable when this returns."""
        self._records.append(shard.to_json())
        self.finished[shard.entry.name] = shard

    def how_much_is_kept(self) -> str:
        """What is said of the conversion if it is interrupted now."""
        done = sum(len(self._plans[name].rows) for name in self.finished)
        if not done:
            return "before the first shard was finished; nothing is kept, and the same command starts again"
        of = quantity(sum(len(shard.rows) for shard in self._plans.values()), "picture")
        place, folder = self.files.place, self.files.folder
        where = "" if place == folder else f" on this machine, whose journal is in {folder}"
        return (
            f"after {done:,} of {of} were finished; these are kept, and the same command continues with the "
            f"rest{where}"
        )

    def remove(self) -> None:
        """Delete the journal: the manifest is written."""
        remove_leftovers(self.files.folder, self._names | _REPLACED_BY_UPDATES)  # of workers that died
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
        """Go on with the journal found; or remove what it lists, if it is of another target."""
        lines = records.read()
        header = next(lines, None)
        if header is None:
            self._start_over()
        elif not own_names(header):
            raise _foreign(self._path)
        elif overwrite and target.differences(header):
            self._discard(own_names(header))
        elif self.files.dataset_names and header.get("update", 0) and header != self._header:
            warn(f"{self.files.folder}: an unfinished update of another state of the source is dropped")
            self._discard(own_names(header) - self.files.dataset_names)
            self._check_free()
        else:
            target.check_same(self.files.place, header)
            self._take(lines, records)

    def _check_free(self) -> None:
        """Raise DatasetError if folder or place holds what is somebody else's, and in the way."""
        if not self.files.dataset_names:
            check_empty(self.files.folder)
        self.files.check_free(self._names)

    def _start_over(self) -> None:
        """Go on with a journal whose first line is damaged; only in a folder with nothing else in it."""
        if others := others_in(self.files.folder, self._names | self.files.dataset_names):
            raise DatasetError(
                f"{self._path}: is damaged, and the folder holds other files ({abridge(others)}); "
                f"move them elsewhere, or choose another DST"
            )
        if self.files.place != self.files.folder:
            self._check_free()
        warn(f"{self._path}: its first line is damaged; all shards are converted again")

    def _discard(self, names: frozenset[str]) -> None:
        """Remove the files of an unfinished conversion; its journal is replaced later."""
        # first: what a worker that outlives its parent writes gets no name
        remove_leftovers(self.files.folder, names)
        self.files.remove(names - {JOURNAL_NAME})

    def _take(self, lines: Iterator[dict[str, Any]], records: RecordFile) -> None:
        """Fill `finished` with the shards on record that are still whole; warn of the others."""
        lost: list[str] = []
        for line in lines:
            plan = self._plans[line["shard"]]
            shard = WrittenShard.from_json(line, plan, self._scan.samples, self._form)
            self.finished.pop(shard.entry.name, None)
            if problem := self._why_not_kept(shard):
                lost.append(problem)
                continue
            times = self._scan.samples.modified_ns[plan.rows]
            self.finished[shard.entry.name] = replace(shard, columns={**shard.columns, MODIFIED_NS: times})
        if records.damaged:
            warn(
                f"{self._path}: line {records.count + 1} is damaged or cut off; its shard and those "
                f"of the lines below are converted again"
            )
        if lost:
            warn(f"{lost[0]}; {quantity(len(lost), 'finished shard')} must be converted again")

    def _why_not_kept(self, shard: WrittenShard) -> str | None:
        """What is wrong with the shard's files, or which of its pictures changed; one phrase."""
        rows, columns = self._plans[shard.entry.name].rows, shard.columns
        for path in changed_pictures(self._scan, rows, columns[MODIFIED_NS], columns[SOURCE_CHECKSUMS]):
            return f"{path}: has changed since it was converted"
        return self.files.problem_of(shard)

    def _rewrite(self) -> RecordFile:
        """Replace the journal found by one of `finished`, open for more records."""
        with atomic_write(self._path) as file:
            records = RecordFile(file.fileno())
            records.append(self._header, durable=False)
            for shard in self.finished.values():
                records.append(shard.to_json(), durable=False)
        records = RecordFile(open_append(self._path))
        for _ in records.read():
            pass
        return records


class FilesInFolder:
    """The files of a conversion into a folder, or of an update of the dataset there.

    Attributes:
        folder: where the journal lies and shards are written.
        place: where the dataset will be: the same folder; or a URL, to which each shard is pushed.
        dataset_names: names of the files of the dataset that is updated.
    """

    def __init__(self, folder: Path, dataset_names: frozenset[str] = frozenset()) -> None:
        self.folder, self.dataset_names = folder, dataset_names
        self.place: Location = folder

    def check_free(self, names: frozenset[str]) -> None:
        """Raise DatasetError if what lies there is not ours, or in the way of files of these names."""
        names -= {JOURNAL_NAME} | (self.dataset_names & _REPLACED_BY_UPDATES)
        taken = sorted(name for name in names if os.path.lexists(self.folder / name))
        if self.dataset_names and taken:
            raise DatasetError(
                f"{self.folder}: holds files that are not part of the dataset, under names that the update "
                f"needs ({abridge(taken)}); move them elsewhere, then run the same command again"
            )

    def problem_of(self, shard: WrittenShard) -> str | None:
        """How the files of a shard differ from what was written, in one phrase; None if they do not."""
        return next(filter(None, (check_file(self.folder, file) for file in shard.entry.files)), None)

    def remove(self, names: frozenset[str]) -> None:
        """Remove those of these files that are there."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def check_whole(self, shards: Iterable[WrittenShard]) -> None:
        """Raise DatasetError unless the files of these shards are there, with their sizes."""
        files = (file for shard in shards for file in shard.entry.files)
        if problem := first_problem(self.folder, files):
            raise DatasetError(f"{problem}; {NOTHING_ELSE_MAY_WRITE}")


def check_empty(folder: Path) -> None:
    """Raise DatasetError if `folder` holds anything, unless that is a conversion of ours."""
    ours = any(os.path.lexists(folder / name) for name in (JOURNAL_NAME, MANIFEST_NAME))
    if folder.is_dir() and not ours and (others := others_in(folder, frozenset({JOURNAL_NAME}))):
        raise DatasetError(
            f"{folder}: is not empty, and not a folder that precache made ({abridge(others)}); "
            f"choose another DST, or empty it yourself"
        )


def own_names(header: Mapping[str, Any] | None) -> frozenset[str]:
    """The names of all files that the conversion, or the update, of this journal makes.

    Empty where there is no header, or one that no journal of this release begins with.
    """
    try:
        if header is None or header[_KEY] != _VERSION or not header["made_by"].keys():
            return frozenset()
        update, form = int(header["update"]), FORMATS[header["recipe"]["format"]]
        names = {JOURNAL_NAME, REJECTED_NAME, index_name(update), *([] if update else [MANIFEST_NAME])}
        for split, (first, count) in header["shards"].items():
            for number in range(first, first + min(count, _MAX_SHARDS)):
                names.update(file_names(shard_name(split, number), form))
    except (LookupError, TypeError, ValueError, AttributeError, SettingError):
        return frozenset()
    return frozenset(names)


def own_names_in(folder: Path) -> frozenset[str]:
    """As `own_names`, of the journal in `folder`."""
    return own_names(read_header(folder / JOURNAL_NAME))


def unfinished_names(folder: Path) -> frozenset[str]:
    """The names of the files that an unfinished update has left, or may have, in the dataset in `folder`."""
    header = read_header(folder / JOURNAL_NAME)
    return own_names(header) if header is not None and header.get("update") else frozenset()


def read_header(path: Path) -> dict[str, Any] | None:
    """The first record of the journal at `path`; None without one that is whole."""
    try:
        file = open_regular(path, getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    with file:
        return next(RecordFile(file.fileno()).read(), None)


def _header_of(target: Target, plan: ConvertPlan) -> dict[str, Any]:
    """The first record of the journal of this target and plan, as it is read again."""
    shards: dict[str, list[int]] = {}  # split -> number of the first, and how many
    for shard in plan.shards:
        shards.setdefault(shard.split, [shard.number, 0])[1] += 1
    as_read: dict[str, Any] = json.loads(json.dumps({_KEY: _VERSION, **asdict(target), "shards": shards}))
    return as_read


def recipe_differences(found: Mapping[str, Any], asked: Recipe) -> list[str]:
    """How `found`, a recipe as JSON, differs from the one that is asked for; one phrase each."""
    return [
        f"{name} {_in_words(found.get(name))}, asked for {_in_words(value)}"
        for name, value in asked.to_json().items()
        if found.get(name) != value
    ]


def _in_words(value: object) -> object:
    """A setting as it is typed: the one that is a list is a size, height and width."""
    return "x".join(map(str, reversed(value))) if isinstance(value, list) else value


def _open(path: Path) -> int:
    """A descriptor of the journal; DatasetError if it is a file of somebody else."""
    try:
        file = open_regular(path, getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot be read as the journal of a conversion ({os_reason(error)}); choose another "
            f"DST, or remove the file"
        ) from error
    with file:
        if may_be_records(os.pread(file.fileno(), PROBED_BYTES, 0), _KEY):
            return os.dup(file.fileno())
    raise _foreign(path)


def _foreign(path: Path) -> DatasetError:
    return DatasetError(
        f"{path}: not a journal that this release can read; choose another DST, or remove the file"
    )
