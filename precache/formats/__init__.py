"""The formats that a tree is converted to, one module each.

A module's docstring is its byte layout; it holds the writer and the reader.
"""

from precache.formats import shards, tfrecord, webdataset
from precache.formats.base import Format, Sample, StoredSample

FORMATS: dict[str, Format] = {
    "shards": shards.FORMAT,
    "webdataset": webdataset.FORMAT,
    "dali": tfrecord.FORMAT,
}

__all__ = ["FORMATS", "Format", "Sample", "StoredSample"]
