"""Upload datasets to a bucket as `precache push` does, and read the objects there."""

from pathlib import Path

from precache.dataset.manifest import MANIFEST_NAME
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url


def upload(folder: Path, url: Url) -> Url:
    """Upload the dataset in `folder` to `url`, the manifest last; return `url`."""
    store = ObjectStore(url)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST_NAME):
        store.upload(path, path.name)
    return url


def objects(url: Url) -> dict[str, bytes]:
    """Content of all objects below a URL, by name."""
    store = ObjectStore(url)
    return {info.name: store.get(info.name) for info in store.list()}
