"""Objects of S3, Google Cloud Storage, Azure and web servers, by obstore (the `object_store` of Rust).

A request that may succeed at another try is repeated, by obstore or by `precache.storage.retries`; one that
cannot, as for a missing object or with refused credentials, is an error at once.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from precache.errors import MissingDependencyError, SettingError, StorageError
from precache.packages import install_command
from precache.storage import crc32c_file, open_single
from precache.storage.retries import (
    CHECK_UPLOAD,
    FETCHES,
    REPLACED,
    Check,
    ObjectNotFoundError,
    WrongBytesError,
    call_for_each,
    check_length,
    describe_error,
    fetch_right_bytes,
    is_of_storage,
    no_check,
    remedy_for,
    request_with_retries,
    storage_patience_s,
)
from precache.storage.urls import Url

T = TypeVar("T")
PART_BYTES = 8 << 20
"""Bytes that one request of a download fetches."""
_SINGLE_PUT_BYTES = 64 << 20  # larger objects are uploaded in parts
_PARTS_AT_A_TIME = 8
_CRC32C = "precachecrc32c"  # key of an object's metadata: Azure allows letters, digits and _, proxies no _
_OBJECTS_PER_PAGE = 1000  # limit of S3
_MAX_RETRIES = 10_000
_CONNECT_S, _STALL_S = 10.0, 20.0  # longest waits for a connection, and for the next bytes of an answer
_library_process: int | None = None  # the process that has first used obstore


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Metadata of an object.

    Attributes:
        name: name relative to the store's URL.
        bytes: size in bytes.
        etag: tag that changes with the content.
        version: generation, by which Google Cloud Storage identifies an object that is to be replaced.
        crc32c: checksum that was stored as metadata when the object was put; None if there is none, and in
            the result of a list.
    """

    name: str
    bytes: int
    etag: str | None
    version: str | None = None
    crc32c: str | None = None


