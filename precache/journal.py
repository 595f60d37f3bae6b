"""`journal.jsonl`: which shards of an unfinished conversion are done.

The first record (see `precache.storage.records`) says what is being made, and of how many shards; each
further one is a finished shard with its checksums. A folder with a journal is an unfinished conversion of
ours; the same command continues it. What does not fit the plan is not believed.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from precache.console.notices import counted, some, warn
from precache.conversion.finished import FinishedShard, decode, encode
from precache.conversion.journal_header import (
    JOURNAL_NAME,
    KEY,
    REWRITTEN,
    Target,
    header_of,
    is_of_this_release,
    own_names,
)
from precache.conversion.lock import LOCK_SUFFIX, is_mount_point
from precache.dataset.files import check_file, first_problem
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.manifest import MANIFEST_NAME
from precache.plan import ConvertPlan, ShardPlan
from precache.sources.base import Scan
from precache.sources.source_state import changed_pictures
from precache.storage import (
    atomic_write,
    fsync_folder,
    is_leftover,
    open_append,
    open_regular,
    remove_leftovers,
)
from precache.storage.records import PROBED_BYTES, RecordFile, may_be_records


class Journal:
    """The journal of the conversion in `folder`, open for writing.

    Opening it starts a conversion in an empty or missing folder, or continues an unfinished one:
    then `finished` holds the shards that fit the plan and whose files are intact. With `overwrite`, an
    unfinished conversion of another target is removed: the files that its journal lists, no others. An update
    goes on in the folder of the dataset, whose files have the names `base`; an unfinished one of another
    source is removed likewise.

    Attributes:
        digest: none; a journal at a URL has one.

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
        overwrite: bool = False,
        base: frozenset[str] = frozenset(),
    ) -> None:
        self.folder = folder
        self.digest = ""
        self._base = base
        self.finished: dict[str, FinishedShard] = {}
        self._path = folder / JOURNAL_NAME
        self._header = header_of(target, plan)
        self._names = own_names(self._header)
        self._plans = {shard.name: shard for shard in plan.shards}
        self._scan = scan
        self._form = FORMATS[plan.recipe.format]
        _make_folder(folder)
        if os.path.lexists(self._path):
            with closing(RecordFile(_open(self._path))) as records:
                self._continue(records, target, overwrite)
        else:
            self._check_free()
        remove_leftovers(folder, self._names | REWRITTEN)
        self._records = self._rewrite()

    def record(self, shard: FinishedShard) -> None:
        """Note that `shard` is finished; durable when this returns."""
        self._records.append(encode(shard))
        self.finished[shard.entry.name] = shard

    def kept(self) -> str:
        """For `tells`: how much of the work is on record."""
        return how_much_is_kept(self._plans, self.finished)

    def check_whole(self) -> None:
        """Raise DatasetError unless the files of all finished shards are there, with their sizes."""
        files = (file for shard in self.finished.values() for file in shard.entry.files)
        if problem := first_problem(self.folder, files):
            raise DatasetError(
                f"{problem}; nothing else may write there during a conversion: run the same command again"
            )

    def remove(self) -> None:
        """Delete the journal: the manifest is written."""
        remove_leftovers(self.folder, self._names | REWRITTEN)  # of workers that died
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
        """Take over what the journal found lists; or remove it, if it is of another target."""
        lines = records.read()
        header = next(lines, None)
        if header is None:
            self._begin_again()
        elif not is_of_this_release(header):
            raise _foreign(self._path)
        elif overwrite and target.differences(header):
            _discard(self.folder, own_names(header))
        elif self._base and header.get("update", 0) and header != json.loads(json.dumps(self._header)):
            warn(f"{self.folder}: an unfinished update of another state of the source is dropped")
            _discard(self.folder, own_names(header) - self._base)
            self._check_free()
        else:
            target.check_same(self.folder, header)
            self._take(lines, records)

    def _check_free(self) -> None:
        """Raise DatasetError if the folder holds what is somebody else's, and in the way."""
        if not self._base:
            check_empty(self.folder)
            return
        names = self._names - {JOURNAL_NAME} - (self._base & REWRITTEN)
        if taken := sorted(name for name in names if os.path.lexists(self.folder / name)):
            raise DatasetError(
                f"{self.folder}: holds files that are not part of the dataset, under names that the update "
                f"needs ({some(taken)}); move them elsewhere, then run the same command again"
            )

    def _begin_again(self) -> None:
        """Believe nothing of a journal whose first line is damaged; in a folder with nothing else in it."""
        if others := _others(self.folder, self._names | self._base):
            raise DatasetError(
                f"{self._path}: is damaged, and the folder holds other files ({some(others)}); "
                f"move them elsewhere, or choose another DST"
            )
        warn(f"{self._path}: its first line is damaged; all shards are converted again")

    def _take(self, lines: Iterator[dict[str, Any]], records: RecordFile) -> None:
        """Fill `finished` with what the journal lists, as far as it is to be believed; say what is not."""
        lost: list[str] = []
        for line in lines:
            shard = decode(line, self._plans, self._scan.samples, self._form)
            if shard is None:
                records.damaged = True
                records.count -= 1
                break
            self.finished.pop(shard.entry.name, None)
            if problem := self._why_not_kept(shard):
                lost.append(problem)
                continue
            rows = self._plans[shard.entry.name].rows
            now = replace(shard, source_modified_ns=self._scan.samples.modified_ns[rows])
            self.finished[shard.entry.name] = now
        if records.damaged:
            warn(
                f"{self._path}: line {records.count + 1} is damaged or cut off; its shard and those "
                f"of the lines below are converted again"
            )
        if lost:
            warn(f"{lost[0]}; {counted(len(lost), 'finished shard')} must be converted again")

    def _why_not_kept(self, shard: FinishedShard) -> str | None:
        """What is wrong with the shard's files, or which of its pictures is another now; one phrase."""
        rows = self._plans[shard.entry.name].rows
        for path in changed_pictures(self._scan, rows, shard.source_modified_ns, shard.source_checksums):
            return f"{path}: has changed since it was converted"
        return next(filter(None, (check_file(self.folder, file) for file in shard.entry.files)), None)

    def _rewrite(self) -> RecordFile:
        """A journal of what is believed, in the place of the one found; open for more."""
        with atomic_write(self._path) as file:
            records = RecordFile(file.fileno())
            records.append(self._header, durable=False)
            for shard in self.finished.values():
                records.append(encode(shard), durable=False)
        records = RecordFile(open_append(self._path))
        for _ in records.read():
            pass
        return records


