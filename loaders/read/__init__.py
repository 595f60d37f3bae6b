"""The backends: one file for each, and the parts that they share.

    dali, pytorch, shards, synthetic    the backends of these names; `webdataset` is in decoding
    decoding     reads and decodes pictures of a raw tree, and JPEGs in shards
    filler       fills batches with crops, with threads
    opening      opens shards ahead of their use, and fetches those at a URL
    blocks       reads files that fit into memory ahead of their use, in huge pages
    integrity    compares samples with their checksums
    cache        a reader that caches decoded pictures in the GPU's memory
    main_memory  main memory that is free for this process
    ray_reader   runs a backend on the nodes of a Ray cluster

What is done ahead, and by which threads:

    thread       does                                              ahead of its taker by     ended by
    read-ahead   one batch after the other: a backend's `read`     3 batches                 the loader
    fill         pictures of a batch, slot by slot                 1 batch                   the reader
    read-shard   opens shards                                      2 windows; 0 at random    `OpenShards`
    fetch-shard  fetches shards at a URL                           a window, or 2 batches    `OpenShards`
    read-block   reads blocks of local files at random             32 batches                the reader

Each takes calls from a queue, and gives a future. An error is raised where the result is taken, in the turn
of its request, and so reaches `next` of the loader's iterator.

A backend is a function that opens a `Reader` over a split. If it needs an optional package that is not
installed, it raises MissingDependencyError, which has the install command. A format names the backend that
reads it by default.
"""

from collections.abc import Callable

from loaders.augment import Crops
from loaders.batch import Reader
from loaders.dataset import RAW, SplitData
from loaders.read import dali, decoding, pytorch, shards, synthetic
from loaders.settings import LoaderSpec
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.storage.urls import Location

BACKENDS: dict[str, Callable[[LoaderSpec, SplitData, Crops], Reader]] = {
    "dali": dali.DaliReader,
    "pytorch": pytorch.open_reader,
    "shards": shards.ShardsReader,
    "synthetic": synthetic.SyntheticReader,
    "webdataset": decoding.ThreadsReader,
}
_ALSO_READS: dict[str, tuple[str, ...]] = {
    "dali": ("webdataset", RAW),
    "pytorch": (RAW,),
    "synthetic": (RAW, *FORMATS),
}
READS: dict[str, tuple[str, ...]] = {
    backend: (
        *(kind for kind, form in FORMATS.items() if form.backend == backend),
        *_ALSO_READS.get(backend, ()),
    )
    for backend in BACKENDS
}
"""Kinds of data that each backend reads; the first is the one it is made for."""


def choose_backend(backend: str, kind: str, path: Location | str) -> str:
    """Return the name of the backend to read `path` with: `backend`, or for `auto` the default of its kind.

    Args:
        kind: the kind of data at `path`: `raw` or a format.

    Raises:
        DatasetError: the backend does not read this kind.
    """
    default = "pytorch" if kind == RAW else FORMATS[kind].backend
    if backend == "auto":
        backend = default
    if kind not in READS[backend]:
        readable = " or ".join(_kind_phrase(readable) for readable in READS[backend])
        raise DatasetError(
            f"holds {_kind_phrase(kind)}, backend {backend!r} reads {readable}",
            path=path,
            remedy=f"use backend {default!r} for it, or name another folder",
        )
    return backend


def _kind_phrase(kind: str) -> str:
    return "a raw image tree" if kind == RAW else f"format {kind!r}"
