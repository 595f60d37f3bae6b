"""How other libraries serve the same pictures: what `bench loaders --against` runs, a process each.

    python bench/peers/serving.py NAME DATA --batch-size 128 --size 224 --workers 2 --batches 100

Each loader is used as its documentation shows it, shuffled, with labels, and hands over uint8 in main
memory; epoch follows epoch. Prints one line of JSON: images, seconds per timed batch, which of these
were the first of an epoch, seconds to the first batch (imports excluded), version. The loaders are in
`libraries.py`; both files import nothing else of ours, so that they also run in another virtual
environment. `writing.py` writes what is read, where that is no raw tree or folder of ours.
"""

import argparse
import importlib
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.peers import libraries
from bench.peers.libraries import StartEpoch, Work


@dataclass(frozen=True, slots=True)
class Peer:
    """A loader.

    Attributes:
        imports: modules that it uses.
        package: whose version is given.
        reads: `raw`, a raw tree; names of our formats; or the one of `bench.peers.writing.WRITERS` that
            writes its data.
        kind: pictures of one kind cost the same work: `pixels`, centre crops of decoded ones; `crops`,
            random ones; `jpeg`, centre crops of JPEGs of the stored size; `tree`, any files, resized.
    """

    open: Callable[[Work], StartEpoch]
    imports: tuple[str, ...]
    package: str
    reads: tuple[str, ...]
    kind: str


_TORCHVISION = ("torch", "torchvision")
_DALI = ("nvidia.dali.plugin.pytorch",)
# as `precache.packages`, which this script cannot import where it runs alone
_INSTALLED = {distribution.metadata["Name"] for distribution in metadata.distributions()}
_DALI_PACKAGE = "nvidia-dali-cuda130" if "nvidia-dali-cuda130" in _INSTALLED else "nvidia-dali-cuda120"
LIMIT = "gather"
PEERS = {
    LIMIT: Peer(libraries.gather, (), "numpy", ("shards",), "pixels"),
    "gather-crop": Peer(partial(libraries.gather, random_crop=True), (), "numpy", ("shards",), "crops"),
    "npy": Peer(libraries.npy, ("torch",), "torch", ("npy",), "pixels"),
    "ffcv-raw": Peer(libraries.ffcv, ("ffcv",), "ffcv", ("ffcv",), "pixels"),
    "ffcv-rrc": Peer(partial(libraries.ffcv, augment=True), ("ffcv",), "ffcv", ("ffcv",), "crops"),
    "ffcv-jpeg": Peer(libraries.ffcv, ("ffcv",), "ffcv", ("ffcv-jpeg",), "jpeg"),
    "litdata-raw": Peer(libraries.litdata, ("litdata",), "litdata", ("litdata",), "pixels"),
    "litdata-jpeg": Peer(libraries.litdata, ("litdata", "torchvision"), "litdata", ("litdata-jpeg",), "jpeg"),
    "mds-raw": Peer(libraries.mds, ("streaming",), "mosaicml-streaming", ("mds",), "pixels"),
    "webdataset-pil": Peer(
        libraries.webdataset, ("webdataset", "PIL.Image"), "webdataset", ("webdataset",), "jpeg"
    ),
    "dali-files": Peer(libraries.dali, _DALI, _DALI_PACKAGE, ("dali", "webdataset"), "jpeg"),
    "dali-raw": Peer(libraries.dali, _DALI, _DALI_PACKAGE, ("raw",), "tree"),
    "imagefolder": Peer(libraries.imagefolder, _TORCHVISION, "torchvision", ("raw",), "tree"),
    "imagefolder-turbo": Peer(libraries.imagefolder_turbo, _TORCHVISION, "torchvision", ("raw",), "tree"),
}


def measure(peer: Peer, work: Work, warmup: int, batches: int) -> dict[str, Any]:
    """Serve a first batch, `warmup` more, and `batches` timed ones."""
    start_s = time.perf_counter()
    source = _epochs(peer.open(work))
    next(source)
    first_batch_s = time.perf_counter() - start_s
    for _ in itertools.islice(source, warmup):
        pass
    counts, shapes, batch_s, firsts = [], set(), [], []
    mark_s = time.perf_counter()
    for number, (images, labels, first) in enumerate(itertools.islice(source, batches)):
        counts.append((len(images), len(labels)))
        shapes.add((*images.shape[1:], str(images.dtype).removeprefix("torch.")))
        if first:
            firsts.append(number)
        now_s = time.perf_counter()
        batch_s.append(now_s - mark_s)
        mark_s = now_s
    source.close()
    square = (work.size, work.size)
    for height, width in ((s[1:3] if s[0] == 3 else s[:2]) for s in shapes):
        if (height, width) != square:
            raise SystemExit(f"served {height}x{width}, asked for {square[0]}x{square[1]}")
    if {s[-1] for s in shapes} != {"uint8"} or any(images != labels for images, labels in counts):
        raise SystemExit(f"served {sorted(shapes)}, expected uint8 and a label each")
    return {
        "version": f"{peer.package} {metadata.version(peer.package)}",
        "first_batch_s": first_batch_s,
        "images": sum(images for images, _ in counts),
        "batch_s": batch_s,
        "epoch_starts": firsts,
        "size": work.size,
        "dtype": "uint8",
    }


def _epochs(start_epoch: StartEpoch) -> Generator[tuple[Any, Any, bool], None, None]:
    while True:
        served = False
        for images, labels in start_epoch():
            yield images, labels, not served
            served = True
        if not served:
            raise SystemExit("an epoch without a batch")


def main() -> None:
    """Measure the loader that is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("data", type=Path)
    parser.add_argument("--stored", type=int, help="side of the stored squares; 0: any; default: --size")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args()
    peer = PEERS[options.name]
    stored = options.size if options.stored is None else options.stored
    try:
        for module in peer.imports:
            importlib.import_module(module)
    except ImportError as error:
        raise SystemExit(
            f"{sys.executable} lacks {peer.package} ({error}); run: "
            f"{shlex.quote(sys.executable)} -m pip install {peer.package}"
        ) from error
    if 0 < stored < options.size:
        raise SystemExit(f"size {options.size} is more than {options.data} stores ({stored})")
    work = Work(options.data, stored, options.size, options.batch_size, options.workers)
    print("\n" + json.dumps(measure(peer, work, options.warmup, options.batches)), flush=True)


if __name__ == "__main__":
    main()
