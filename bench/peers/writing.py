"""How other libraries convert the same tree: what `bench convert --against` runs, a process each.

    python bench/peers/writing.py ffcv SRC DST --size 256 --quality 95 --workers 2

Each writer is used as its documentation shows it, on all CPUs, on the pictures that a Pillow user
would give it: decode, convert to RGB, `Resize(size)`, `CenterCrop(size)`. This file imports nothing of
ours, so that it also runs in another virtual environment, for these libraries pin versions.

copy          each file to DST, by threads: what any conversion that keeps the bytes is held against
ffcv          DatasetWriter, raw pixels         https://docs.ffcv.io/writing_datasets.html
ffcv-jpeg     DatasetWriter, JPEGs
litdata       optimize, raw pixels              https://github.com/Lightning-AI/litData
litdata-jpeg  optimize, JPEGs
mds           MDSWriter, raw pixels             https://docs.mosaicml.com/projects/streaming
npy           one array of all pixels, mapped   https://numpy.org/doc/stable/reference/generated/numpy.lib.format.open_memmap.html
webdataset    ShardWriter, JPEG and label       https://github.com/webdataset/webdataset
"""

import argparse
import io
import multiprocessing
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

SHARD_BYTES = 64 * 2**20
Picture = tuple[str, int]
"""Path and label."""


def list_pictures(source: Path) -> list[Picture]:
    """Every file of every class folder, with the class's rank."""
    folders = sorted(path for path in source.iterdir() if path.is_dir())
    return [(str(file), label) for label, folder in enumerate(folders) for file in sorted(folder.iterdir())]


def read(path: str, size: int) -> Image.Image:
    """Decode, then torchvision's `Resize(size)`, with Lanczos as ours, and `CenterCrop(size)`, by Pillow."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    scale = size / min(width, height)
    width, height = max(size, int(width * scale)), max(size, int(height * scale))
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Image.Resampling.LANCZOS)
    return resized.crop((left, top, left + size, top + size))


class Pictures:
    """A map-style dataset of (pixels, label); pixels are uint8 [size, size, 3], RGB."""

    def __init__(self, pictures: list[Picture], size: int) -> None:
        self._pictures, self._size = pictures, size

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        path, label = self._pictures[index]
        return np.asarray(read(path, self._size)), label


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling=0 if quality >= 95 else 2)
    return file.getvalue()


def write_ffcv(
    pictures: list[Picture], destination: Path, size: int, quality: int, workers: int, *, mode: str
) -> None:
    """One `.beton` file, of raw pixels or of JPEGs."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=quality), "label": IntField()}
    writer = DatasetWriter(str(destination / "data.beton"), fields, num_workers=workers)
    writer.from_indexed_dataset(Pictures(pictures, size))


def _litdata_pixels(size: int, quality: int, picture: Picture) -> dict[str, Any]:
    path, label = picture
    return {"image": np.asarray(read(path, size)), "label": label}


def _litdata_jpeg(size: int, quality: int, picture: Picture) -> dict[str, Any]:
    from litdata.types import Jpeg

    path, label = picture
    return {"image": Jpeg(bytes=_jpeg(read(path, size), quality)), "label": label}


def write_litdata(
    pictures: list[Picture],
    destination: Path,
    size: int,
    quality: int,
    workers: int,
    *,
    sample: Callable[[int, int, Picture], dict[str, Any]],
) -> None:
    """Chunks of what `sample` gives for size, quality and picture."""
    import litdata

    litdata.optimize(
        fn=partial(sample, size, quality),
        inputs=pictures,
        output_dir=str(destination),
        chunk_bytes=SHARD_BYTES,
        num_workers=workers,
    )


def _write_mds(pictures: list[Picture], destination: Path, size: int) -> None:
    from streaming import MDSWriter

    columns = {"image": f"ndarray:uint8:{size},{size},3", "label": "int"}
    with MDSWriter(out=str(destination), columns=columns, size_limit=SHARD_BYTES) as writer:
        for pixels, label in (Pictures(pictures, size)[index] for index in range(len(pictures))):
            writer.write({"image": pixels, "label": label})


def write_mds(pictures: list[Picture], destination: Path, size: int, quality: int, workers: int) -> None:
    """Shards of raw pixels: a process and a folder per worker, the indices merged."""
    from streaming.base.util import merge_index

    _in_processes(partial(_write_mds, size=size), pictures, destination, workers)
    merge_index(str(destination), keep_local=True)


def _write_webdataset(pictures: list[Picture], destination: Path, size: int, quality: int) -> None:
    import webdataset

    rows = SHARD_BYTES // (size * size * 3)  # as many samples in a tar as the others have in a shard
    destination.mkdir()
    with webdataset.ShardWriter(f"{destination}/%05d.tar", maxcount=rows, verbose=0) as writer:
        for index, (path, label) in enumerate(pictures):
            writer.write({"__key__": f"{index:08d}", "jpg": _jpeg(read(path, size), quality), "cls": label})


def write_webdataset(
    pictures: list[Picture], destination: Path, size: int, quality: int, workers: int
) -> None:
    """Tars of JPEGs: a process and a folder per worker."""
    _in_processes(partial(_write_webdataset, size=size, quality=quality), pictures, destination, workers)


def write_npy(pictures: list[Picture], destination: Path, size: int, quality: int, workers: int) -> None:
    """images.npy, uint8 [n, size, size, 3], and labels.npy, int64 [n]; by threads."""
    shape = (len(pictures), size, size, 3)
    images = np.lib.format.open_memmap(str(destination / "images.npy"), "w+", np.uint8, shape)

    def write_one(index: int) -> None:
        images[index] = np.asarray(read(pictures[index][0], size))

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(write_one, range(len(pictures))):
            pass
    images.flush()
    np.save(destination / "labels.npy", np.array([label for _, label in pictures], np.int64))


def copy(pictures: list[Picture], destination: Path, size: int, quality: int, workers: int) -> None:
    """The files themselves, class folder by class folder."""
    for folder in {Path(path).parent.name for path, _ in pictures}:
        (destination / folder).mkdir()

    def copy_one(picture: Picture) -> None:
        path = Path(picture[0])
        shutil.copyfile(path, destination / path.parent.name / path.name)

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(copy_one, pictures):
            pass


def _in_processes(
    write: Callable[[list[Picture], Path], None], pictures: list[Picture], destination: Path, workers: int
) -> None:
    """`write` a near-equal part of the pictures in each of `workers` processes."""
    processes = [
        multiprocessing.Process(target=write, args=(pictures[rank::workers], destination / str(rank)))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a writing process failed")


WRITERS: dict[str, Callable[[list[Picture], Path, int, int, int], None]] = {
    "copy": copy,
    "ffcv": partial(write_ffcv, mode="raw"),
    "ffcv-jpeg": partial(write_ffcv, mode="jpg"),
    "litdata": partial(write_litdata, sample=_litdata_pixels),
    "litdata-jpeg": partial(write_litdata, sample=_litdata_jpeg),
    "mds": write_mds,
    "npy": write_npy,
    "webdataset": write_webdataset,
}


def main() -> None:
    """Convert SRC to the missing folder DST with the library that is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("writer", choices=sorted(WRITERS))
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--quality", type=int, default=95)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    options.destination.mkdir(parents=True)
    write = WRITERS[options.writer]
    pictures = list_pictures(options.source)
    write(pictures, options.destination, options.size, options.quality, options.workers)


if __name__ == "__main__":
    main()