class ObjectStore:
    """Objects below a URL. Several threads may use one; another process has to open its own.

    Every method raises StorageError, which names the URL and the reason, if the storage refuses, or does not
    answer in time. The argument `check` of many is called repeatedly during a request, by other threads, too;
    if it raises, the request ends with that error.
    """

    def __init__(self, url: Url, patience_s: float | None = None) -> None:
        self.url = url
        self._patience_s = patience_s or storage_patience_s()
        self._store = _open_store(url, self._patience_s)

    def find(self, name: str, check: Check = no_check) -> ObjectInfo | None:
        """Get the metadata of an object; None if there is no such object."""

        def request() -> ObjectInfo:
            answer = _library(self.url).get(self._store, name, options={"head": True})
            crc32c = answer.attributes.get(_CRC32C)
            return replace(_info(name, answer.meta), crc32c=None if crc32c is None else str(crc32c))

        try:
            return self._request(name, request, check)
        except ObjectNotFoundError:
            return None

    def get(self, name: str) -> bytes:
        """Get the content of an object."""
        return self.get_with_info(name)[0]

    def get_with_info(self, name: str) -> tuple[bytes, ObjectInfo]:
        """Get the content of an object, and its metadata from the same answer."""

        def request() -> tuple[bytes, ObjectInfo]:
            answer = _library(self.url).get(self._store, name)
            content = answer.bytes().to_bytes()
            check_length(len(content), answer.meta["size"])
            return content, _info(name, answer.meta)

        return self._request(name, request)

    def get_range(
        self, name: str, start: int, count: int, etag: str | None = None, check: Check = no_check
    ) -> bytes:
        """Get `count` bytes of an object from `start` on; StorageError if it has another etag than `etag`."""
        if count == 0:
            return b""
        options: dict[str, Any] = {"range": (start, start + count)}
        if etag is not None:
            options["if_match"] = etag

        def request() -> bytes:
            content = _library(self.url).get(self._store, name, options=options).bytes().to_bytes()
            check_length(len(content), count)
            return content  # type: ignore[no-any-return]

        return self._request(name, request, check)

    def download(self, name: str, descriptor: int, file_bytes: int, check: Check = no_check) -> None:
        """Write an object of `file_bytes` into the open file `descriptor`, several parts at a time."""
        fetch = partial(self._download_part, name, descriptor, file_bytes)
        etags = set(call_for_each(fetch, range(0, file_bytes, PART_BYTES), _PARTS_AT_A_TIME, check))
        if len(etags) > 1:
            raise StorageError(REPLACED, path=self.url / name, remedy=remedy_for(REPLACED))

    def download_checked(
        self, name: str, path: Path, file_bytes: int, crc32c: str, check: Check = no_check
    ) -> None:
        """Write an object into the file at `path`, durable, and compare it with its checksum.

        Raises:
            StorageError: as every method; or the object had wrong bytes three times.
        """

        def fetch() -> None:
            descriptor = open_single(path)
            try:
                self.download(name, descriptor, file_bytes, check)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            file_crc32c = crc32c_file(path)
            if file_crc32c != crc32c:
                raise WrongBytesError(
                    f"its checksum is {file_crc32c}, expected {crc32c} (fetched {FETCHES} times)",
                    path=self.url / name,
                    remedy="its bytes changed since it was written: put it there again",
                )

        fetch_right_bytes(fetch)

    def put(self, name: str, content: bytes, *, crc32c: str = "", check: Check = no_check) -> str | None:
        """Write an object and return its etag; readers see the old object or all of the new one.

        Args:
            name: name of the object.
            content: content of the object.
            crc32c: checksum to store as its metadata, which `find` returns; empty for none.
            check: see the class.
        """
        request = partial(self._put, name, content, crc32c, use_multipart=False)
        return self._request(name, request, check).etag

    def put_if(self, name: str, content: bytes, replaced: ObjectInfo | None = None) -> ObjectInfo | None:
        """Write an object only if it replaces the object `replaced`; if that is None, only if there is none.

        Returns:
            Metadata of the new object; None if another object is there. That may be this very one if the
            answer to a first try was lost.
        """
        mode: Any = "create"
        if replaced is not None:
            mode = {}
            if replaced.etag is not None:
                mode["e_tag"] = replaced.etag
            if replaced.version is not None:
                mode["version"] = replaced.version

        def request() -> ObjectInfo | None:
            try:
                return self._put(name, content, use_multipart=False, mode=mode)
            except Exception as error:
                if type(error).__name__ in ("AlreadyExistsError", "PreconditionError", "NotFoundError"):
                    return None
                raise

        return self._request(name, request)

    def upload(self, path: Path, name: str, *, crc32c: str = "", check: Check = no_check) -> str | None:
        """Write the file at `path` as an object, in parts if it is large, and return its etag; see `put`."""
        if path.stat().st_size <= _SINGLE_PUT_BYTES:
            return self.put(name, path.read_bytes(), crc32c=crc32c, check=check)

        def request() -> ObjectInfo:
            with open(path, "rb") as file:
                parts = {"chunk_size": 2 * PART_BYTES, "max_concurrency": 4}
                return self._put(name, file, crc32c, use_multipart=True, **parts)

        return self._request(name, request, check).etag

    def list(self) -> Sequence[ObjectInfo]:
        """List all objects below the URL, sorted by name."""

        def request() -> "list[ObjectInfo]":
            pages = _library(self.url).list(self._store, chunk_size=_OBJECTS_PER_PAGE)
            return [_info(meta["path"], meta) for page in pages for meta in page]

        return sorted(self._request("", request), key=lambda info: info.name)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, many with one request if the storage can; a missing object is no error."""

        def delete_once(some_names: Sequence[str]) -> None:
            _library(self.url).delete(self._store, [*some_names])

        try:
            self._request("", partial(delete_once, names))
        except ObjectNotFoundError:
            for name in names:
                with suppress(ObjectNotFoundError):
                    self._request(name, partial(delete_once, [name]))

    def __reduce__(self) -> Any:
        return ObjectStore, (self.url, self._patience_s)

    def _put(self, name: str, content: Any, crc32c: str = "", **options: Any) -> ObjectInfo:
        attributes = {_CRC32C: crc32c} if crc32c else None
        answer = _library(self.url).put(self._store, name, content, attributes=attributes, **options)
        return ObjectInfo(name, 0, answer["e_tag"], version=answer["version"])

    def _request(self, name: str, request: Callable[[], T], check: Check = no_check) -> T:
        return request_with_retries(self.url / name, self._patience_s, request, check)

    def _download_part(
        self, name: str, descriptor: int, file_bytes: int, start: int, check: Check
    ) -> str | None:
        """Write the part of an object that begins at `start` into the file, and return the object's etag."""
        count = min(PART_BYTES, file_bytes - start)

        def request() -> tuple[memoryview, str | None]:
            options = {"range": (start, start + count)}
            answer = _library(self.url).get(self._store, name, options=options)
            if answer.meta["size"] != file_bytes:
                raise StorageError(
                    f"expected {file_bytes:,} bytes, got {answer.meta['size']:,}",
                    path=self.url / name,
                    remedy=CHECK_UPLOAD,
                )
            content = memoryview(answer.bytes())
            check_length(len(content), count)
            return content, answer.meta["e_tag"]

        content, etag = self._request(name, request, check)
        while content:
            written = os.pwrite(descriptor, content, start)
            content, start = content[written:], start + written
        return etag


