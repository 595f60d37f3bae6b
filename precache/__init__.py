"""Convert raw image trees into pre-resized shards, WebDataset tars and DALI-readable TFRecords.

    from precache import Recipe, convert, open_dataset, verify

    convert("data/raw", "data/shards", Recipe(format="shards"))

This package never imports torch: it runs on CPU-only hosts, and its workers start fast.
"""

from typing import TYPE_CHECKING

from precache.errors import (
    DatasetError,
    ImageError,
    MissingDependencyError,
    NothingFoundError,
    PrecacheError,
    SampleError,
    SettingError,
    SourceError,
    StorageError,
    TransformError,
    WorkerError,
)
from precache.packages import check_package, pillow_fault

try:
    from precache.conversion.check import CheckReport, check
    from precache.conversion.convert import Conversion, convert
    from precache.conversion.verification import verify, verify_deep
    from precache.dataset.converted import ConvertedDataset, open_dataset
    from precache.dataset.manifest import Manifest
    from precache.recipe import Recipe
    from precache.sources import Source, SourceOptions, open_source
except ImportError as error:
    fault = pillow_fault()
    if fault is None:
        check_package(error, "precache")
        raise
    if not TYPE_CHECKING:

        def __getattr__(name: str) -> object:  # fail at the first use, so that the commands say it in a line
            if name in __all__:
                raise fault
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.3.0"

__all__ = [
    "CheckReport",
    "Conversion",
    "ConvertedDataset",
    "DatasetError",
    "ImageError",
    "Manifest",
    "MissingDependencyError",
    "NothingFoundError",
    "PrecacheError",
    "Recipe",
    "SampleError",
    "SettingError",
    "Source",
    "SourceError",
    "SourceOptions",
    "StorageError",
    "TransformError",
    "WorkerError",
    "check",
    "convert",
    "open_dataset",
    "open_source",
    "verify",
    "verify_deep",
]
