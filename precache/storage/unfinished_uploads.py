"""Uploads in parts that were never finished: nobody sees them, and S3 charges for them.

Google Cloud Storage and Azure remove theirs after a week.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from precache.errors import MissingDependencyError, StorageError
from precache.packages import install_extra
from precache.storage.providers import endpoint_of
from precache.storage.urls import Url


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An upload in parts: the name of its object, relative to the URL, and its number."""

    name: str
    upload_id: str


def find(url: Url, names: Container[str]) -> list[UnfinishedUpload]:
    """Those of objects of `names` below `url`; none where the storage is not S3.

    Raises:
        StorageError: they cannot be listed.
        MissingDependencyError: boto3 is not installed.
    """
    if url.scheme != "s3":
        return []
    prefix = f"{url.key}/" if url.key else ""

    def listed(client: Any, bucket: str) -> list[UnfinishedUpload]:
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        found = [one for page in pages for one in page.get("Uploads", ())]
        return [UnfinishedUpload(one["Key"].removeprefix(prefix), one["UploadId"]) for one in found]

    return [one for one in _asked(url, listed) if one.name in names]


def abort(url: Url, uploads: Sequence[UnfinishedUpload]) -> None:
    """Remove what they have sent; raises as `find`."""

    def removed(client: Any, bucket: str) -> None:
        for one in uploads:
            key = (url / one.name).key
            client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=one.upload_id)

    if uploads:
        _asked(url, removed)


def _asked(url: Url, ask: Any) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise MissingDependencyError(
            f"to find unfinished uploads needs the package boto3; install it with: {install_extra('cloud')}"
        ) from error
    retries = {"max_attempts": 5, "mode": "standard"}
    try:
        config = Config(connect_timeout=10, read_timeout=20, retries=retries)
        client = boto3.client("s3", endpoint_url=endpoint_of("s3") or None, config=config)
        return ask(client, url.root.rpartition("/")[2])
    except (BotoCoreError, ClientError) as error:
        reason = " ".join(str(error).split())[:200]
        raise StorageError(
            f"{url}: its unfinished uploads cannot be listed or removed ({reason}); check the credentials, "
            f"or let a lifecycle rule of the bucket remove them"
        ) from error
