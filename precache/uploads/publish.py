"""A finished shard goes up: its files, then the record that they are there; and the end of a conversion."""

import hashlib
import json
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from precache.conversion.finished import FinishedShard, encode
from precache.errors import DatasetError, WorkerError
from precache.storage import crc32c
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.output import OutputFile
from precache.storage.urls import Url

JOURNAL = "journal"
HEADER_NAME = f"{JOURNAL}/header.json"


@lru_cache(4)
def _store(url: Url) -> ObjectStore:
    """One for each process: its connections are used again."""
    return ObjectStore(url)


def record_name(digest: str, shard: str) -> str:
    """Name of the object that says that the shard is finished; `digest` is of the journal's header."""
    return f"{JOURNAL}/{digest}/{shard}.json"


def digest_of(header: dict[str, Any]) -> str:
    """What tells the conversion of this header from others."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]


def encode_record(content: dict[str, Any]) -> bytes:
    """A record as the content of an object, with a checksum."""
    body = json.dumps(content).encode()
    return body[:-1] + b', "checksum": "%s"}\n' % crc32c(body).encode()


def decode_record(raw: bytes) -> dict[str, Any] | None:
    """What `encode_record` was given; None if it is not as it was."""
    body, comma, rest = raw.rpartition(b', "checksum": "')
    if not comma or rest != b'%s"}\n' % crc32c(body + b"}").encode():
        return None
    content = json.loads(body + b"}")
    return content if isinstance(content, dict) else None


def upload_shard(url: Url, digest: str, files: Sequence[OutputFile], shard: FinishedShard) -> FinishedShard:
    """Upload the written files of a shard, of one without samples none, and record it; with their etags.

    Raises:
        StorageError: the storage does not take them. The files are gone then, too.
    """
    store = _store(url)
    try:
        kept = files if shard.entry.samples else ()
        etags = tuple(store.upload(file.temporary, file.path.name, crc32c=file.crc32c) or "" for file in kept)
    finally:
        for file in files:
            file.temporary.unlink(missing_ok=True)
    shard = replace(shard, etags=etags)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # another run may have ended the journal already
        raise WorkerError(f"{url}: the conversion that this process worked for is gone")
    store.put(record_name(digest, shard.entry.name), encode_record(encode(shard)))
    return shard


def why_not_whole(store: ObjectStore, shard: FinishedShard, objects: Mapping[str, ObjectInfo]) -> str | None:
    """What is wrong with the shard's objects, where `objects` are those listed, in one line; or None."""
    for file, etag in zip(shard.entry.files, shard.etags, strict=True):
        found = objects.get(file.name)
        if found is not None and _unquoted(found.etag) != _unquoted(etag):
            found = store.find(file.name)  # some storages list etags in another form
        if found is None:
            return f"{store.url / file.name}: missing"
        if found.bytes != file.bytes:
            return f"{store.url / file.name}: expected {file.bytes:,} bytes, got {found.bytes:,}"
        if _unquoted(found.etag) != _unquoted(etag):
            return f"{store.url / file.name}: is another object than was uploaded"
    return None


def check_whole(store: ObjectStore, shards: Iterable[FinishedShard]) -> None:
    """Raise DatasetError unless the storage holds what was uploaded."""
    objects = {info.name: info for info in store.list()}
    for shard in shards:
        if problem := why_not_whole(store, shard, objects):
            raise DatasetError(
                f"{problem}; nothing else may write there during a conversion: run the same command again"
            )


def _unquoted(etag: str | None) -> str:
    return (etag or "").strip('"')
