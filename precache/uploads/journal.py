"""Which shards of an unfinished conversion into a URL are done; see `precache.uploads`."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from precache.console.notices import counted, some, warn
from precache.conversion.finished import FinishedShard, decode
from precache.conversion.journal_header import Target, header_of, is_of_this_release, own_names
from precache.errors import DatasetError, MissingDependencyError, SettingError, StorageError
from precache.formats import FORMATS
from precache.journal import how_much_is_kept
from precache.manifest import MANIFEST_NAME
from precache.plan import ConvertPlan
from precache.sources.base import Scan
from precache.sources.source_state import changed_pictures
from precache.storage import crc32c_file, staging
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.retries import ObjectNotFoundError
from precache.storage.urls import Url
from precache.uploads import multipart
from precache.uploads.lock import LOCK_NAME, UrlLock
from precache.uploads.publish import (
    HEADER_NAME,
    JOURNAL,
    check_whole,
    decode_record,
    digest_of,
    encode_record,
    why_not_whole,
)

_AT_A_TIME = 16
_PROBED = 20


class UrlJournal:
    """As `precache.journal.Journal`, of a conversion into `folder`, a URL that is locked.

    Workers record what they finish; `record` hears of it.

    Raises:
        DatasetError: the URL holds something else, or an unfinished conversion of another target.
        StorageError: the storage does not answer.
    """

    def __init__(
        self,
        lock: UrlLock,
        url: Url,
        target: Target,
        plan: ConvertPlan,
        scan: Scan,
        *,
        overwrite: bool = False,
    ) -> None:
        self.folder = url
        self.finished: dict[str, FinishedShard] = {}
        self.continued = False
        self.store = ObjectStore(url)
        self._lock, self._scan = lock, scan
        self._form = FORMATS[plan.recipe.format]
        self._plans = {shard.name: shard for shard in plan.shards}
        header = header_of(target, plan)
        self.digest = digest_of(json.loads(json.dumps(header)))
        found = read_header(self.store)
        if found is not None:
            self.continued = True
            if overwrite and target.differences(found):
                self._discard(found)
            else:
                target.check_same(url, found)
                self._take()
        self.store.put(HEADER_NAME, encode_record(header))

    def record(self, shard: FinishedShard) -> None:
        """Note that `shard` is finished, which its worker has put on record."""
        self._lock.check()
        self.finished[shard.entry.name] = shard

    def kept(self) -> str:
        """For `tells`: how much of the work is on record."""
        return how_much_is_kept(self._plans, self.finished)

    def publish(self, folder: Path) -> None:
        """Upload what `commit` wrote into `folder`, if all shards are as they were: the manifest last."""
        check_whole(self.store, self.finished.values())
        names = sorted(path.name for path in folder.iterdir())
        for name in sorted(names, key=lambda name: name == MANIFEST_NAME):
            self._lock.check()
            self.store.upload(folder / name, name, crc32c=crc32c_file(folder / name))

    def remove(self) -> None:
        """Delete the journal, and what of uploads was never finished: the manifest is written."""
        remove_journal(self.store)
        if self.continued:
            try:
                names = {file.name for shard in self.finished.values() for file in shard.entry.files}
                multipart.abort(self.folder, multipart.unfinished(self.folder, names))
            except (StorageError, MissingDependencyError) as error:
                warn(f"{error}; 'precache clean {self.folder}' tries again")

    def _discard(self, header: dict[str, Any]) -> None:
        """Remove the objects of an unfinished conversion, the header of its journal last."""
        names = own_names(header)
        there = [info.name for info in self.store.list()]
        delete_own(self.store, [name for name in there if name in names or is_own(name)])

    def _take(self) -> None:
        """Fill `finished` with what is on record, as far as it is to be believed; say what is not."""
        objects = {info.name: info for info in self.store.list()}
        own = f"{JOURNAL}/{self.digest}/"
        names = [name for name in objects if name.startswith(own)]
        lost: list[str] = []
        for name, raw in zip(names, _got(self.store, names), strict=True):
            record = None if raw is None else decode_record(raw)
            shard = record and decode(record, self._plans, self._scan.samples, self._form)
            if not shard or name != f"{own}{shard.entry.name}.json":
                lost.append(f"{self.folder / name}: is damaged")
            elif problem := self._why_not_kept(shard, objects):
                lost.append(problem)
            else:
                rows = self._plans[shard.entry.name].rows
                now = replace(shard, source_modified_ns=self._scan.samples.modified_ns[rows])
                self.finished[shard.entry.name] = now
        if lost:
            warn(f"{lost[0]}; {counted(len(lost), 'finished shard')} must be converted again")

    def _why_not_kept(self, shard: FinishedShard, objects: dict[str, ObjectInfo]) -> str | None:
        rows = self._plans[shard.entry.name].rows
        for path in changed_pictures(self._scan, rows, shard.source_modified_ns, shard.source_checksums):
            return f"{path}: has changed since it was converted"
        return why_not_whole(self.store, shard, objects)


def read_header(store: ObjectStore) -> dict[str, Any] | None:
    """The header of the journal at a URL; None if there is none.

    Raises:
        DatasetError: it is none that this release can read.
    """
    try:
        header = decode_record(store.get(HEADER_NAME))
    except ObjectNotFoundError:
        return None
    if header is None or not is_of_this_release(header):
        raise DatasetError(
            f"{store.url / HEADER_NAME}: not a journal that this release can read; choose another DST, or "
            f"remove the object"
        )
    return header


def check_free(url: Url) -> None:
    """Raise DatasetError if there is something below `url`, unless that is a conversion of ours."""
    store = ObjectStore(url)
    ours = (MANIFEST_NAME, HEADER_NAME)
    others = [info.name for info in store.first(_PROBED) if info.name != LOCK_NAME]
    if others and all(store.find(name) is None for name in ours):
        raise DatasetError(
            f"{url}: is not empty, and not a dataset that precache made ({some(others)}); choose another DST"
        )


def refuse_change(url: Url, *, overwrite: bool, update: bool) -> None:
    """Raise SettingError if a finished dataset is to be changed: objects cannot change places in one step."""
    if overwrite:
        raise SettingError(
            f"{url}: holds a finished dataset, which --overwrite cannot replace in one step, as it does "
            f"a folder; choose another URL, or remove that one yourself"
        )
    if update:
        raise SettingError(
            f"{url}: --update works on a folder; fetch the dataset with 'precache pull {url} DIR', update "
            f"DIR, and bring it back with 'precache push DIR {url}'"
        )


def tidy(url: Url, target: Target) -> None:
    """Remove the journal that a conversion to `target` has left in the finished dataset at `url`."""
    store = ObjectStore(url)
    header = read_header(store)
    if header is not None and not target.differences(header):
        remove_journal(store)


@contextmanager
def room() -> Iterator[Path]:
    """A new folder for what ends a conversion, in the staging folder; what dead workers left there goes."""
    folder = Path(tempfile.mkdtemp(dir=staging.folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        staging.sweep()


def remove_journal(store: ObjectStore) -> None:
    """Delete it."""
    delete_own(store, [info.name for info in store.list(JOURNAL) if is_own(info.name)])


def delete_own(store: ObjectStore, names: Sequence[str]) -> None:
    """Delete these objects; the header of the journal last, for without it nobody knows what is ours."""
    store.delete([name for name in names if name != HEADER_NAME])
    store.delete([name for name in names if name == HEADER_NAME])


def is_own(name: str) -> bool:
    """Whether this is the name of an object of a journal."""
    if name == HEADER_NAME:
        return True
    parts = name.split("/")
    return len(parts) == 3 and parts[0] == JOURNAL and len(parts[1]) == 16 and parts[2].endswith(".json")


def _got(store: ObjectStore, names: Sequence[str]) -> Iterator[bytes | None]:
    """What the objects hold, several at a time; None of one that is gone."""

    def get(name: str) -> bytes | None:
        try:
            return store.get(name)
        except ObjectNotFoundError:
            return None

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        yield from pool.map(get, names)
