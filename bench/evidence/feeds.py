"""The loaders that the races and the memory over epochs go through."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loaders
from loaders import Loader


@dataclass(frozen=True, slots=True)
class Feed:
    """A loader: what it reads under the folder of the pictures, and its settings."""

    name: str
    folder: str
    settings: dict[str, Any] = field(default_factory=dict)

    def open(self, data: Path, **more: Any) -> Loader:
        """Build it; its order is that of the stored samples."""
        return loaders.build(data / self.folder, shuffle=False, **{**self.settings, **more})


FEEDS = (
    Feed("shards", "mixed-shards", {"backend": "shards"}),
    Feed("webdataset", "mixed-webdataset", {"backend": "webdataset"}),
    Feed("pytorch", "mixed", {"backend": "pytorch", "workers": 2}),
    Feed("nvjpeg of webdataset", "mixed-webdataset", {"backend": "nvjpeg"}),
    Feed("nvjpeg of a raw tree", "mixed", {"backend": "nvjpeg"}),
    Feed("dali of webdataset", "mixed-webdataset", {"backend": "dali"}),
    Feed("dali of a raw tree", "mixed", {"backend": "dali"}),
    Feed("synthetic", "mixed-shards", {"backend": "synthetic"}),
    Feed("shards, cache ram", "mixed-shards", {"backend": "shards", "cache": "ram"}),
    Feed("shards, cache device", "mixed-shards", {"backend": "shards", "cache": "device"}),
    Feed("nvjpeg, cache device", "mixed-webdataset", {"backend": "nvjpeg", "cache": "device"}),
    Feed("dali, cache device", "mixed-webdataset", {"backend": "dali", "cache": "device"}),
)
