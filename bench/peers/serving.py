"""How other libraries serve the same pictures: what `bench loaders --against` runs, a process each.

    python bench/peers/serving.py NAME DATA --batch-size 128 --size 224 --workers 2 --batches 100

Each loader is used as its documentation shows it, shuffled, with labels, and hands over uint8 in main
memory; epoch follows epoch. Prints one line of JSON: images, seconds per timed batch, which of these
were the first of an epoch, seconds to the first batch (imports excluded), version. This file imports nothing
of ours, and each library only where it is used, so that it also runs in another virtual environment.
`writing.py` writes what is read, where that is no raw tree or folder of ours.
"""

import argparse
import importlib
import itertools
import json
import os
import shlex
import struct
import sys
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Pixels: TypeAlias = npt.NDArray[np.uint8]
Epoch: TypeAlias = Iterable[tuple[Any, Any]]
"""(images, labels) of each batch."""
StartEpoch: TypeAlias = Callable[[], Epoch]


@dataclass(frozen=True, slots=True)
class Work:
    """What to serve.

    Attributes:
        data: folder.
        stored: side of its squares in pixels.
        size: side of the served squares.
    """

    data: Path
    stored: int
    size: int
    batch_size: int
    workers: int

    @property
    def resized(self) -> int:
        """The shorter side of any other picture before the centre crop, as in torchvision's validation."""
        return round(self.size / 0.875)

    def crop(self, pixels: Any) -> Any:
        """The centre of [stored, stored, 3]."""
        offset = (self.stored - self.size) // 2
        rows = slice(offset, offset + self.size)
        return pixels[rows, rows]

    def shards(self, suffix: str) -> list[str]:
        """Paths of the training split's files in a folder of ours."""
        return sorted(map(str, self.data.glob(f"train-*{suffix}")))


def gather(work: Work) -> StartEpoch:
    """Rows of mapped shards, copied by threads into one buffer again and again: no loader can be faster."""
    rows: list[Pixels] = []
    labels: list[Any] = []
    for path in work.shards(".safetensors"):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shape = tuple(header["images"]["shape"])
        images = np.memmap(path, np.uint8, "r", 8 + length + header["images"]["data_offsets"][0], shape)
        rows.extend(work.crop(row) for row in images)
        start = 8 + length + header["labels"]["data_offsets"][0]
        labels.append(np.fromfile(path, "<i8", shape[0], offset=start))
    all_labels = np.concatenate(labels)
    out = np.empty((work.batch_size, work.size, work.size, 3), np.uint8)
    threads = max(1, work.workers)
    each = ThreadPoolExecutor(threads).map if threads > 1 else map
    rng = np.random.default_rng(0)

    def copy(chosen: list[int], part: range) -> None:
        for slot in part:
            out[slot] = rows[chosen[slot]]

    def epoch() -> Epoch:
        order = rng.permutation(len(rows))
        for start in range(0, len(order), work.batch_size):
            chosen = order[start : start + work.batch_size]
            cuts = np.linspace(0, len(chosen), threads + 1).astype(int).tolist()
            parts = [range(first, stop) for first, stop in itertools.pairwise(cuts)]
            list(each(partial(copy, chosen.tolist()), parts))
            yield out[: len(chosen)], all_labels[chosen]

    return epoch


def _torch_loader(dataset: Any, work: Work, *, shuffle: bool = True) -> StartEpoch:
    """What PyTorch's tutorials use, with the worker processes kept from epoch to epoch."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset,
        batch_size=work.batch_size,
        shuffle=shuffle,
        num_workers=work.workers,
        persistent_workers=work.workers > 0,
    )
    return lambda: loader


class _Npy:
    """A map-style dataset of (pixels, label)."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._images = np.load(work.data / "images.npy", mmap_mode="r")
        self._labels = np.load(work.data / "labels.npy")

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Pixels, int]:
        return np.array(self._work.crop(self._images[index])), int(self._labels[index])


def npy(work: Work) -> StartEpoch:
    """Rows of a mapped .npy file."""
    return _torch_loader(_Npy(work), work)


