"""Build a loader from flat keyword arguments, as tests combine them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import loaders
from precache.storage.urls import Url


def build_loader(path: str | Path | Url, **settings: Any) -> loaders.Loader:
    """Call `loaders.build`, with the settings of its dataclasses given as keyword arguments, too.

    Unless other settings say so, the pixels are served as they are stored, in uint8, and nothing is cropped.
    """
    groups = {
        "reading": loaders.Reading,
        "serving": loaders.Serving,
        "sampling": loaders.Sampling,
        "ranks": loaders.Ranks,
    }
    settings = {"crop_ratio": 1.0, "dtype": "uint8", **settings}
    for name, group in groups.items():
        values = {field.name: settings.pop(field.name) for field in fields(group) if field.name in settings}
        if values:
            settings[name] = group(**values)
    return loaders.build(path, **settings)
