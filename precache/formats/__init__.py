"""Formats of converted datasets, one module each.

The docstring of a module is the byte layout; the module holds writer and readers of its format, and
`FORMAT`, which names them (see `base.Format`). To add a format, write such a module, add a line to FORMATS
here, and add its name to `precache.recipe.FORMAT_NAMES` and to `loaders.read.READS`, which lists the backends
that read it.
The contract suites of the tests run over all of FORMATS.
"""

from precache.formats import shards, tfrecord, webdataset
from precache.formats.base import Format, Sample, StoredSample

FORMATS: dict[str, Format] = {
    "shards": shards.FORMAT,
    "webdataset": webdataset.FORMAT,
    "dali": tfrecord.FORMAT,
}

__all__ = ["FORMATS", "Format", "Sample", "StoredSample"]
