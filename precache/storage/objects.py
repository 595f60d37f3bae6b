"""Objects of S3, Google Cloud Storage, Azure and web servers, by obstore (the `object_store` of Rust).

A request that may succeed if it is made again is made again, see `precache.storage.retries`; what cannot get
better, a missing object or refused credentials, is an error at once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from precache.errors import MissingDependencyError, SettingError, StorageError
from precache.packages import install_extra
from precache.storage.retries import (
    IS_IT_WHOLE,
    REPLACED,
    Check,
    ObjectNotFoundError,
    Patience,
    check_length,
    in_words,
    is_of_storage,
    remedy,
    retried,
    unchecked,
)
from precache.storage.urls import Url

T = TypeVar("T")
PART_BYTES = 8 << 20
"""Of a download: so much is asked for at a time."""
_SINGLE_PUT_BYTES = 64 << 20  # what is larger goes up in parts
_AT_A_TIME = 8  # parts of one file
_user: int | None = None  # the process that uses the library
_CRC32C = "precache-crc32c"  # in an object's own metadata, so that it comes and goes with its content


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object: its name relative to the store's URL, its size, and what changes with its content."""

    name: str
    bytes: int
    etag: str | None


class ObjectStore:
    """The objects below a URL. Several threads may use one; another process opens its own.

    Every method raises StorageError, which names the URL and the reason, where the storage refuses, or does
    not answer in time.
    """

    def __init__(self, url: Url, patience: Patience | None = None) -> None:
        self.url = url
        self._patience = patience or Patience.of_environment()
        self._store = _open(url, self._patience)
        self._process = os.getpid()

    def find(self, name: str) -> ObjectInfo | None:
        """What is known of an object; None if there is none."""
        try:
            found = self._retried(name, lambda: self._obstore().head(self._store, name))
        except ObjectNotFoundError:
            return None
        return ObjectInfo(name, found["size"], found["e_tag"])

    def get(self, name: str) -> bytes:
        """All of an object."""

        def once() -> bytes:
            answer = self._obstore().get(self._store, name)
            content = answer.bytes().to_bytes()
            check_length(len(content), answer.meta["size"])
            return content  # type: ignore[no-any-return]

        return self._retried(name, once)

    def get_range(self, name: str, start: int, count: int, etag: str | None = None) -> bytes:
        """`count` bytes of an object from `start` on.

        Args:
            etag: of the object that is expected; another one is an error.
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

        return self._retried(name, once)

    def download(self, name: str, descriptor: int, file_bytes: int, check: Check = unchecked) -> None:
        """Write an object of `file_bytes` into the open file `descriptor`, several parts at a time.

        Args:
            check: called before each request, by several threads; what it raises ends the download.
        """
        fetch = partial(self._download_part, name, descriptor, file_bytes, check)
        starts = range(0, file_bytes, PART_BYTES)
        if len(starts) == 1:
            fetch(0)
            return
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            parts = [pool.submit(fetch, start) for start in starts]
            try:
                etags = {part.result() for part in parts}
            finally:
                pool.shutdown(cancel_futures=True)
        if len(etags) > 1:
            raise StorageError(f"{self.url / name}: {REPLACED}; {remedy(REPLACED)}")

    def put(self, name: str, content: bytes, *, crc32c: str = "") -> None:
        """Write an object; whoever reads it sees the old one or all of the new one.

        Args:
            crc32c: kept beside it, for `crc32c_of`.
        """
        self._retried(
            name,
            lambda: self._obstore().put(
                self._store, name, content, use_multipart=False, attributes=_attributes(crc32c)
            ),
        )

    def upload(self, path: Path, name: str, *, crc32c: str = "") -> None:
        """Write the file at `path` as an object, in parts if it is large; as `put`."""
        if path.stat().st_size <= _SINGLE_PUT_BYTES:
            self.put(name, path.read_bytes(), crc32c=crc32c)
            return

        with open(path, "rb") as file:

            def once() -> None:
                file.seek(0)
                self._obstore().put(
                    self._store,
                    name,
                    file,
                    attributes=_attributes(crc32c),
                    use_multipart=True,
                    chunk_size=2 * PART_BYTES,
                    max_concurrency=4,
                )

            self._retried(name, once)

    def crc32c_of(self, name: str) -> str | None:
        """What `put` was told to keep beside the object; None if nothing was, or there is no object."""
        options = {"range": (0, 1)}
        try:
            answer = self._retried(
                name, lambda: self._obstore().get(self._store, name, options=options).attributes
            )
        except ObjectNotFoundError:
            return None
        kept = answer.get(_CRC32C)
        return None if kept is None else str(kept)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects in the folder `prefix`, and in those in it, sorted by name."""

        def once() -> "list[ObjectInfo]":
            pages = self._obstore().list(self._store, prefix=prefix or None, chunk_size=1000)
            return [ObjectInfo(one["path"], one["size"], one["e_tag"]) for page in pages for one in page]

        yield from sorted(self._retried(prefix, once), key=lambda one: one.name)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        for name in names:
            try:
                self._retried(name, partial(self._obstore().delete, self._store, name))
            except ObjectNotFoundError:
                continue

    def __reduce__(self) -> Any:
        return ObjectStore, (self.url, self._patience)

    def _retried(self, name: str, once: Callable[[], T]) -> T:
        return retried(self.url / name, self._patience, once)

    def _obstore(self) -> Any:
        if os.getpid() != self._process:  # its threads did not come along
            raise StorageError(f"{self.url}: was opened in another process; open it in the one that uses it")
        return _obstore()

    def _download_part(
        self, name: str, descriptor: int, file_bytes: int, check: Check, start: int
    ) -> str | None:
        """Write what begins at `start`; the object's etag."""
        count = min(PART_BYTES, file_bytes - start)

        def once() -> tuple[memoryview, str | None]:
            answer = self._obstore().get(self._store, name, options={"range": (start, start + count)})
            if answer.meta["size"] != file_bytes:
                raise StorageError(
                    f"{self.url / name}: expected {file_bytes:,} bytes, got {answer.meta['size']:,}; "
                    f"{IS_IT_WHOLE}"
                )
            content = memoryview(answer.bytes())
            check_length(len(content), count)
            return content, answer.meta["e_tag"]

        content, etag = retried(self.url / name, self._patience, once, check)
        while content:
            written = os.pwrite(descriptor, content, start)
            content, start = content[written:], start + written
        return etag


