"""Backend `dali`: NVIDIA DALI decodes and resizes, on the GPU where the loader's device is one.

The pictures' bytes are read here, in the order that the loader asks for, and handed to a DALI
pipeline: DALI's own readers can neither keep that order nor resume in the middle of an epoch. A raw
tree is resized with the box that `precache.images.fit` takes. What DALI does not convert to RGB as
the reference does (CMYK, transparency, 16 bit) is decoded by `precache.images` and handed over as
pixels.
"""

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import Image
from torch.utils.dlpack import from_dlpack

from loaders.batch import DecodedBatch, LoaderSpec, Request
from loaders.crops import BatchFiller, Crops
from loaders.dataset import RAW, SplitData
from loaders.sequential import EncodedShards
from precache import images
from precache.errors import DatasetError, ImageError, MissingDependencyError
from precache.formats import FORMATS, StoredSample
from precache.images import centre_offset
from precache.jpeg import Pixels

_QUEUE_BATCHES = 2
_EXIF_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> "DaliReader":
    """A reader over `data`: a raw tree, or a folder of format `dali` or `webdataset`."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "backend 'dali' needs NVIDIA DALI; install it with 'pip install nvidia-dali-cuda120'"
        ) from error
    return DaliReader(spec, data, crops)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A batch on its way through the pipeline; `files` name the pictures for error messages."""

    request: Request
    contents: list[bytes]
    files: list[str]


