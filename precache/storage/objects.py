"""Objects of S3, Google Cloud Storage, Azure and web servers, by obstore (the `object_store` of Rust).

A request that may succeed if it is made again is made again, by obstore or by `precache.storage.retries`;
what cannot get better, a missing object or refused credentials, is an error at once.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from precache.errors import MissingDependencyError, SettingError, StorageError
from precache.packages import install_command
from precache.storage import crc32c_file, open_single
from precache.storage.retries import (
    FETCHES,
    IS_IT_WHOLE,
    REPLACED,
    Check,
    ObjectNotFoundError,
    Patience,
    WrongBytesError,
    check_length,
    fetch_right_bytes,
    in_words,
    is_of_storage,
    remedy,
    request_with_retries,
    unchecked,
)
from precache.storage.urls import Url

T = TypeVar("T")
PART_BYTES = 8 << 20
"""Of a download: so much is asked for at a time."""
_SINGLE_PUT_BYTES = 64 << 20  # what is larger goes up in parts
_AT_A_TIME = 8  # parts of one file
_CRC32C = "precachecrc32c"  # in an object's own metadata; Azure takes letters, digits and _, proxies no _
_DELETED_AT_A_TIME = 1000  # what S3 takes in one request
_MOST_RETRIES = 10_000
_user: int | None = None  # the process that uses the library


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object: its name relative to the store's URL, its size, and what changes with its content.

    Attributes:
        modified_ns: when it was written, by the storage's clock.
        version: its generation, by which Google Cloud Storage knows it where it is to be replaced.
        crc32c: what was kept beside it when it was put; None where nothing was, and in a list.
    """

    name: str
    bytes: int
    etag: str | None
    modified_ns: int = 0
    version: str | None = None
    crc32c: str | None = None


