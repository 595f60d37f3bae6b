"""Loaders of other libraries and writers of their formats: an entry of PEERS each.

    python bench/lab/libraries.py version NAME
    python bench/lab/libraries.py write NAME PICTURES.json FOLDER --size 256 --workers 2
    python bench/lab/libraries.py serve NAME FOLDER --stored 256 --size 224 --batch-size 64 --workers 2 ...

`bench.lab.peers` and `bench.lab.conversion` run this file in a process of its own, with the Python that has
the library and may lack click. So it imports nothing of this project, and a library only in the functions
that use it.

Each library is used as its documentation shows it. Writers get upright RGB squares that Pillow has made,
cropped and resized as this project does. Loaders shuffle, and serve uint8 in main memory with labels, epoch
after epoch. The last line printed is JSON.
"""

import argparse
import importlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # in a Python without NumPy this file still runs, and `version` says what is missing
    import numpy as np
    import numpy.typing as npt

Pixels: TypeAlias = "npt.NDArray[np.uint8]"
Epoch: TypeAlias = Iterable[tuple[Any, Any]]
"""Batches of an epoch, (images, labels)."""
StartEpoch: TypeAlias = Callable[[], Epoch]

SHARD_BYTES = 64 * 2**20


class PeerError(Exception):
    """A peer cannot be measured, for a reason that a user can remove."""


class PictureDataset:
    """Map-style dataset for a writer: squares of pictures, (uint8 [size, size, 3] RGB, label).

    With size 0 pictures are whole, uint8 [height, width, 3]. A picture that Pillow cannot decode is grey,
    because writers stop, or hang, where a dataset raises.
    """

    def __init__(self, paths: Sequence[str], labels: Sequence[int], size: int) -> None:
        self.paths, self.labels, self.size = paths, labels, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Pixels, int]:
        import numpy as np
        from PIL import Image, ImageOps

        try:
            upright = ImageOps.exif_transpose(Image.open(self.paths[index])).convert("RGB")
        except Exception:  # Pillow raises whatever its decoders raise
            upright = Image.new("RGB", (self.size or 256, self.size or 256), "grey")
        if not self.size:
            return np.asarray(upright), self.labels[index]
        square = ImageOps.fit(upright, (self.size, self.size), Image.Resampling.LANCZOS)
        return np.asarray(square), self.labels[index]


@dataclass(frozen=True, slots=True)
class Work:
    """Pictures that a loader has to serve, and the form in which it does.

    Attributes:
        folder: the folder that it reads.
        stored_side: side of the squares in the folder, pixels.
        size: side of the served squares, pixels.
    """

    folder: Path
    stored_side: int
    size: int
    batch_size: int
    workers: int

    def crop(self, pixels: Any) -> Any:
        """Return the centre, [size, size, 3], of a picture [stored_side, stored_side, 3]."""
        offset = (self.stored_side - self.size) // 2
        rows = slice(offset, offset + self.size)
        return pixels[rows, rows]

    def shards(self, suffix: str) -> list[str]:
        """Return the paths of the training split's files in a folder that `precache convert` made."""
        return sorted(map(str, self.folder.glob(f"train-*{suffix}")))


def serve_webdataset(work: Work) -> StartEpoch:
    """Serve tars of JPEGs, decoded by Pillow in the workers: https://github.com/webdataset/webdataset."""
    import numpy as np
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


def write_ffcv(pictures: PictureDataset, folder: Path, workers: int) -> None:
    """Write a `.beton` file of raw pixels: https://docs.ffcv.io/writing_datasets.html."""
    _write_beton(pictures, folder, workers, write_mode="raw")


def write_ffcv_whole(pictures: PictureDataset, folder: Path, workers: int) -> None:
    """Write a `.beton` file of raw pixels, whole pictures of at most 500 pixels a side."""
    _write_beton(pictures, folder, workers, write_mode="raw", max_resolution=500)


def write_ffcv_imagenet(pictures: PictureDataset, folder: Path, workers: int) -> None:
    """Write a `.beton` file of at most 500 pixels a side, half of the pictures as JPEG.

    These are the settings of https://docs.ffcv.io/ffcv_examples/imagenet.html.
    """
    _write_beton(
        pictures,
        folder,
        workers,
        max_resolution=500,
        write_mode="proportion",
        compress_probability=0.5,
        jpeg_quality=90,
    )


def _write_beton(pictures: PictureDataset, folder: Path, workers: int, **image_settings: Any) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(**image_settings), "label": IntField()}
    DatasetWriter(str(folder / "data.beton"), fields, num_workers=workers).from_indexed_dataset(pictures)


def serve_ffcv(work: Work) -> StartEpoch:
    """Serve centre crops of a `.beton` file: https://docs.ffcv.io/making_dataloaders.html."""
    from ffcv.fields import rgb_image
    from ffcv.fields.decoders import SimpleRGBImageDecoder

    if work.size == work.stored_side:
        return _ffcv_loader(work, [SimpleRGBImageDecoder()])
    ratio = work.size / work.stored_side
    return _ffcv_loader(work, [rgb_image.CenterCropRGBImageDecoder((work.size, work.size), ratio=ratio)])