class DaliReader:
    """Builds a pipeline for each `read`: one that is left midway still holds batches of it."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self.random_access = data.kind == RAW
        self._spec = spec
        self._data = data
        self._crops = crops
        # Random crops on the CPU are taken of DALI's squares; the centre is DALI's own work.
        self._size = crops.size if crops.random is None else crops.stored
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)
        if not self.random_access:
            window_shards = data.window_shards(spec.memory_bytes)
            check = spec.check == "first-read"
            self._shards = EncodedShards(data, self._read_shard, window_shards, check=check)
        self._feed: Generator[_Encoded, None, None]
        self._in_pipeline: deque[_Encoded] = deque()

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        self._feed = self._read_raw(requests) if self.random_access else self._read_shards(requests)
        self._in_pipeline.clear()
        pipeline = self._build()
        try:
            while True:
                try:
                    (output,) = pipeline.run()
                except StopIteration:
                    return
                except RuntimeError as error:
                    raise self._explain(error) from error
                yield self._serve(output, self._in_pipeline.popleft().request)
        finally:
            self._feed.close()

    def _serve(self, output: Any, request: Request) -> DecodedBatch:
        # shared, not copied: DALI's dynamic executor leaves an output alone while torch has it
        squares = from_dlpack(output.as_tensor())
        if self._crops.random is None:
            return DecodedBatch(
                squares,
                torch.from_numpy(self._data.labels[request.positions]),
                torch.from_numpy(self._data.ids[request.positions]),
            )
        pixels = squares.numpy()

        def rows_of(slot: int, first: int, count: int) -> Pixels:
            rows: Pixels = pixels[slot, first : first + count]
            return rows

        return self._filler.fill(request, rows_of)

    def close(self) -> None:
        """End the threads; the pipeline goes with the `read` that built it."""
        self._filler.close()

    def _build(self) -> Any:
        from nvidia.dali import Pipeline, fn, types

        device = self._spec.device
        on_gpu = device.type == "cuda"
        pipeline = Pipeline(
            batch_size=self._spec.batch_size,
            num_threads=max(1, self._spec.workers),
            device_id=(device.index or 0) if on_gpu else None,
            prefetch_queue_depth=_QUEUE_BATCHES,
            exec_dynamic=True,
        )
        with pipeline:
            dtypes = [types.UINT8, types.FLOAT, types.FLOAT] if self.random_access else [types.UINT8]
            encoded, *box = fn.external_source(
                source=self._next_input, num_outputs=len(dtypes), dtype=dtypes, batch=True
            )
            decoded = fn.decoders.image(
                encoded,
                device="mixed" if on_gpu else "cpu",
                output_type=types.RGB,
                jpeg_fancy_upsampling=True,  # as Pillow decodes
            )
            if box:
                served = fn.resize(
                    decoded,
                    size=(self._size, self._size),
                    roi_start=box[0],
                    roi_end=box[1],
                    interp_type=types.INTERP_LINEAR,
                    antialias=True,
                )
            else:
                margin = self._data.size - self._size
                position = centre_offset(self._data.size, self._size) / max(1, margin)
                served = fn.crop(
                    decoded, crop=(self._size, self._size), crop_pos_x=position, crop_pos_y=position
                )
            pipeline.set_outputs(served)
        pipeline.build()
        return pipeline

    def _next_input(self) -> tuple[list[npt.NDArray[Any]], ...]:
        """What `external_source` takes for one batch; its StopIteration ends the run."""
        batch = next(self._feed)
        self._in_pipeline.append(batch)
        if not self.random_access:
            return ([np.frombuffer(content, np.uint8) for content in batch.contents],)
        inputs = [_prepare(*picture, self._size) for picture in zip(batch.contents, batch.files, strict=True)]
        contents, starts, ends = zip(*inputs, strict=True)
        return list(contents), list(starts), list(ends)

    def _read_raw(self, requests: Iterator[Request]) -> Generator[_Encoded, None, None]:
        for request in requests:
            files = [self._data.files[position] for position in request.positions]
            yield _Encoded(request, [images.read_bytes(file) for file in files], files)

    def _read_shards(self, requests: Iterator[Request]) -> Generator[_Encoded, None, None]:
        for request, samples in self._shards.read(requests):
            encoded = _Encoded(
                request,
                [sample.data for sample, _ in samples if isinstance(sample.data, bytes)],
                [f"{shard}: sample {sample.id}" for sample, shard in samples],
            )
            for content, file in zip(encoded.contents, encoded.files, strict=True):
                _check_header(content, file, self._data.size)
            yield encoded

    def _read_shard(self, path: str) -> list[StoredSample]:
        return list(FORMATS[self._data.kind].read_shard(Path(path)))

    def _explain(self, error: RuntimeError) -> Exception:
        """The ImageError of the picture that DALI refused, if the reference refuses it too."""
        for batch in self._in_pipeline:
            for content, file in zip(batch.contents, batch.files, strict=True):
                try:
                    images.decode(content, file)
                except ImageError as image_error:
                    return image_error
        return DatasetError(f"{self._data.path}: DALI cannot decode a picture of it: {error}")


def _check_header(content: bytes, file: str, size: int) -> None:
    """Raise ImageError for what is no JPEG of `size`: DALI 2.4 crashes on some damaged headers."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(content)
    except ValueError as error:
        raise ImageError(file, f"cannot be decoded ({error}); run 'precache verify' on its folder") from error
    if (height, width) != (size, size):
        raise ImageError(
            file, f"is {width}x{height}, expected {size}x{size}; run 'precache verify' on its folder"
        )


def _prepare(content: bytes, file: str, size: int) -> tuple[npt.NDArray[Any], ...]:
    """(encoded picture, start, end): what DALI decodes, and the (y, x) box that it resizes."""
    width, height, plain = _upright_size(content)
    if not plain:
        pixels = images.decode(content, file)
        width, height = pixels.size
        content = b"P6 %d %d 255\n" % pixels.size + pixels.tobytes()  # PPM: DALI reads it as it is
    left, top, right, bottom = images.crop_box(width, height, size)
    return (
        np.frombuffer(content, np.uint8),
        np.array([top, left], np.float32),
        np.array([bottom, right], np.float32),
    )


def _upright_size(content: bytes) -> tuple[int, int, bool]:
    """Width, height, and whether DALI decodes this to the reference's RGB: grey or YCbCr JPEG."""
    try:
        with Image.open(BytesIO(content)) as picture:
            width, height = picture.size
            plain = picture.format in ("JPEG", "MPO") and picture.mode in ("RGB", "L")
            orientation = picture.getexif().get(_EXIF_ORIENTATION, 1)
            if orientation in _SIDEWAYS:
                width, height = height, width
            if orientation != 1 and "exif" not in picture.info:
                plain = False  # it stands in XMP, which Pillow reads and DALI does not
            return width, height, plain
    except Exception:  # images.decode says what is wrong with it
        return 0, 0, False
