"""Backend `dali`: NVIDIA DALI decodes and resizes, on the GPU where the loader's device is one.

The pictures' bytes are read here, in the order that the loader asks for, and handed to a DALI
pipeline: DALI's own readers can neither keep that order nor resume in the middle of an epoch. A raw
tree is resized with the box that `precache.images.fit` takes. What DALI does not convert to RGB as
the reference does (CMYK, transparency, 16 bit) is decoded by `precache.images` and handed over as
pixels.

DALI cannot leave a picture out of a batch. One that `precache.images` refuses is kept from the pipeline,
or, if only DALI finds it, dropped: then the pipeline is built anew and gets the same batches again. A
JPEG whose data is damaged, but ends as it should, DALI decodes to what it makes of it, without a word;
`precache check` finds these.
"""

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import Image

from loaders.augment.cpu import Crops
from loaders.backends.filler import BatchFiller, Pictures
from loaders.backends.integrity import SampleCheck
from loaders.backends.sequential import EncodedShards
from loaders.batch import DecodedBatch, Request
from loaders.dataset import RAW, SplitData
from loaders.devices import Borrowed
from loaders.settings import LoaderSpec
from loaders.threads import Pool
from precache import images, jpeg
from precache.errors import DatasetError, ImageError, MissingDependencyError
from precache.jpeg import Pixels
from precache.packages import dali_package
from precache.reading import MAX_PIXELS

