"""Loaders of other libraries over the same pictures, each as its documentation shows it.

A function opens the loader for a `Work` and returns what starts an epoch. Run by `serving.py`, also
in other virtual environments: imports nothing of ours, and each library only where it is used.
"""

import itertools
import json
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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

    @property
    def offset(self) -> int:
        """Of the centre crop."""
        return (self.stored - self.size) // 2

    def crop(self, pixels: Any) -> Any:
        """The centre of [stored, stored, 3]."""
        rows = slice(self.offset, self.offset + self.size)
        return pixels[rows, rows]

    def shards(self, suffix: str) -> list[str]:
        """Paths of the training split's files in a folder of ours."""
        return sorted(map(str, self.data.glob(f"train-*{suffix}")))


def gather(work: Work, *, random_crop: bool = False) -> StartEpoch:
    """Rows of mapped shards, copied by threads into one buffer again and again: no loader can be faster."""
    rows: list[Pixels] = []
    labels: list[Any] = []
    for path in work.shards(".safetensors"):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shape = tuple(header["images"]["shape"])
        rows.extend(np.memmap(path, np.uint8, "r", 8 + length + header["images"]["data_offsets"][0], shape))
        start = 8 + length + header["labels"]["data_offsets"][0]
        labels.append(np.fromfile(path, "<i8", shape[0], offset=start))
    all_labels = np.concatenate(labels)
    if not random_crop:
        rows = [work.crop(row) for row in rows]
    out = np.empty((work.batch_size, work.size, work.size, 3), np.uint8)
    threads = max(1, work.workers)
    each = ThreadPoolExecutor(threads).map if threads > 1 else map
    rng = np.random.default_rng(0)

    def copy(chosen: list[int], corners: list[list[int]], part: range) -> None:
        for slot in part:
            row = rows[chosen[slot]]
            if random_crop:
                top, left = corners[slot]
                row = row[top : top + work.size, left : left + work.size]
            out[slot] = row

    def epoch() -> Epoch:
        order = rng.permutation(len(rows))
        for start in range(0, len(order), work.batch_size):
            chosen = order[start : start + work.batch_size]
            corners = rng.integers(0, work.stored - work.size + 1, (len(chosen), 2)).tolist()
            cuts = np.linspace(0, len(chosen), threads + 1).astype(int).tolist()
            parts = [range(first, stop) for first, stop in itertools.pairwise(cuts)]
            list(each(partial(copy, chosen.tolist(), corners), parts))
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
    """Chunks of raw pixels or of JPEGs: https://github.com/Lightning-AI/litData."""
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


def imagefolder_turbo(work: Work) -> StartEpoch:
    """torchvision decodes (JPEGs by libjpeg-turbo) and resizes tensors."""
    from torchvision import datasets, io
    from torchvision.transforms import v2

    def load(path: str) -> Any:
        return io.decode_image(io.read_file(path), io.ImageReadMode.RGB)

    steps = v2.Compose([v2.Resize(work.resized, antialias=True), v2.CenterCrop(work.size)])
    return _torch_loader(datasets.ImageFolder(str(work.data), steps, loader=load), work)


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