def how_much_is_kept(plans: Mapping[str, ShardPlan], finished: Iterable[str]) -> str:
    """What is said of a conversion that is interrupted once the shards `finished` are on record."""
    done = sum(len(plans[name].rows) for name in finished)
    if not done:
        return "before the first shard was finished; nothing is kept, and the same command starts again"
    of = counted(sum(len(shard.rows) for shard in plans.values()), "picture")
    return f"after {done:,} of {of} were finished; these are kept, and the same command goes on from there"


def check_empty(folder: Path) -> None:
    """Raise DatasetError if `folder` holds anything, unless that is a conversion of ours."""
    ours = any(os.path.lexists(folder / name) for name in (JOURNAL_NAME, MANIFEST_NAME))
    if folder.is_dir() and not ours and (others := _others(folder, {JOURNAL_NAME})):
        raise DatasetError(
            f"{folder}: is not empty, and not a folder that precache made ({some(others)}); "
            f"choose another DST, or empty it yourself"
        )


def _discard(folder: Path, names: frozenset[str]) -> None:
    """Remove the files of an unfinished conversion, but not its journal: that one is replaced."""
    remove_leftovers(folder, names)  # first: what a worker that outlives its parent writes gets no name
    for name in names - {JOURNAL_NAME}:
        (folder / name).unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        fsync_folder(folder.parent)


def _open(path: Path) -> int:
    """A descriptor of the journal; DatasetError if it is a file of somebody else."""
    try:
        descriptor = open_regular(path, getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot be read as the journal of a conversion ({error.strerror}); choose another DST, "
            f"or remove the file"
        ) from error
    if may_be_records(os.pread(descriptor, PROBED_BYTES, 0), KEY):
        return descriptor
    os.close(descriptor)
    raise _foreign(path)


def _foreign(path: Path) -> DatasetError:
    return DatasetError(
        f"{path}: not a journal that this release can read; choose another DST, or remove the file"
    )


def _others(folder: Path, names: set[str] | frozenset[str]) -> list[str]:
    """What the folder holds that is neither of `names` nor left of writing one of them."""
    allowed = {LOCK_SUFFIX, "lost+found"} if is_mount_point(folder) else set()
    found = (path for path in folder.iterdir() if path.name not in names | allowed)
    return sorted(path.name for path in found if not is_leftover(path, names))
