"""What a scan of a tree has found so far, on disk beside the destination: a scan that is killed goes on.

    .NAME.precache-scan    beside DST, or in it where it is a mount point, like the lock file

Its records (see `precache.storage.records`) are the settings of the scan, then a class folder each: its
state, and the names, sizes and times of its pictures. It is written once a scan has taken 10 seconds, and
removed when the scan is done. A process that scans has it locked; another scans without.

A folder on record is not listed again if it is what it was: its number, and when it was last written and
changed. That holds for the names; a picture that was rewritten in its place does not change its folder. So
what is kept serves conversions alone that read every picture: each must have the size and the time that the
scan says, or the conversion ends and names it. Folders with links, or with files whose kind their content
says, are always listed again.
"""

import base64
import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from precache.conversion.lock import LOCK_SUFFIX, lock_path
from precache.sources.walk import ClassFolder, LeftOut, Listed, list_folder, list_folders, packed, state_of
from precache.storage import open_append, open_regular
from precache.storage.records import PROBED_BYTES, RecordFile, may_be_records

SUFFIX = ".precache-scan"
_KEY = "scan"
_WORTH_S = 10.0  # a scan that takes less is rather done again
_MOST_BYTES = 64 << 20  # of one folder's names: with more it would be too long a record


def kept_path(destination: Path) -> Path:
    """Where what a scan for `destination` has found is kept."""
    lock = lock_path(destination)
    return lock.with_name(lock.name.removesuffix(LOCK_SUFFIX) + SUFFIX)


def is_left(path: Path) -> bool:
    """Whether this is what a scan that was killed has kept; not of one that goes on."""
    import fcntl

    try:
        descriptor = open_regular(path, getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return may_be_records(os.pread(descriptor, PROBED_BYTES, 0), _KEY)
    except OSError:  # another process has it
        return False
    finally:
        os.close(descriptor)


class KeptScan:
    """The class folders that an unfinished scan has found, and those that this one finds.

    Attributes:
        recalled: how many folders were not listed again.
    """

    def __init__(self, path: Path, root: Path, class_depth: int) -> None:
        self.recalled = 0
        self._path = path
        self._header = {_KEY: 1, "root": os.path.realpath(root), "class_depth": class_depth}
        self._start_s = time.monotonic()
        self._waiting: list[dict[str, Any]] = []  # until they are worth a file
        self._known: dict[str, dict[str, Any]] = {}
        self._records: RecordFile | None = None
        self._given_up = False
        self._open()

    def list_folders(self, asked: Sequence[ClassFolder], workers: int) -> Generator[Listed, None, None]:
        """As `walk.list_folders`, but that folders on record are not listed where they are as they were."""
        on_record = [folder for folder in asked if folder.path in self._known]
        states = {folder.path: [*state_of(folder.folder)] for folder in on_record}
        as_they_were = {path for path, state in states.items() if self._known[path].get("state") == state}
        others = [folder for folder in asked if folder.path not in as_they_were]
        with closing(list_folders(others, workers)) as rest:
            for folder in asked:
                if folder.path in as_they_were:
                    listed = _decode(self._known.pop(folder.path))
                    self.recalled += listed is not None
                    yield list_folder(folder) if listed is None else listed
                else:
                    listed = next(rest)
                    self._note(folder, listed)
                    yield listed

    def done(self) -> None:
        """Remove what is kept: the scan is at its end."""
        if self._records is not None:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._records is not None:
            self._records.close()

    def _note(self, folder: ClassFolder, listed: Listed) -> None:
        if self._given_up or not listed.lasting or len(listed.hashed) > _MOST_BYTES:
            return
        self._waiting.append(_encode(folder, listed))
        if self._records is None and time.monotonic() - self._start_s < _WORTH_S:
            return
        try:
            if self._records is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._open(os.O_CREAT)
            if self._records is not None:  # else another process has it
                for record in self._waiting:
                    self._records.append(record, durable=False)
        except OSError:  # the disk is full, or is not to be written to: the conversion will say so
            self._given_up = True
        self._waiting.clear()

    def _open(self, flags: int = 0) -> None:
        """Take the file, and what it holds of a scan like this one; give up if it is not to be had."""
        import fcntl  # no Windows has it, and none can convert

        try:
            descriptor = open_append(self._path, flags)
        except FileNotFoundError:
            return
        except OSError:  # a link, a folder or something else: not ours
            self._given_up = True
            return
        records = RecordFile(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not may_be_records(os.pread(descriptor, PROBED_BYTES, 0), _KEY):
                raise OSError
            found = records.read()
            if next(found, None) == self._header:
                self._known = {record["folder"]: record for record in found if "folder" in record}
            else:
                records.clear()
                records.append(self._header, durable=False)
        except OSError:  # another process has it, or it is somebody else's
            records.close()
            self._given_up = True
            return
        self._records = records


@contextmanager
def keep_scan(path: Path, root: Path, class_depth: int) -> Iterator[KeptScan]:
    """A `KeptScan` whose file is removed if the block ends well, and else stays."""
    with closing(KeptScan(path, root, class_depth)) as kept:
        yield kept
        kept.done()


def _encode(folder: ClassFolder, listed: Listed) -> dict[str, Any]:
    return {
        "folder": folder.path,
        "state": listed.state,
        "pictures": base64.b64encode(listed.hashed).decode("ascii"),
        "modified_ns": base64.b64encode(listed.modified_ns.astype("<i8").tobytes()).decode("ascii"),
        "left_out": [(left_out.path, left_out.reason, left_out.missed) for left_out in listed.left_out],
    }


def _decode(record: dict[str, Any]) -> Listed | None:
    """What `_encode` was given; None if it is nothing of the kind."""
    try:
        hashed = base64.b64decode(record["pictures"], validate=True)
        modified_ns = np.frombuffer(base64.b64decode(record["modified_ns"], validate=True), "<i8")
        left_out = tuple(LeftOut(*fields) for fields in record["left_out"])
        device, number, written_ns, changed_ns = record["state"]
        state = (device, number, written_ns, changed_ns)
        listed = packed(state, [hashed], modified_ns.astype(np.int64), left_out, lasting=True)
        return listed if len(listed) == len(modified_ns) else None
    except (LookupError, TypeError, ValueError):
        return None