class ObjectStore:
    """The objects below a URL. Several threads may use one; another process opens its own.

    Every method raises StorageError, which names the URL and the reason, where the storage refuses, or does
    not answer in time.
    """

    def __init__(self, url: Url, patience: Patience | None = None) -> None:
        self.url = url
        self._patience = patience or Patience.of_environment()
        self._store = _open_store(url, self._patience)
        self._process = os.getpid()

    def find(self, name: str, check: Check = unchecked) -> ObjectInfo | None:
        """What is known of an object; None if there is none.

        Args:
            check: called now and then; what it raises ends the request.
        """

        def once() -> ObjectInfo:
            answer = self._obstore().get(self._store, name, options={"head": True})
            crc32c = answer.attributes.get(_CRC32C)
            return replace(_info(name, answer.meta), crc32c=None if crc32c is None else str(crc32c))

        try:
            return self._request(name, once, check)
        except ObjectNotFoundError:
            return None

    def get(self, name: str) -> bytes:
        """All of an object."""
        return self.get_with_info(name)[0]

    def get_with_info(self, name: str) -> tuple[bytes, ObjectInfo]:
        """All of an object, and what is known of this very one."""

        def once() -> tuple[bytes, ObjectInfo]:
            answer = self._obstore().get(self._store, name)
            content = answer.bytes().to_bytes()
            check_length(len(content), answer.meta["size"])
            return content, _info(name, answer.meta)

        return self._request(name, once)

    def get_range(
        self, name: str, start: int, count: int, etag: str | None = None, check: Check = unchecked
    ) -> bytes:
        """`count` bytes of an object from `start` on.

        Args:
            etag: of the object that is expected; another one is an error.
            check: called now and then; what it raises ends the request.
        """
        if count == 0:
            return b""
        options: dict[str, Any] = {"range": (start, start + count)}
        if etag is not None:
            options["if_match"] = etag

        def once() -> bytes:
            content = self._obstore().get(self._store, name, options=options).bytes().to_bytes()
            check_length(len(content), count)
            return content  # type: ignore[no-any-return]

        return self._request(name, once, check)

    def download(self, name: str, descriptor: int, file_bytes: int, check: Check = unchecked) -> None:
        """Write an object of `file_bytes` into the open file `descriptor`, several parts at a time.

        Args:
            check: called now and then, by several threads; what it raises ends the download.
        """
        left = threading.Event()

        def check_both() -> None:
            check()
            if left.is_set():
                raise StorageError(f"{self.url / name}: is no longer needed")

        fetch = partial(self._download_part, name, descriptor, file_bytes, check_both)
        starts = range(0, file_bytes, PART_BYTES)
        if len(starts) == 1:
            fetch(0)
            return
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            parts = [pool.submit(fetch, start) for start in starts[:_AT_A_TIME]]
            try:
                etags = {parts[0].result()}  # the object is as large as said: the others can be listed
                parts += [pool.submit(fetch, start) for start in starts[_AT_A_TIME:]]
                etags |= {part.result() for part in parts}
            finally:
                left.set()  # the other parts are not needed
                pool.shutdown(cancel_futures=True)
        if len(etags) > 1:
            raise StorageError(f"{self.url / name}: {REPLACED}; {remedy(REPLACED)}")

    def download_checked(
        self, name: str, path: Path, file_bytes: int, crc32c: str, check: Check = unchecked
    ) -> None:
        """Write an object into the file at `path`, durable, and compare it with its checksum.

        Raises:
            StorageError: as every method; or it came three times with other bytes.
        """

        def once() -> None:
            descriptor = open_single(path)
            try:
                self.download(name, descriptor, file_bytes, check)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if (found := crc32c_file(path)) != crc32c:
                raise WrongBytesError(
                    f"{self.url / name}: its checksum is {found}, expected {crc32c} (fetched {FETCHES} "
                    f"times); its bytes changed since it was written: put it there again"
                )

        fetch_right_bytes(once)

    def put(self, name: str, content: bytes, *, crc32c: str = "", check: Check = unchecked) -> str | None:
        """Write an object and return its etag; readers see the old one or all of the new one.

        Args:
            crc32c: kept beside it, for `find`.
            check: called now and then; what it raises ends the request.
        """
        once = partial(self._put, name, content, crc32c, use_multipart=False)
        return self._request(name, once, check).etag

    def put_if(
        self, name: str, content: bytes, there: ObjectInfo | None = None, check: Check = unchecked
    ) -> ObjectInfo | None:
        """As `put`, but only if the object is still the one found `there`; None: if there is none.

        Returns:
            The new one; None if another object is there: where an answer was lost, it may be this one.
        """
        mode: Any = "create"
        if there is not None:
            known = {"e_tag": there.etag, "version": there.version}
            mode = {name: value for name, value in known.items() if value is not None}

        def once() -> ObjectInfo | None:
            try:
                return self._put(name, content, use_multipart=False, mode=mode)
            except Exception as error:
                if type(error).__name__ in ("AlreadyExistsError", "PreconditionError", "NotFoundError"):
                    return None
                raise

        return self._request(name, once, check)

    def upload(self, path: Path, name: str, *, crc32c: str = "", check: Check = unchecked) -> str | None:
        """Write the file at `path` as an object, in parts if it is large; as `put`."""
        if path.stat().st_size <= _SINGLE_PUT_BYTES:
            return self.put(name, path.read_bytes(), crc32c=crc32c, check=check)

        def once() -> ObjectInfo:
            with open(path, "rb") as file:
                parts = {"chunk_size": 2 * PART_BYTES, "max_concurrency": 4}
                return self._put(name, file, crc32c, use_multipart=True, **parts)

        return self._request(name, once, check).etag

    def list(self) -> Sequence[ObjectInfo]:
        """All objects below the URL, sorted by name."""
        return self._listed(1000, None)

    def first(self, count: int) -> Sequence[ObjectInfo]:
        """Up to `count` of them: the storage is asked for no more than a page."""
        return self._listed(count, 1)

    def _listed(self, page_objects: int, pages: int | None) -> Sequence[ObjectInfo]:
        def once() -> "list[ObjectInfo]":
            found = self._obstore().list(self._store, chunk_size=page_objects)
            return [_info(one["path"], one) for page in islice(found, pages) for one in page]

        return sorted(self._request("", once), key=lambda one: one.name)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, many with one request where the storage can; a missing one is not an error."""

        def once(some: Sequence[str]) -> None:
            self._obstore().delete(self._store, [*some])

        for start in range(0, len(names), _DELETED_AT_A_TIME):
            some = names[start : start + _DELETED_AT_A_TIME]
            try:
                self._request(some[0], partial(once, some))
            except ObjectNotFoundError:
                for name in some:
                    with suppress(ObjectNotFoundError):
                        self._request(name, partial(once, [name]))

    def __reduce__(self) -> Any:
        return ObjectStore, (self.url, self._patience)

    def _put(self, name: str, content: Any, crc32c: str = "", **how: Any) -> ObjectInfo:
        attributes = {_CRC32C: crc32c} if crc32c else None
        done = self._obstore().put(self._store, name, content, attributes=attributes, **how)
        return ObjectInfo(name, 0, done["e_tag"], version=done["version"])

    def _request(self, name: str, once: Callable[[], T], check: Check = unchecked) -> T:
        return request_with_retries(self.url / name, self._patience, once, check)

    def _obstore(self) -> Any:
        if os.getpid() != self._process:  # its threads did not come along
            raise StorageError(f"{self.url}: was opened in another process; open it in the one that uses it")
        return _library()

    def _download_part(
        self, name: str, descriptor: int, file_bytes: int, check: Check, start: int
    ) -> str | None:
        """Write what begins at `start`; the object's etag."""
        count = min(PART_BYTES, file_bytes - start)

        def once() -> tuple[memoryview, str | None]:
            options = {"range": (start, start + count)}
            answer = self._obstore().get(self._store, name, options=options)
            if answer.meta["size"] != file_bytes:
                raise StorageError(
                    f"{self.url / name}: expected {file_bytes:,} bytes, got {answer.meta['size']:,}; "
                    f"{IS_IT_WHOLE}"
                )
            content = memoryview(answer.bytes())
            check_length(len(content), count)
            return content, answer.meta["e_tag"]

        content, etag = self._request(name, once, check)
        while content:
            written = os.pwrite(descriptor, content, start)
            content, start = content[written:], start + written
        return etag