def serve_ffcv_crops(work: Work) -> StartEpoch:
    """Serve random crops of a `.beton` file, resized and flipped at random."""
    from ffcv.fields import rgb_image
    from ffcv.transforms import RandomHorizontalFlip

    crop = rgb_image.RandomResizedCropRGBImageDecoder((work.size, work.size))
    return _ffcv_loader(work, [crop, RandomHorizontalFlip()])


def _ffcv_loader(work: Work, decode: list[Any]) -> StartEpoch:
    from ffcv.fields.decoders import IntDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor, ToTorchImage

    loader = Loader(
        str(work.folder / "data.beton"),
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
        finally:  # a thread of an epoch that is left midway would make the process abort at its end
            batches.terminate_event.set()
            batches.join(5)

    return epoch


def write_litdata(pictures: PictureDataset, folder: Path, workers: int) -> None:
    """Write chunks of raw pixels: https://github.com/Lightning-AI/litData."""
    import litdata

    with tempfile.TemporaryDirectory() as caches:
        # by default litdata empties /tmp/data and /tmp/chunks as its caches, whatever lies there
        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{caches}/chunks"
        os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = f"{caches}/data"
        litdata.optimize(
            fn=partial(_litdata_sample, pictures),
            inputs=list(range(len(pictures))),
            output_dir=str(folder),
            chunk_bytes=SHARD_BYTES,
            num_workers=workers,
        )


def _litdata_sample(pictures: PictureDataset, index: int) -> dict[str, Any]:
    pixels, label = pictures[index]
    return {"image": pixels, "label": label}


def serve_litdata(work: Work) -> StartEpoch:
    """Serve centre crops of chunks that `write_litdata` wrote."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = _make_cropping(StreamingDataset, work)(str(work.folder), shuffle=True, drop_last=False)
    loader = StreamingDataLoader(
        dataset,
        batch_size=work.batch_size,
        num_workers=work.workers,
        persistent_workers=work.workers > 0,
    )
    return lambda: loader


def write_mds(pictures: PictureDataset, folder: Path, workers: int) -> None:
    """Write shards of raw pixels, and merge their indices: https://docs.mosaicml.com/projects/streaming."""
    from streaming.base.util import merge_index

    parts = [range(rank, len(pictures), workers) for rank in range(workers)]
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(partial(_write_mds_part, pictures, folder), parts))
    merge_index(str(folder), keep_local=True)


def _write_mds_part(pictures: PictureDataset, folder: Path, part: range) -> None:
    from streaming import MDSWriter

    columns = {"image": f"ndarray:uint8:{pictures.size},{pictures.size},3", "label": "int"}
    with MDSWriter(out=str(folder / str(part.start)), columns=columns, size_limit=SHARD_BYTES) as writer:
        for index in part:
            pixels, label = pictures[index]
            writer.write({"image": pixels, "label": label})


def serve_mds(work: Work) -> StartEpoch:
    """Serve centre crops of shards that `write_mds` wrote, by PyTorch's DataLoader."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()
    dataset = _make_cropping(StreamingDataset, work)(
        local=str(work.folder), shuffle=True, batch_size=work.batch_size
    )
    loader = DataLoader(
        dataset,  # it is shuffled by the dataset
        batch_size=work.batch_size,
        num_workers=work.workers,
        persistent_workers=work.workers > 0,
    )
    return lambda: loader


def _make_cropping(dataset: Any, work: Work) -> Any:
    """Return a subclass of `dataset` that crops its pictures, [side, side, 3] or [3, side, side]."""

    class CroppedDataset(dataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Any, Any]:
            sample = super().__getitem__(index)
            image = sample["image"]
            if image.shape[0] == 3:
                return work.crop(image.permute(1, 2, 0)).permute(2, 0, 1), sample["label"]
            return work.crop(image), sample["label"]

    return CroppedDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A loader of another library.

    Attributes:
        title: its name, as a row of a table, and what it serves other than random crops of whole pictures.
        package: name for pip; its version is printed with the figures.
        modules: modules to import before the time is taken.
        serve: opens the loader, and returns a function that starts an epoch.
        reads: a format of `precache convert`, or the name of the peer whose `write` makes its data.
        write: writes pictures into a folder by so many workers; None: another peer, or `precache`, does.
        whole: whether it stores whole pictures, not squares of raw pixels.
    """

    title: str
    package: str
    modules: tuple[str, ...]
    serve: Callable[[Work], StartEpoch]
    reads: str
    write: Callable[[PictureDataset, Path, int], None] | None = None
    whole: bool = False