def ffcv(work: Work, *, augment: bool = False) -> StartEpoch:
    """Centre crops, or RandomResizedCrop and flip, of one `.beton` file: https://docs.ffcv.io/making_dataloaders.html."""
    from ffcv.fields import rgb_image
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

    side = (work.size, work.size)
    if augment:
        decode = [rgb_image.RandomResizedCropRGBImageDecoder(side), RandomHorizontalFlip()]
    elif work.size == work.stored:
        decode = [SimpleRGBImageDecoder()]
    else:
        decode = [rgb_image.CenterCropRGBImageDecoder(side, ratio=work.size / work.stored)]
    loader = Loader(
        str(work.data / "data.beton"),
        batch_size=work.batch_size,
        num_workers=max(1, work.workers),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "image": [*decode, ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )

    def epoch() -> Epoch:
        batches = iter(loader)
        try:
            yield from batches
        finally:  # left midway, its thread would make the process abort at its end
            batches.terminate_event.set()
            batches.join(5)

    return epoch


def _cropping(dataset: Any, work: Work) -> Any:
    """The class `dataset`, whose pictures are [side, side, 3], or [3, side, side], with cropped ones."""

    class Pictures(dataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Any, Any]:
            sample = super().__getitem__(index)
            image = sample["image"]
            if image.shape[0] == 3:
                return work.crop(image.permute(1, 2, 0)).permute(2, 0, 1), sample["label"]
            return work.crop(image), sample["label"]

    return Pictures


def litdata(work: Work) -> StartEpoch:
    """Chunks of raw pixels: https://github.com/Lightning-AI/litData."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = _cropping(StreamingDataset, work)(str(work.data), shuffle=True, drop_last=False)
    loader = StreamingDataLoader(
        dataset,
        batch_size=work.batch_size,
        num_workers=work.workers,
        persistent_workers=work.workers > 0,
    )
    return lambda: loader


def mds(work: Work) -> StartEpoch:
    """Shards of raw pixels: https://docs.mosaicml.com/projects/streaming."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    pictures = _cropping(StreamingDataset, work)
    dataset = pictures(local=str(work.data), shuffle=True, batch_size=work.batch_size)
    return _torch_loader(dataset, work, shuffle=False)  # it shuffles itself


def webdataset(work: Work) -> StartEpoch:
    """Tars of JPEGs, decoded by Pillow in the workers: https://github.com/webdataset/webdataset."""
    import webdataset as wds

    def crop(image: Any) -> Pixels:
        return np.array(work.crop(np.asarray(image)))

    tars = work.shards(".tar")
    dataset = (
        wds.WebDataset(tars, shardshuffle=len(tars), empty_check=False)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(crop, int)
        .batched(work.batch_size)
    )
    loader = wds.WebLoader(
        dataset, batch_size=None, num_workers=work.workers, persistent_workers=work.workers > 0
    )
    return lambda: loader


def imagefolder(work: Work) -> StartEpoch:
    """Pillow decodes and resizes, as in PyTorch's tutorials."""
    from torchvision import datasets, transforms

    steps = [transforms.Resize(work.resized), transforms.CenterCrop(work.size), transforms.PILToTensor()]
    return _torch_loader(datasets.ImageFolder(str(work.data), transforms.Compose(steps)), work)


def dali(work: Work) -> StartEpoch:
    """A CPU pipeline over TFRecords, tars or a raw tree: https://docs.nvidia.com/deeplearning/dali."""
    import nvidia.dali.fn
    from nvidia.dali import pipeline_def, tfrecord, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    fn: Any = nvidia.dali.fn  # its stubs know no keyword arguments by `**`

    def read() -> Any:
        settings: dict[str, Any] = {"random_shuffle": True, "name": "Reader"}
        indices = work.shards(".idx")
        if records := work.shards(".tfrecord"):
            features = {
                "image/encoded": tfrecord.FixedLenFeature([], tfrecord.string, ""),
                "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
            }
            read = fn.readers.tfrecord(path=records, index_path=indices, features=features, **settings)
            return read["image/encoded"], read["image/class/label"]
        if tars := work.shards(".tar"):
            encoded, text = fn.readers.webdataset(
                paths=tars, index_paths=indices, ext=["jpg", "cls"], **settings
            )
            return encoded, fn.pad(text)  # of one length in a batch
        return fn.readers.file(file_root=str(work.data), **settings)

    @pipeline_def(batch_size=work.batch_size, num_threads=max(1, work.workers), device_id=None)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        encoded, labels = read()
        images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        if not work.stored:
            images = fn.resize(images, resize_shorter=work.resized)
        return fn.crop(images, crop=(work.size, work.size)), labels

    loader = DALIGenericIterator(
        [pipeline()],
        ["images", "labels"],
        reader_name="Reader",
        auto_reset=True,
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )

    def epoch() -> Epoch:
        for (batch,) in loader:
            labels = batch["labels"]
            if labels.element_size() == 1:  # the tars' ASCII digits
                labels = [int(bytes(row).rstrip(b"\0")) for row in labels.numpy()]
            yield batch["images"], labels

    return epoch


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
    LIMIT: Peer(gather, (), "numpy", ("shards",), "pixels"),
    "npy": Peer(npy, ("torch",), "torch", ("npy",), "pixels"),
    "ffcv-raw": Peer(ffcv, ("ffcv",), "ffcv", ("ffcv",), "pixels"),
    "ffcv-rrc": Peer(partial(ffcv, augment=True), ("ffcv",), "ffcv", ("ffcv",), "crops"),
    "ffcv-jpeg": Peer(ffcv, ("ffcv",), "ffcv", ("ffcv-jpeg",), "jpeg"),
    "litdata-raw": Peer(litdata, ("litdata",), "litdata", ("litdata",), "pixels"),
    "mds-raw": Peer(mds, ("streaming",), "mosaicml-streaming", ("mds",), "pixels"),
    "webdataset-pil": Peer(webdataset, ("webdataset", "PIL.Image"), "webdataset", ("webdataset",), "jpeg"),
    "dali-files": Peer(dali, _DALI, _DALI_PACKAGE, ("dali", "webdataset"), "jpeg"),
    "dali-raw": Peer(dali, _DALI, _DALI_PACKAGE, ("raw",), "tree"),
    "imagefolder": Peer(imagefolder, _TORCHVISION, "torchvision", ("raw",), "tree"),
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
