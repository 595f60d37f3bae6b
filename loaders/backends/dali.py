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
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch

from loaders.augment.cpu import Crops
from loaders.backends.dali_input import prepare
from loaders.backends.filler import BatchFiller, Pictures
from loaders.backends.integrity import SampleCheck
from loaders.backends.sequential import EncodedShards
from loaders.batch import DecodedBatch, Request
from loaders.dataset import RAW, SplitData
from loaders.delivery.devices import Borrowed
from loaders.delivery.threads import Pool
from loaders.settings import LoaderSpec
from precache import images, jpeg
from precache.errors import DatasetError, ImageError, MissingDependencyError, SettingError
from precache.jpeg import Pixels
from precache.packages import dali_package
from precache.pictures.sizes import sides

_QUEUE_BATCHES = 2
# What a pipeline takes for each picture: its bytes alone, the box that is resized, the box that is cut out.
_ENCODED, _RESIZED, _BOXED = "encoded", "resized", "boxed"


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> "DaliReader":
    """A reader over `data`: a raw tree, or a folder of format `dali` or `webdataset`."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"backend 'dali' needs NVIDIA DALI; install it with 'pip install {dali_package()}', or the build "
            f"that 'precache doctor' names"
        ) from error
    if crops.stored is None and crops.views > 1:
        raise SettingError(
            f"backend 'dali' draws one view of pictures of varying size, as {data.path} holds, not "
            f"{crops.views}; convert to tars and use backend 'webdataset'"
        )
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
        # Random crops are taken here on the CPU, as those of a cache are; all else is DALI's work.
        self._fills = crops.random is not None and spec.device.type == "cpu"
        self._size = crops.stored if self._fills else crops.size
        if self.random_access:
            self._inputs = _RESIZED
        else:
            self._inputs = _BOXED if crops.stored is None and self._size is not None else _ENCODED
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
                    yield self._serve(None, self._in_pipeline.popleft())
                    pipeline = self._build()
                except RuntimeError as error:
                    self._drop_refused(error)
                    pipeline = self._build()
                else:
                    whole = self._size is None
                    pictures = map(outputs.take, output) if whole else outputs.take(output.as_tensor())
                    yield self._serve(pictures, self._in_pipeline.popleft())
        finally:
            self._feed.close()
            outputs.give_back()

    def close(self) -> None:
        """End the threads; the pipeline goes with the `read` that built it."""
        self._filler.close()

    def _serve(self, pictures: torch.Tensor | Iterable[torch.Tensor] | None, batch: _Encoded) -> DecodedBatch:
        """`pictures`: what the pipeline made of those of `batch`; None if there are none."""
        request = batch.request.select([picture.slot for picture in batch.pictures])
        positions = request.positions
        if pictures is None:
            shape = (0,) if self._crops.size is None else (0, *sides(self._crops.size), self._data.channels)
            pictures = torch.empty(shape, dtype=torch.uint8)
        elif self._fills:
            arrays = [picture.numpy() for picture in pictures]
            decoded = self._filler.fill(Pictures(request, partial(_rows, arrays)))
            return replace(decoded, refused=batch.refused)
        elif not isinstance(pictures, torch.Tensor):
            pictures = torch.cat([picture.flatten() for picture in pictures])
        labels, ids = self._data.labels[positions], self._data.ids[positions]
        return DecodedBatch(pictures, torch.from_numpy(labels), torch.from_numpy(ids), batch.refused)

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
            dtypes = {
                _RESIZED: [types.UINT8, types.FLOAT, types.FLOAT],
                _BOXED: [types.UINT8, types.INT32, types.INT32, types.INT32],
            }.get(self._inputs, [types.UINT8])
            encoded, *box = fn.external_source(
                source=self._next_input, num_outputs=len(dtypes), dtype=dtypes, batch=True
            )
            decoded = fn.decoders.image(
                encoded,
                device="mixed" if on_gpu else "cpu",
                output_type=types.GRAY if self._data.channels == 1 else types.RGB,
                jpeg_fancy_upsampling=True,  # as Pillow decodes
            )
            pipeline.set_outputs(self._part(decoded, box))
        pipeline.build()
        _pipelines.add(pipeline)
        return pipeline

    def _part(self, decoded: Any, box: list[Any]) -> Any:
        """What is served of the `decoded` pictures of a pipeline that is being made."""
        from nvidia.dali import fn, types

        if self._size is None:
            return decoded
        linear = {"size": sides(self._size), "interp_type": types.INTERP_LINEAR}
        if self._inputs == _RESIZED:
            return fn.resize(decoded, roi_start=box[0], roi_end=box[1], antialias=True, **linear)
        if self._inputs == _BOXED:
            part = fn.slice(decoded, *box[:2], axes=(0, 1), out_of_bounds_policy="pad", fill_values=0)
            if self._crops.random is not None:
                part = fn.resize(part, antialias=False, **linear)  # as `loaders.augment.cpu.place`
            return fn.flip(part, horizontal=box[2])
        height, width = sides(self._size)
        y, x = (
            images.centre_offset(stored, side) / max(1, stored - side)
            for stored, side in zip(sides(self._data.size), (height, width), strict=True)
        )
        return fn.crop(decoded, crop=(height, width), crop_pos_x=x, crop_pos_y=y)

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
                    assert self._size is not None  # of a raw tree
                    inputs = prepare(content, file, self._size)
                except ImageError as error:
                    batch.refused[sample_id] = error
                else:
                    batch.pictures.append(_Picture(content, file, slot, sample_id, inputs))
            yield batch

    def _read_shards(self, requests: Iterator[Request]) -> Generator[_Encoded, None, None]:
        for request, samples in self._shards.read(requests):
            batch = _Encoded(request)
            asked = zip(request.positions.tolist(), samples, self._boxes(request), strict=True)
            for slot, (position, (sample, shard), box) in enumerate(asked):
                assert isinstance(sample.data, bytes)
                file, inputs = f"{shard}: sample {sample.id}", (np.frombuffer(sample.data, np.uint8), *box)
                try:
                    self._sample_check.compare(position, sample.data, sample.damage)
                    # what has its checksum is what the converter wrote
                    if self._spec.reading.check == "never" or file in self._refused_files:
                        self._check_header(position, sample.data, file)
                        self._check(sample.data, file)
                except ImageError as error:
                    batch.refused[sample.id] = error
                else:
                    batch.pictures.append(_Picture(sample.data, file, slot, sample.id, inputs))
            yield batch

    def _boxes(self, request: Request) -> list[tuple[npt.NDArray[Any], ...]]:
        """What the pipeline takes besides each picture: corner and shape of its box, and mirrored or not."""
        if self._inputs != _BOXED:
            return [()] * len(request.positions)
        shapes = self._data.shapes_at(request.positions)
        ids = self._data.ids[request.positions]
        boxes, mirrored = self._crops.of(request.epoch, ids, shapes, request.occurrences)
        rows = np.ascontiguousarray(boxes[:, [1, 0, 3, 2]], np.int32)  # DALI takes no strides
        return [(row[:2], row[2:], flip) for row, flip in zip(rows, mirrored.astype(np.int32), strict=True)]

    def _check_header(self, position: int, content: bytes, file: str) -> None:
        """Raise ImageError for what is no JPEG of its size: DALI 2.4 crashes on some damaged headers."""
        try:
            height, width, *_ = simplejpeg.decode_jpeg_header(content)
        except ValueError as error:
            reason = f"cannot be decoded ({error}); run 'precache verify' on its folder"
            raise ImageError(file, reason) from error
        self._data.check_shape(position, height, width)

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


def _rows(pictures: list[Pixels], slot: int, first: int, space: Pixels) -> Pixels:
    return pictures[slot][first : first + len(space)]


def _refusal(picture: _Picture) -> ImageError | None:
    """Why `precache.images` refuses a picture, or None."""
    try:
        images.decode(picture.content, picture.file)
    except ImageError as error:
        return error
    return None
