"""Build a loader from one flat set of settings, as the tests combine them."""

from pathlib import Path
from typing import Any

import loaders
from loaders.settings import READING_SETTINGS
from precache.storage.urls import Url


def build_loader(path: str | Path | Url, **settings: Any) -> loaders.Loader:
    """`loaders.build`, with what belongs into its `Reading` put there; of a picture's middle all is shown."""
    reading = {name: settings.pop(name) for name in READING_SETTINGS if name in settings}
    return loaders.build(path, reading=loaders.Reading(**reading), **{"crop_ratio": 1.0, **settings})
