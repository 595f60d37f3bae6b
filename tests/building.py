"""Build a loader from one flat set of settings, as the tests combine them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import loaders
from precache.storage.urls import Url


def build_loader(path: str | Path | Url, **settings: Any) -> loaders.Loader:
    """`loaders.build`, with what belongs into a dataclass put there.

    Unless told otherwise, pixels are those that are stored, uint8, and of a picture's middle all is shown.
    """
    groups = {
        "reading": loaders.Reading,
        "serving": loaders.Serving,
        "sampling": loaders.Sampling,
        "ranks": loaders.Ranks,
    }
    settings = {"crop_ratio": 1.0, "dtype": "uint8", **settings}
    for name, group in groups.items():
        given = {field.name: settings.pop(field.name) for field in fields(group) if field.name in settings}
        if given:
            settings[name] = group(**given)
    return loaders.build(path, **settings)