def _info(name: str, meta: Any) -> ObjectInfo:
    modified_ns = int(meta["last_modified"].timestamp()) * 10**9 + meta["last_modified"].microsecond * 1000
    return ObjectInfo(name, meta["size"], meta["e_tag"], modified_ns, meta["version"])


def _open_store(url: Url, patience: Patience) -> Any:
    """The library's store of the objects below `url`.

    Raises:
        SettingError: there can be none.
        StorageError: another process has used the library, and this one is a fork of it.
    """
    global _user
    obstore = _library()
    if _user not in (None, os.getpid()):  # a fork has none of its threads, and would wait for them forever
        raise StorageError(
            f"{url}: cannot be read by a process that was forked from one that has read URLs; start workers "
            f"with multiprocessing_context='forkserver'"
        )
    _user = os.getpid()
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=patience.connect_s),
        "read_timeout": timedelta(seconds=patience.stall_s),
        "timeout": timedelta(seconds=max(patience.stall_s, patience.total_s)),
    }
    if url.scheme == "http" or endpoint_of(url.scheme).startswith("http://"):
        client["allow_http"] = True
    # until patience ends, however often that is; see `precache.storage.retries` for what it does not repeat
    retry = {"max_retries": _MOST_RETRIES, "retry_timeout": timedelta(seconds=patience.total_s)}
    try:
        return _make_store(obstore.store, url, {"client_options": client, "retry_config": retry})
    except Exception as error:
        if not (isinstance(error, ValueError) or is_of_storage(error)):
            raise
        raise SettingError(f"{url}: cannot be opened ({in_words(error)}); {remedy('')}") from error


def _make_store(stores: Any, url: Url, how: dict[str, Any]) -> Any:
    """By its parts, as they are: a URL would be unquoted, and `az://` has no account for obstore."""
    *_, account, bucket = url.root.split("/")
    prefix = url.key or None
    if url.scheme == "s3":
        return stores.S3Store(bucket, prefix=prefix, **_s3_settings(), **how)
    if url.scheme == "gs":
        return stores.GCSStore(bucket, prefix=prefix, **how)
    if url.scheme == "az":
        return stores.AzureStore(bucket, account_name=account, prefix=prefix, **how)
    return stores.HTTPStore.from_url(str(url), **how)


def endpoint_of(scheme: str) -> str:
    """What the environment says in place of the provider's own address; empty if it says nothing."""
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("GOOGLE_BASE_URL",),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }
    return next((os.environ[name] for name in names.get(scheme, ()) if os.environ.get(name)), "")


def _s3_settings() -> dict[str, Any]:
    """Credentials that object_store does not find by itself: those of AWS profiles."""
    given: dict[str, Any] = {}
    if endpoint := endpoint_of("s3"):
        given["endpoint"] = endpoint
    folder = Path("~/.aws").expanduser()
    has_profile = "AWS_PROFILE" in os.environ or any(
        (folder / name).exists() for name in ("credentials", "config")
    )
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_SKIP_SIGNATURE" in os.environ or not has_profile:
        return given
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise MissingDependencyError(
            f"credentials of AWS profiles need the package boto3; install it with: {install_command('cloud')}"
        ) from error
    return {**given, "credential_provider": Boto3CredentialProvider()}


def _library() -> Any:
    """The package obstore; MissingDependencyError if it is not installed."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise MissingDependencyError(
            f"URLs need the package obstore; install it with: {install_command('cloud')}"
        ) from error
    return obstore
