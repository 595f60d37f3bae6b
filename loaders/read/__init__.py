"""The backends: one file for each, and the parts that they share.

    dali, shards, synthetic    the backends of these names
    decoding     reads and decodes JPEGs in shards (`webdataset`), and pictures of a raw tree (`pytorch`)
    processes    runs a backend in worker processes, as `pytorch` does by default
    ray_reader   runs a backend on the nodes of a Ray cluster
    worker       a backend's reader in such a process, or on such a node
    filler       fills batches with crops, with threads
    opening      opens shards ahead of their use, and fetches those at a URL
    blocks       reads files that fit into memory ahead of their use, in huge pages
    integrity    compares samples with their checksums
    cache        a reader that caches decoded pictures in the GPU's memory
    main_memory  main memory that is free for this process

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

from loaders.augment.crops import Crops
from loaders.batch import Reader
from loaders.dataset import SplitData
from loaders.read import dali, decoding, processes, shards, synthetic
from loaders.settings import LoaderSpec

BACKENDS: dict[str, Callable[[LoaderSpec, SplitData, Crops], Reader]] = {
    "dali": dali.DaliReader,
    "pytorch": processes.open_tree,
    "shards": shards.ShardsReader,
    "synthetic": synthetic.SyntheticReader,
    "webdataset": decoding.ThreadsReader,
}
"""Functions that open the reader of each backend; `loaders.dataset.READS` says what it reads."""
