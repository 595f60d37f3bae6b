"""Where batches come from: a file for each backend, and what they are made of.

    filler      threads fill a batch with crops
    sequential  shards read whole, and fetched from a URL, ahead of their first use
    blocks      files that fit into memory, read from the disk in huge pages ahead of their use
    integrity   what was read is compared with its checksum
    cache       a reader that keeps what another one decoded; host_memory: what all ranks of a host share
    decoding    pictures as they are stored: of a raw tree, or JPEGs in shards
    ray_reader  any of the backends on the nodes of a Ray cluster

A backend is a function that opens a `Reader` over a split. Where it needs a package that may not be
installed, it says so when it is called, with the command that installs it.
"""

from collections.abc import Callable

from loaders.augment import Crops
from loaders.batch import Reader
from loaders.dataset import RAW, SplitData
from loaders.read import dali, decoding, pytorch, shards, synthetic
from loaders.settings import LoaderSpec
from precache.errors import DatasetError
from precache.storage.urls import Location

BACKENDS: dict[str, Callable[[LoaderSpec, SplitData, Crops], Reader]] = {
    "dali": dali.DaliReader,
    "pytorch": pytorch.open_reader,
    "shards": shards.ShardsReader,
    "synthetic": synthetic.SyntheticReader,
    "webdataset": decoding.ThreadsReader,
}
READS: dict[str, tuple[str, ...]] = {
    "dali": ("dali", "webdataset", RAW),
    "pytorch": (RAW,),
    "shards": ("shards",),
    "synthetic": (RAW, "shards", "webdataset", "dali"),
    "webdataset": ("webdataset",),
}
"""What each backend reads, the kind it is made for first."""
_AUTO = {RAW: "pytorch", "shards": "shards", "webdataset": "webdataset", "dali": "dali"}


def choose_backend(backend: str, kind: str, path: Location | str) -> str:
    """`backend`, or for `auto` that which is made for `kind`, which `path` holds.

    Raises:
        DatasetError: the backend does not read this kind.
    """
    backend = _AUTO[kind] if backend == "auto" else backend
    if kind not in READS[backend]:
        raise DatasetError(
            f"{path}: holds {_describe(kind)}, backend {backend!r} reads "
            f"{' or '.join(_describe(kind) for kind in READS[backend])}; "
            f"use backend {_AUTO[kind]!r} for it, or name another folder"
        )
    return backend


def _describe(kind: str) -> str:
    return "a raw image tree" if kind == RAW else f"format {kind!r}"