def _attributes(crc32c: str) -> dict[str, str] | None:
    return {_CRC32C: crc32c} if crc32c else None


def _open(url: Url, patience: Patience) -> Any:
    global _user
    obstore = _obstore()
    if _user not in (None, os.getpid()):  # its threads did not come along, and it would wait for them
        raise StorageError(
            f"{url}: cannot be read by a process that was forked from one that has read URLs; start workers "
            f"otherwise: multiprocessing_context='forkserver'"
        )
    _user = os.getpid()
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=patience.connect_s),
        "read_timeout": timedelta(seconds=patience.stall_s),
        "timeout": timedelta(seconds=max(patience.stall_s, patience.total_s)),
    }
    given: dict[str, Any] = {}
    if url.scheme == "s3":
        given = _s3_settings()
    if url.scheme == "http" or _endpoint(url.scheme).startswith("http://"):
        client["allow_http"] = True
    # it repeats nothing: `_retried` repeats all, an answer that breaks off too
    retry = {"max_retries": 0, "retry_timeout": timedelta(seconds=patience.total_s)}
    try:
        return obstore.store.from_url(str(url), client_options=client, retry_config=retry, **given)
    except Exception as error:
        if not (isinstance(error, ValueError) or is_of_storage(error)):
            raise
        raise SettingError(f"{url}: cannot be opened ({in_words(error)}); {remedy('')}") from error


def _endpoint(scheme: str) -> str:
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "az": ("AZURE_STORAGE_ENDPOINT",),
    }
    return next((os.environ[name] for name in names.get(scheme, ()) if os.environ.get(name)), "")


def _s3_settings() -> dict[str, Any]:
    """Credentials that object_store does not find by itself: those of AWS profiles."""
    given: dict[str, Any] = {}
    if endpoint := _endpoint("s3"):
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
            f"credentials of AWS profiles need the package boto3; install it with: {install_extra('cloud')}"
        ) from error
    return {**given, "credential_provider": Boto3CredentialProvider()}


def _obstore() -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise MissingDependencyError(
            f"URLs need the package obstore; install it with: {install_extra('cloud')}"
        ) from error
    return obstore
