"""The loaders that the races and the memory over epochs go through."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loaders
from loaders import Loader, Reading


@dataclass(frozen=True, slots=True)
class Feed:
    """A loader: what it reads under the folder of the pictures, and how."""

    name: str
    folder: str
    backend: str
    reading: Reading = field(default_factory=Reading)

    def open(self, data: Path, **more: Any) -> Loader:
        """Build it; its order is that of the stored samples."""
        return loaders.build(
            data / self.folder, backend=self.backend, shuffle=False, reading=self.reading, **more
        )


FEEDS = (
    Feed("shards", "mixed-shards", "shards"),
    Feed("shards of squares", "mixed-squares", "shards"),
    Feed("webdataset", "mixed-webdataset", "webdataset"),
    Feed("pytorch", "mixed", "pytorch", Reading(workers=2)),
    Feed("nvjpeg of webdataset", "mixed-webdataset", "nvjpeg"),
    Feed("nvjpeg of a raw tree", "mixed", "nvjpeg"),
    Feed("dali of webdataset", "mixed-webdataset", "dali"),
    Feed("dali of a raw tree", "mixed", "dali"),
    Feed("synthetic", "mixed-shards", "synthetic"),
    Feed("shards, cache ram", "mixed-shards", "shards", Reading(cache="ram")),
    Feed("shards, cache device", "mixed-squares", "shards", Reading(cache="device")),
    Feed("nvjpeg, cache device", "mixed-squares-webdataset", "nvjpeg", Reading(cache="device")),
    Feed("dali, cache device", "mixed-squares-webdataset", "dali", Reading(cache="device")),
)