def _info(name: str, meta: Any) -> ObjectInfo:
    return ObjectInfo(name, meta["size"], meta["e_tag"], meta["version"])


def _open_store(url: Url, patience_s: float) -> Any:
    """Open obstore's store of the objects below `url`.

    Raises:
        SettingError: the URL or the settings in the environment are wrong.
        StorageError: this process was forked from one that has used the library.
    """
    obstore = _library(url)
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, patience_s)),
        "read_timeout": timedelta(seconds=min(_STALL_S, patience_s / 3)),  # so that there is another try
        "timeout": timedelta(seconds=patience_s),
    }
    if url.scheme == "http" or _endpoint_of(url.scheme).startswith("http://"):
        client["allow_http"] = True
    # limited by time, not by number; `precache.storage.retries` has what obstore does not repeat
    retry = {"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=patience_s)}
    try:
        return _make_store(obstore.store, url, {"client_options": client, "retry_config": retry})
    except Exception as error:
        if not (isinstance(error, ValueError) or is_of_storage(error)):
            raise
        raise SettingError(
            f"cannot be opened ({describe_error(error)})", path=url, remedy=remedy_for("")
        ) from error


def _make_store(stores: Any, url: Url, options: dict[str, Any]) -> Any:
    """Make a store from the parts of a URL.

    obstore would unquote a whole URL, and does not know the account in `az://`.
    """
    *_, account, bucket = url.root.split("/")
    prefix = url.key or None
    if url.scheme == "s3":
        return stores.S3Store(bucket, prefix=prefix, **_s3_settings(), **options)
    if url.scheme == "gs":
        return stores.GCSStore(bucket, prefix=prefix, **options)
    if url.scheme == "az":
        return stores.AzureStore(bucket, account_name=account, prefix=prefix, **options)
    return stores.HTTPStore.from_url(str(url), **options)


def _endpoint_of(scheme: str) -> str:
    """Address of the storage in the environment, in place of the provider's; empty if there is none."""
    variables = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("GOOGLE_BASE_URL",),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }
    for name in variables.get(scheme, ()):
        if os.environ.get(name):
            return os.environ[name]
    return ""


def _s3_settings() -> dict[str, Any]:
    """Settings of S3 that obstore does not find by itself: the endpoint, and credentials of AWS profiles."""
    settings: dict[str, Any] = {}
    endpoint = _endpoint_of("s3")
    if endpoint:
        settings["endpoint"] = endpoint
    folder = Path("~/.aws").expanduser()
    has_profile = "AWS_PROFILE" in os.environ or any(
        (folder / name).exists() for name in ("credentials", "config")
    )
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_SKIP_SIGNATURE" in os.environ or not has_profile:
        return settings
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise MissingDependencyError(
            "credentials of AWS profiles need the package boto3",
            remedy=f"install it with: {install_command('cloud')}",
        ) from error
    settings["credential_provider"] = Boto3CredentialProvider()
    return settings


def _library(url: Url) -> Any:
    """Return the package obstore, for a request to `url`.

    Raises:
        MissingDependencyError: it is not installed.
        StorageError: this process was forked from one that has used it.
    """
    global _library_process
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise MissingDependencyError(
            "URLs need the package obstore", remedy=f"install it with: {install_command('cloud')}"
        ) from error
    # a fork has none of the library's threads, and would wait for them forever
    if _library_process not in (None, os.getpid()):
        raise StorageError(
            "cannot be read by a process that was forked from one that has read URLs",
            path=url,
            remedy="start workers with multiprocessing_context='forkserver'",
        )
    _library_process = os.getpid()
    return obstore