PEERS = {
    "webdataset": Peer(
        title="WebDataset library, squares, centre crops",
        package="webdataset",
        modules=("webdataset", "PIL.Image"),
        serve=serve_webdataset,
        reads="webdataset",
    ),
    "ffcv": Peer(
        title="FFCV, squares, centre crops",
        package="ffcv",
        modules=("ffcv",),
        serve=serve_ffcv,
        reads="ffcv",
        write=write_ffcv,
    ),
    "ffcv-crops": Peer(
        title="FFCV",
        package="ffcv",
        modules=("ffcv",),
        serve=serve_ffcv_crops,
        reads="ffcv-crops",
        write=write_ffcv_whole,
        whole=True,
    ),
    "ffcv-square-crops": Peer(
        title="FFCV, squares",
        package="ffcv",
        modules=("ffcv",),
        serve=serve_ffcv_crops,
        reads="ffcv",
    ),
    "ffcv-imagenet": Peer(
        title="FFCV, photographs",
        package="ffcv",
        modules=("ffcv",),
        serve=serve_ffcv_crops,
        reads="ffcv-imagenet",
        write=write_ffcv_imagenet,
        whole=True,
    ),
    "litdata": Peer(
        title="LitData, squares, centre crops",
        package="litdata",
        modules=("litdata",),
        serve=serve_litdata,
        reads="litdata",
        write=write_litdata,
    ),
    "mds": Peer(
        title="MosaicML Streaming, squares, centre crops",
        package="mosaicml-streaming",
        modules=("streaming",),
        serve=serve_mds,
        reads="mds",
        write=write_mds,
    ),
}
SQUARE_WRITERS = tuple(name for name, peer in PEERS.items() if peer.write is not None and not peer.whole)
"""Names of the peers that write squares of raw pixels."""


def version(peer: Peer) -> str:
    """Return the library's name and version; PeerError, with the command to install it, if it is missing."""
    try:
        for module in peer.modules:
            importlib.import_module(module)
    except ImportError as error:
        raise PeerError(
            f"{sys.executable} lacks {peer.package} ({error}); run: "
            f"{shlex.quote(sys.executable)} -m pip install {peer.package}"
        ) from error
    return f"{peer.package} {metadata.version(peer.package)}"


@dataclass(frozen=True, slots=True)
class EpochTime:
    """What an epoch took, from the start of its iteration.

    Attributes:
        first_batch_s: seconds to its first batch, in which some libraries compile.
        images_per_s: its pictures over the seconds to its last batch.
    """

    first_batch_s: float
    images_per_s: float


def time_epoch(batches: Epoch) -> EpochTime:
    """Serve an epoch of any loader, and time it."""
    served, first_batch_s = 0, 0.0
    start_s = time.perf_counter()
    for images, _ in batches:
        first_batch_s = first_batch_s or time.perf_counter() - start_s
        served += len(images)
    return EpochTime(first_batch_s, served / (time.perf_counter() - start_s))


def checked(batches: Epoch, size: int) -> Epoch:
    """Yield the batches of an epoch; PeerError if images are not uint8 of `size`, or lack a label."""
    forms = ((size, size, 3, "uint8"), (3, size, size, "uint8"))
    for images, labels in batches:
        form = (*images.shape[1:], str(images.dtype).removeprefix("torch."))
        if form not in forms or len(images) != len(labels):
            raise PeerError(f"served {len(images)} pictures of {form} with {len(labels)} labels")
        yield images, labels


def main() -> None:
    """Run the command line, and print its answer as JSON: results, or {"refused": reason}."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)

    commands.add_parser("version").add_argument("name", choices=PEERS)

    write = commands.add_parser("write")
    write.add_argument("name", choices=[name for name, peer in PEERS.items() if peer.write is not None])
    write.add_argument("pictures", type=Path, help="JSON: a list of paths, and a list of labels")
    write.add_argument("folder", type=Path, help="is made")
    write.add_argument("--size", type=int, required=True)
    write.add_argument("--workers", type=int, required=True)

    serve = commands.add_parser("serve")
    serve.add_argument("name", choices=PEERS)
    serve.add_argument("folder", type=Path)
    serve.add_argument("--stored", type=int, required=True, help="side of the stored squares, pixels")
    serve.add_argument("--size", type=int, required=True, help="side of the served squares, pixels")
    serve.add_argument("--batch-size", type=int, required=True)
    serve.add_argument("--workers", type=int, required=True)
    serve.add_argument("--epochs", type=int, required=True)

    try:
        answer = run(parser.parse_args())
    except PeerError as error:
        answer = {"refused": str(error)}
    print("\n" + json.dumps(answer), flush=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the command that `options` name, and return its answer, which has the library's version."""
    peer = PEERS[options.name]
    answer: dict[str, Any] = {"version": version(peer)}
    if options.command == "write":
        assert peer.write is not None
        paths, labels = json.loads(options.pictures.read_text(encoding="utf-8"))
        options.folder.mkdir(parents=True)
        peer.write(PictureDataset(paths, labels, options.size), options.folder, options.workers)
    if options.command == "serve":
        work = Work(options.folder, options.stored, options.size, options.batch_size, options.workers)
        start_epoch = peer.serve(work)
        times = [time_epoch(checked(start_epoch(), work.size)) for _ in range(options.epochs)]
        answer["epochs"] = [asdict(epoch) for epoch in times]
    return answer


if __name__ == "__main__":
    main()
