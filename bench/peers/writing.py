"""How other libraries convert the same tree: what `bench convert --against` runs, a process each.

    python bench/peers/writing.py ffcv SRC DST --size 256 --quality 95 --workers 2

Each writer is used as its documentation shows it, on all CPUs, and is handed squares that Pillow made:
decoded, RGB, cropped, resized with Lanczos as ours. This file imports nothing of ours, so that it also runs
in another virtual environment, for these libraries pin versions.
"""

import argparse
import io
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

SHARD_BYTES = 64 * 2**20


class Pictures:
    """Every file of every class folder, as a map-style dataset of (uint8 [size, size, 3] RGB, label)."""

    def __init__(self, source: Path, size: int, quality: int) -> None:
        folders = sorted(path for path in source.iterdir() if path.is_dir())
        files = [(file, label) for label, folder in enumerate(folders) for file in sorted(folder.iterdir())]
        self.paths, self.labels = [file for file, _ in files], [label for _, label in files]
        self.size, self.quality = size, quality

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        return np.asarray(self.square(index)), self.labels[index]

    def square(self, index: int) -> Image.Image:
        """The picture as a square."""
        image = Image.open(self.paths[index]).convert("RGB")
        return ImageOps.fit(image, (self.size, self.size), Image.Resampling.LANCZOS)

    def jpeg(self, index: int) -> bytes:
        """The same as a JPEG."""
        file = io.BytesIO()
        subsampling = 0 if self.quality >= 95 else 2
        self.square(index).save(file, "JPEG", quality=self.quality, subsampling=subsampling)
        return file.getvalue()


def write_ffcv(pictures: Pictures, destination: Path, workers: int, *, mode: str) -> None:
    """One `.beton` file, of raw pixels or of JPEGs: https://docs.ffcv.io/writing_datasets.html."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=pictures.quality), "label": IntField()}
    DatasetWriter(str(destination / "data.beton"), fields, num_workers=workers).from_indexed_dataset(pictures)


def _litdata_sample(pictures: Pictures, index: int) -> dict[str, Any]:
    return {"image": pictures[index][0], "label": pictures.labels[index]}


def write_litdata(pictures: Pictures, destination: Path, workers: int) -> None:
    """Chunks of raw pixels: https://github.com/Lightning-AI/litData."""
    import litdata

    with tempfile.TemporaryDirectory() as caches:
        # it empties its caches, /tmp/data and /tmp/chunks unless told otherwise, whatever lies there
        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{caches}/chunks"
        os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = f"{caches}/data"
        litdata.optimize(
            fn=partial(_litdata_sample, pictures),
            inputs=list(range(len(pictures))),
            output_dir=str(destination),
            chunk_bytes=SHARD_BYTES,
            num_workers=workers,
        )


def _write_mds(pictures: Pictures, part: Sequence[int], destination: Path) -> None:
    from streaming import MDSWriter

    columns = {"image": f"ndarray:uint8:{pictures.size},{pictures.size},3", "label": "int"}
    with MDSWriter(out=str(destination), columns=columns, size_limit=SHARD_BYTES) as writer:
        for pixels, label in (pictures[index] for index in part):
            writer.write({"image": pixels, "label": label})


def write_mds(pictures: Pictures, destination: Path, workers: int) -> None:
    """Shards of raw pixels, the indices merged: https://docs.mosaicml.com/projects/streaming."""
    from streaming.base.util import merge_index

    _in_processes(_write_mds, pictures, destination, workers)
    merge_index(str(destination), keep_local=True)


def _write_tars(pictures: Pictures, part: Sequence[int], destination: Path) -> None:
    import webdataset

    rows = SHARD_BYTES // (pictures.size**2 * 3)  # as many samples in a tar as the others have in a shard
    destination.mkdir()
    with webdataset.ShardWriter(f"{destination}/%05d.tar", maxcount=rows, verbose=0) as writer:
        for index in part:
            sample = {"jpg": pictures.jpeg(index), "cls": pictures.labels[index]}
            writer.write({"__key__": f"{index:08d}", **sample})


def write_webdataset(pictures: Pictures, destination: Path, workers: int) -> None:
    """Tars of JPEGs: https://github.com/webdataset/webdataset."""
    _in_processes(_write_tars, pictures, destination, workers)


def _in_processes(
    write: Callable[[Pictures, Sequence[int], Path], None],
    pictures: Pictures,
    destination: Path,
    workers: int,
) -> None:
    """`write` a near-equal part of the pictures in each of `workers` processes, into a folder of its own."""
    parts = [range(rank, len(pictures), workers) for rank in range(workers)]
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(partial(write, pictures), parts, [destination / str(part.start) for part in parts]))


def write_npy(pictures: Pictures, destination: Path, workers: int) -> None:
    """images.npy, uint8 [n, size, size, 3], and labels.npy, int64 [n]; by threads."""
    shape = (len(pictures), pictures.size, pictures.size, 3)
    images = np.lib.format.open_memmap(str(destination / "images.npy"), "w+", np.uint8, shape)

    def write_one(index: int) -> None:
        images[index] = np.asarray(pictures.square(index))

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(write_one, range(len(pictures))):
            pass
    images.flush()
    np.save(destination / "labels.npy", np.array(pictures.labels, np.int64))


WRITERS: dict[str, Callable[[Pictures, Path, int], None]] = {
    "ffcv": partial(write_ffcv, mode="raw"),
    "ffcv-jpeg": partial(write_ffcv, mode="jpg"),
    "litdata": write_litdata,
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
    pictures = Pictures(options.source, options.size, options.quality)
    WRITERS[options.writer](pictures, options.destination, options.workers)


if __name__ == "__main__":
    main()
