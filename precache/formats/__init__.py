"""Formats of converted datasets, one module each.

The docstring of a module is the byte layout; the module holds writer and readers of its format, and
`FORMAT`, which says all that the project asks of it (see `base.Format`), also which backend reads it. To add
a format, write such a module, and add a line to FORMATS here. The contract suites of the tests run over all
of FORMATS.
"""

from precache.formats import shards, tfrecord, webdataset
from precache.formats.base import Format, Sample, StoredSample

FORMATS: dict[str, Format] = {
    "shards": shards.FORMAT,
    "webdataset": webdataset.FORMAT,
    "dali": tfrecord.FORMAT,
}

__all__ = ["FORMATS", "Format", "Sample", "StoredSample"]
