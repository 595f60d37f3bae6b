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

from loaders.batch import DecodedBatch, LoaderSpec, Positions
from loaders.dataset import RAW, SplitData
from loaders.encoded import read_batches
from precache import images
from precache.errors import DatasetError, ImageError, MissingDependencyError
from precache.formats import FORMATS, StoredSample

_QUEUE_BATCHES = 2
_EXIF_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


def open_reader(spec: LoaderSpec, data: SplitData, size: int) -> "DaliReader":
    """A reader over `data`: a raw tree, or a folder of format `dali` or `webdataset`."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "backend 'dali' needs NVIDIA DALI; install it with 'pip install nvidia-dali-cuda120'"
        ) from error
    return DaliReader(spec, data, size)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A batch on its way through the pipeline; `files` name the pictures for error messages."""

    contents: list[bytes]
    files: list[str]
    labels: torch.Tensor
    ids: torch.Tensor


class DaliReader:
    """Builds a pipeline for each `read`: one that is left midway still holds batches of it."""

    def __init__(self, spec: LoaderSpec, data: SplitData, size: int) -> None:
        self.random_access = data.kind == RAW
        self._spec = spec
        self._data = data
        self._size = size
        on_gpu = spec.device.type == "cuda"
        self._stream = torch.cuda.Stream(spec.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._feed: Generator[_Encoded, None, None]
        self._in_pipeline: deque[_Encoded] = deque()

    def read(self, batches: Iterator[Positions]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per array of positions."""
        self._feed = self._read_raw(batches) if self.random_access else self._read_shards(batches)
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
                batch = self._in_pipeline.popleft()
                yield DecodedBatch(self._to_torch(output), batch.labels, batch.ids)
        finally:
            self._feed.close()

    def close(self) -> None:
        """Nothing to free: the pipeline goes with the `read` that built it."""

    def _build(self) -> Any:
        from nvidia.dali import Pipeline, fn, types

        device = self._spec.device
        on_gpu = device.type == "cuda"
        pipeline = Pipeline(
            batch_size=self._spec.batch_size,
            num_threads=max(1, self._spec.workers),
            device_id=(device.index or 0) if on_gpu else None,
            prefetch_queue_depth=_QUEUE_BATCHES,
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
                position = self._data.centre_crop(self._size).start / max(1, margin)
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

    def _read_raw(self, batches: Iterator[Positions]) -> Generator[_Encoded, None, None]:
        for positions in batches:
            files = [self._data.files[position] for position in positions]
            labels, ids = self._data.labels[positions], self._data.ids[positions]
            contents = [images.read_bytes(file) for file in files]
            yield _Encoded(contents, files, torch.from_numpy(labels), torch.from_numpy(ids))

    def _read_shards(self, batches: Iterator[Positions]) -> Generator[_Encoded, None, None]:
        read_shard = FORMATS[self._data.kind].read_shard

        def read(path: str) -> list[StoredSample]:
            return list(read_shard(Path(path)))

        for samples in read_batches(self._data, batches, read, check=self._spec.check == "first-read"):
            encoded = _Encoded(
                [sample.data for sample, _ in samples if isinstance(sample.data, bytes)],
                [f"{shard}: sample {sample.id}" for sample, shard in samples],
                torch.tensor([sample.label for sample, _ in samples]),
                torch.tensor([sample.id for sample, _ in samples]),
            )
            for content, file in zip(encoded.contents, encoded.files, strict=True):
                _check_header(content, file, self._data.size)
            yield encoded

    def _to_torch(self, output: Any) -> torch.Tensor:
        """A copy of DALI's output, uint8 [n, size, size, 3]: DALI reuses its buffers."""
        from nvidia.dali.plugin.pytorch import feed_ndarray

        dense = output.as_tensor()
        device = self._spec.device
        # A stream of its own: waiting for the copy must not mean waiting for the training step.
        # None, that is none, on the CPU.
        with torch.cuda.stream(self._stream):
            copy = torch.empty(tuple(dense.shape()), dtype=torch.uint8, device=device)
            feed_ndarray(dense, copy, cuda_stream=self._stream)
        if self._stream is not None:
            self._stream.synchronize()
        return copy

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
