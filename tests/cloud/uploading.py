"""Datasets of this machine put into a bucket, as `precache push` leaves them; and what lies there."""

from pathlib import Path

from precache.dataset.manifest import MANIFEST_NAME
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url


def upload(folder: Path, url: Url) -> Url:
    """Put the dataset in `folder` there; its URL."""
    store = ObjectStore(url)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST_NAME):
        store.upload(path, path.name)
    return url


def objects(url: Url) -> dict[str, bytes]:
    """All that lies below a URL."""
    store = ObjectStore(url)
    return {info.name: store.get(info.name) for info in store.list()}
