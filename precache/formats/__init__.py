"""The formats that a source is converted to, one module each.

A module's docstring is its byte layout; it holds the writer and the readers, and `FORMAT`, which names them
(see `base.Format`). A new format is such a module, a line in FORMATS here, and its name in
`precache.recipe.FORMAT_NAMES`; the contract suites of the tests run over all that are in FORMATS. Which
backends read it stands in `loaders.read.READS`.
"""

from precache.formats import shards, tfrecord, webdataset
from precache.formats.base import Format, Sample, StoredSample

FORMATS: dict[str, Format] = {
    "shards": shards.FORMAT,
    "webdataset": webdataset.FORMAT,
    "dali": tfrecord.FORMAT,
}

__all__ = ["FORMATS", "Format", "Sample", "StoredSample"]
