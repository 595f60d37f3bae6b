"""How the store of each provider is opened: S3, Google Cloud Storage, Azure, web servers."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from precache.errors import MissingDependencyError, SettingError, StorageError
from precache.packages import install_extra
from precache.storage.retries import Patience, in_words, is_of_storage, remedy
from precache.storage.urls import Url

_MOST_RETRIES = 10_000
_user: int | None = None  # the process that uses the library


def open_store(url: Url, patience: Patience) -> Any:
    """The library's store of the objects below `url`.

    Raises:
        SettingError: there can be none.
        StorageError: another process has used the library, and this one is a fork of it.
    """
    global _user
    obstore = library()
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
            f"credentials of AWS profiles need the package boto3; install it with: {install_extra('cloud')}"
        ) from error
    return {**given, "credential_provider": Boto3CredentialProvider()}


def library() -> Any:
    """The package obstore; MissingDependencyError if it is not installed."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise MissingDependencyError(
            f"URLs need the package obstore; install it with: {install_extra('cloud')}"
        ) from error
    return obstore
