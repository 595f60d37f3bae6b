"""Convert raw image trees into pre-resized shards, WebDataset tars and DALI-readable TFRecords.

    from precache import Recipe, convert, open_dataset, verify

    convert("data/raw", "data/shards", Recipe(format="shards", size=256))

This package never imports torch: it runs on CPU-only hosts, and its workers start fast.
"""

from precache.across import verify_across
from precache.checking import CheckReport, check
from precache.convert import Conversion, convert
from precache.converted import ConvertedDataset, open_dataset
from precache.errors import (
    DatasetError,
    DownloadError,
    ImageError,
    MissingDependencyError,
    PrecacheError,
    SettingError,
    SourceError,
    WorkerError,
)
from precache.export import export
from precache.manifest import Manifest
from precache.recipe import Recipe
from precache.sources import Source, SourceOptions, open_source
from precache.verification import verify, verify_deep

__version__ = "0.3.0"

__all__ = [
    "CheckReport",
    "Conversion",
    "ConvertedDataset",
    "DatasetError",
    "DownloadError",
    "ImageError",
    "Manifest",
    "MissingDependencyError",
    "PrecacheError",
    "Recipe",
    "SettingError",
    "Source",
    "SourceError",
    "SourceOptions",
    "WorkerError",
    "check",
    "convert",
    "export",
    "open_dataset",
    "open_source",
    "verify",
    "verify_across",
    "verify_deep",
]