_QUEUE_BATCHES = 2
_EXIF_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> "DaliReader":
    """A reader over `data`: a raw tree, or a folder of format `dali` or `webdataset`."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"backend 'dali' needs NVIDIA DALI; install it with 'pip install {dali_package()}', or the build "
            f"that 'precache doctor' names"
        ) from error
    return DaliReader(spec, data, crops)


@dataclass(frozen=True, slots=True)
class _Picture:
    """One picture of a batch.

    Attributes:
        content: as it is stored.
        file: its name for error messages.
        slot: its number in what was asked for.
        inputs: what the pipeline takes for it.
    """

    content: bytes
    file: str
    slot: int
    id: int
    inputs: tuple[npt.NDArray[Any], ...]


@dataclass(slots=True)
class _Encoded:
    """A batch on its way through the pipeline, and what was kept from it: id -> why."""

    request: Request
    pictures: list[_Picture] = field(default_factory=list)
    refused: dict[int, ImageError] = field(default_factory=dict)


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
            window_shards = data.window_shards(spec.reading.memory_bytes)
            self._sample_check = SampleCheck(data, spec.reading.check)
            self._shards = EncodedShards(data, window_shards, self._sample_check)
        self._feed: Generator[_Encoded, None, None]
        self._in_pipeline: deque[_Encoded] = deque()
        self._again: deque[_Encoded] = deque()  # were in a pipeline that failed
        self._refused_files: set[str] = set()  # by DALI

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        self._feed = self._read_raw(requests) if self.random_access else self._read_shards(requests)
        self._in_pipeline.clear()
        self._again.clear()
        pipeline = self._build()
        outputs = Borrowed()
        try:
            while True:
                try:
                    (output,) = pipeline.run()
                except StopIteration:
                    if not self._in_pipeline:
                        return
                    nothing = torch.empty((0, self._size, self._size, 3), dtype=torch.uint8)
                    yield self._serve(nothing, self._in_pipeline.popleft())
                    pipeline = self._build()
                except RuntimeError as error:
                    self._drop_refused(error)
                    pipeline = self._build()
                else:
                    yield self._serve(outputs.take(output.as_tensor()), self._in_pipeline.popleft())
        finally:
            self._feed.close()
            outputs.give_back()

    def close(self) -> None:
        """End the threads; the pipeline goes with the `read` that built it."""
        self._filler.close()

    def _serve(self, squares: torch.Tensor, batch: _Encoded) -> DecodedBatch:
        request = batch.request.select([picture.slot for picture in batch.pictures])
        positions = request.positions
        if self._crops.random is not None:
            decoded = self._filler.fill(Pictures(request, partial(_rows, squares.numpy())))
            return replace(decoded, refused=batch.refused)
        labels, ids = self._data.labels[positions], self._data.ids[positions]
        return DecodedBatch(squares, torch.from_numpy(labels), torch.from_numpy(ids), batch.refused)

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
                position = images.centre_offset(self._data.size, self._size) / max(1, margin)
                served = fn.crop(
                    decoded, crop=(self._size, self._size), crop_pos_x=position, crop_pos_y=position
                )
            pipeline.set_outputs(served)
        pipeline.build()
        _pipelines.add(pipeline)
        return pipeline

    def _next_input(self) -> tuple[list[npt.NDArray[Any]], ...]:
        """What `external_source` takes for one batch; StopIteration ends the run."""
        batch = self._again.popleft() if self._again else next(self._feed)
        self._in_pipeline.append(batch)
        if not batch.pictures:
            raise StopIteration  # DALI takes no empty batch: `read` serves it, and begins another run
        columns = zip(*(picture.inputs for picture in batch.pictures), strict=True)
        return tuple(list(column) for column in columns)

    def _read_raw(self, requests: Iterator[Request]) -> Generator[_Encoded, None, None]:
        for request in requests:
            batch = _Encoded(request)
            for slot, position in enumerate(request.positions.tolist()):
                file, sample_id = self._data.files[position], int(self._data.ids[position])
                try:
                    content = images.read_bytes(file)
                    self._check(content, file)
                    inputs = _prepare(content, file, self._size)
                except ImageError as error:
                    batch.refused[sample_id] = error
                else:
                    batch.pictures.append(_Picture(content, file, slot, sample_id, inputs))
            yield batch

    def _read_shards(self, requests: Iterator[Request]) -> Generator[_Encoded, None, None]:
        for request, samples in self._shards.read(requests):
            batch = _Encoded(request)
            positions = request.positions.tolist()
            for slot, (position, (sample, shard)) in enumerate(zip(positions, samples, strict=True)):
                assert isinstance(sample.data, bytes)
                file, inputs = f"{shard}: sample {sample.id}", (np.frombuffer(sample.data, np.uint8),)
                try:
                    self._sample_check.compare(position, sample.data, sample.damage)
                    # what has its checksum is what the converter wrote
                    if self._spec.reading.check == "never" or file in self._refused_files:
                        _check_header(sample.data, file, self._data.size)
                        self._check(sample.data, file)
                except ImageError as error:
                    batch.refused[sample.id] = error
                else:
                    batch.pictures.append(_Picture(sample.data, file, slot, sample.id, inputs))
            yield batch

    def _check(self, content: bytes, file: str) -> None:
        """Raise ImageError for a JPEG that breaks off, and for what DALI refused before."""
        truncated = content.startswith(jpeg.START) and jpeg.breaks_off(content)
        if truncated or file in self._refused_files:
            images.decode(content, file)

    def _drop_refused(self, error: RuntimeError) -> None:
        """Take the pictures that made the pipeline fail out of its batches, and line these up again."""
        dropped = 0
        with closing(Pool(max(1, self._spec.workers), "check")) as pool:
            for batch in self._in_pipeline:
                whys = pool.map(_refusal, batch.pictures)
                for picture, why in zip(batch.pictures, whys, strict=True):
                    if why is not None:
                        batch.refused[picture.id] = why
                        self._refused_files.add(picture.file)
                        dropped += 1
                batch.pictures = [p for p, why in zip(batch.pictures, whys, strict=True) if why is None]
        if not dropped:
            raise DatasetError(f"{self._data.path}: DALI cannot decode a picture of it: {error}") from error
        self._again.extendleft(reversed(self._in_pipeline))
        self._in_pipeline.clear()


# Of this process: a forked one has not their threads, for which DALI would wait at its end, for ever.
_pipelines: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _disown() -> None:
    for pipeline in _pipelines:
        # not even destroyed when all else is: that waits, too
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
        pipeline._pipe = None


os.register_at_fork(after_in_child=_disown)


def _rows(squares: Pixels, slot: int, first: int, space: Pixels) -> Pixels:
    return squares[slot, first : first + len(space)]


def _refusal(picture: _Picture) -> ImageError | None:
    """Why `precache.images` refuses a picture, or None."""
    try:
        images.decode(picture.content, picture.file)
    except ImageError as error:
        return error
    return None


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
        with Image.open(BytesIO(content), formats=("JPEG",)) as picture:  # MPO is a JPEG, too
            width, height = picture.size
            # what is larger is refused by `images.decode`, by name
            plain = picture.mode in ("RGB", "L") and width * height <= MAX_PIXELS
            orientation = picture.getexif().get(_EXIF_ORIENTATION, 1)
            if orientation in _SIDEWAYS:
                width, height = height, width
            if orientation != 1 and "exif" not in picture.info:
                plain = False  # it stands in XMP, which Pillow reads and DALI does not
            return width, height, plain
    except Exception:  # images.decode says what is wrong with it
        return 0, 0, False
