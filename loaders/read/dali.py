"""Backend `dali`: NVIDIA DALI decodes and resizes, on the GPU where the loader's device is one.

This module reads the pictures' bytes in the order that the loader asks for, and hands them to a DALI
pipeline: DALI's own readers can neither keep that order nor resume within an epoch. Pictures that DALI does
not convert to RGB as the other backends do (CMYK, transparency, 16 bit) are decoded by `pictures.images` and
handed over as pixels. The served part of each picture is drawn here, then cut out and resized by DALI.

DALI cannot leave a picture out of a batch. A picture that `pictures.images` refuses is not handed over; if
only DALI refuses it, the pipeline fails, is built anew without it, and gets the same batches again. DALI
decodes a JPEG whose data is damaged, but ends as it should, to some pixels, without an error; `precache
check` finds such files.
"""

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.augment.crops import Crops, View
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.device import BorrowedTensors
from loaders.read.decoding import Encoded, EncodedBatch, EncodedPictures
from loaders.settings import LoaderSpec
from loaders.threads import check_exit
from precache.errors import DatasetError, ImageError, MissingDependencyError
from precache.packages import install_command
from precache.pictures.images import sides
from precache.storage import check_can_open

_QUEUE_BATCHES = 2
_BLACK = np.frombuffer(b"P6 1 1 255\n\0\0\0", np.uint8)  # a PPM of one pixel


@dataclass(frozen=True, slots=True)
class _BatchInPipeline:
    """A batch on its way through the pipeline; `refused`: pictures that were not handed over, by number."""

    request: Request
    pictures: list[Encoded]
    refused: dict[int, ImageError]


class DaliReader:
    """Decodes with a pipeline of its own for each `read`: one that is left midway still holds batches."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        try:
            import nvidia.dali  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                "backend 'dali' needs NVIDIA DALI",
                remedy=f"run: {install_command('dali')}, or for a driver of CUDA 13 or later: "
                f"{install_command('dali-cuda13')}",
            ) from error
        self._spec = spec
        self._data = data
        self._crops = crops
        self._encoded = EncodedPictures(spec, data, spec.workers)
        self.random_access = self._encoded.random_access
        # Bytes with the right checksum are the converter's, and DALI may decode them without a further check.
        self._trusted = not self.random_access and spec.reading.check != "never"
        self._batches: Generator[EncodedBatch, None, None]
        self._in_pipeline: deque[_BatchInPipeline] = deque()
        self._to_repeat: deque[EncodedBatch] = deque()  # batches of a pipeline that failed
        self._refused: set[str] = set()  # paths of pictures that DALI refuses

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        self._batches = self._encoded.read(requests)
        self._in_pipeline.clear()
        self._to_repeat.clear()
        pipeline = self._build()
        outputs = BorrowedTensors()
        try:
            while True:
                try:
                    views = pipeline.run()
                except StopIteration:
                    return
                except RuntimeError as error:
                    self._remove_refused(error)
                    pipeline = self._build()
                else:
                    served = tuple(outputs.take(view.as_tensor()) for view in views)
                    batch = self._in_pipeline.popleft()
                    if len(batch.refused) == len(batch.pictures):  # `served` are the pixel of _BLACK
                        served = tuple(view[:0] for view in served)
                    yield DecodedBatch(served, batch.refused)
        finally:
            self._batches.close()
            outputs.give_back()

    def close(self) -> None:
        """End the threads that read; a pipeline ends with the `read` that built it."""
        self._encoded.pool.close()

    def _build(self) -> Any:
        """Build a pipeline that takes its batches from `_next_input`."""
        from nvidia.dali import Pipeline, fn, types

        device = self._spec.device
        on_gpu = device.type == "cuda"
        # Weak, since a pipeline lives until garbage is collected, and would keep this reader alive.
        this = weakref.ref(self)
        pipeline = Pipeline(
            batch_size=self._spec.batch_size,
            num_threads=max(1, self._spec.workers),
            device_id=(device.index or 0) if on_gpu else None,
            prefetch_queue_depth=_QUEUE_BATCHES,
            exec_dynamic=True,
        )
        with pipeline:
            views = self._crops.views
            # either all views are random, or the only one shows the middle
            box = [types.FLOAT] * 2 if views[0].random is None else [types.INT32] * 3
            encoded, *boxes = fn.external_source(
                source=lambda: this()._next_input(),  # type: ignore[union-attr]  # alive while it runs
                num_outputs=1 + len(views) * len(box),
                dtype=[types.UINT8, *box * len(views)],
                batch=True,
            )
            decoder_options: dict[str, Any] = {
                "device": "mixed" if on_gpu else "cpu",
                "output_type": types.GRAY if self._data.channels == 1 else types.RGB,
                "jpeg_fancy_upsampling": True,  # as Pillow decodes
            }
            random = views[0].random
            if len(views) == 1 and random is not None and random.scale is not None:
                # Only the crop is decoded: the same pixels in less time.
                decoder_options |= {"normalized_anchor": False, "normalized_shape": False}
                crop = fn.decoders.image_slice(encoded, boxes[0], boxes[1], axes=(0, 1), **decoder_options)
                pipeline.set_outputs(fn.flip(_resize(crop, views[0]), horizontal=boxes[2]))
            else:
                decoded = fn.decoders.image(encoded, **decoder_options)
                parts = []
                for number, view in enumerate(views):
                    first = number * len(box)
                    parts.append(_cut_out(decoded, boxes[first : first + len(box)], view))
                pipeline.set_outputs(*parts)
        try:
            pipeline.build()
        except RuntimeError:
            check_can_open(str(self._data.path))
            raise
        _pipelines.add(pipeline)
        return pipeline

    def _next_input(self) -> tuple[list[npt.NDArray[Any]], ...]:
        """Return the next batch for `external_source`: encoded pictures, then their boxes.

        Raises:
            StopIteration: there is none, which ends the run of the pipeline.
        """
        request, pictures = self._to_repeat.popleft() if self._to_repeat else next(self._batches)
        if self._trusted:  # nothing has to be decoded here: threads would cost more than they save
            inputs = [self._input(picture) for picture in pictures]
        else:
            inputs = self._encoded.pool.map(self._input, pictures)
        refused, slots, contents, shapes = {}, [], [], []
        for slot, content in enumerate(inputs):
            if isinstance(content, ImageError):
                refused[slot] = content
            else:
                slots.append(slot)
                contents.append(content)
                shapes.append(pictures[slot].shape)
        if not slots:  # DALI takes no empty batch
            slots, contents, shapes = [0], [_BLACK], [(1, 1)]
        boxes = self._boxes(request.select(np.array(slots)), np.array(shapes))
        self._in_pipeline.append(_BatchInPipeline(request, pictures, refused))
        return contents, *boxes

    def _input(self, picture: Encoded) -> npt.NDArray[np.uint8] | ImageError:
        """Return the bytes to hand to DALI, or the reason why the picture cannot be decoded.

        Bytes without a checksum are handed over only if DALI decodes them as `pictures.images` does, and
        else decoded here: DALI 2.4 crashes on some damaged headers.
        """
        if picture.error is not None:
            return picture.error
        is_plain = self._trusted or picture.is_plain()
        if is_plain and picture.path not in self._refused:
            return np.frombuffer(picture.data, np.uint8)
        pixels = picture.try_decode()
        if isinstance(pixels, ImageError):
            return pixels
        kind = 5 if pixels.shape[2] == 1 else 6  # PGM or PPM: DALI takes their pixels as they are
        height, width = picture.shape
        content = b"P%d %d %d 255\n" % (kind, width, height) + pixels.tobytes()
        return np.frombuffer(content, np.uint8)

    def _boxes(self, request: Request, shapes: npt.NDArray[np.int64]) -> list[list[npt.NDArray[Any]]]:
        """Draw the served parts of pictures of these `shapes`, int64 [n, 2]; the views one behind the other.

        Returns:
            For each view two lists: where the part starts and where it ends, (y, x), float32; it is resized
            together with its surroundings. For each view of random crops three lists: where it starts,
            (y, x), int32; its (height, width), int32; whether it is mirrored, int32.
        """
        ids = self._data.ids[request.positions]
        columns: list[list[npt.NDArray[Any]]] = []
        for draws in self._crops.draw(request.epoch, ids, shapes, request.places):
            corners, lengths = draws.boxes[:, 1::-1], draws.boxes[:, :1:-1]
            arrays = [corners, corners + lengths]
            dtype: type = np.float32
            if self._crops.views[0].random is not None:
                arrays, dtype = [corners, lengths, draws.mirrored.astype(np.int32)], np.int32
            # made contiguous, because DALI takes no strides
            columns += [[*np.ascontiguousarray(array.astype(dtype))] for array in arrays]
        return columns

    def _remove_refused(self, error: RuntimeError) -> None:
        """Find the pictures at which the pipeline failed, and queue its batches again without them.

        Raises:
            DatasetError: all of its pictures can be decoded.
        """
        check_exit()  # the program's end closes what feeds the pipeline, which makes it fail, too
        suspects = []
        for batch in self._in_pipeline:
            for picture in batch.pictures:
                if picture.error is None and picture.path not in self._refused:
                    suspects.append(picture)
        decoded = zip(suspects, self._encoded.pool.map(Encoded.try_decode, suspects), strict=True)
        damaged = {picture.path for picture, pixels in decoded if isinstance(pixels, ImageError)}
        if not damaged:
            raise DatasetError(
                f"DALI cannot decode a picture of it: {error}", path=self._data.path
            ) from error
        self._refused |= damaged
        self._to_repeat.extendleft((batch.request, batch.pictures) for batch in reversed(self._in_pipeline))
        self._in_pipeline.clear()


def _cut_out(decoded: Any, box: list[Any], view: View) -> Any:
    """Add to a pipeline under construction: the served part of `decoded`; `box` is one of `_boxes`."""
    from nvidia.dali import fn

    if view.random is None:
        return _resize(decoded, view, roi_start=box[0], roi_end=box[1])
    # Not as a region of `resize`, whose antialiasing filter reads pixels around the region.
    part = fn.slice(decoded, *box[:2], axes=(0, 1), out_of_bounds_policy="pad", fill_values=0)
    if view.random.scale is not None:
        part = _resize(part, view)
    return fn.flip(part, horizontal=box[2])


def _resize(pictures: Any, view: View, **region: Any) -> Any:
    """Add to a pipeline under construction: `pictures`, or a region of them, in the size of a view."""
    from nvidia.dali import fn, types

    size = sides(view.size)
    return fn.resize(pictures, size=size, interp_type=types.INTERP_LINEAR, antialias=True, **region)


# Pipelines of this process. A forked process has copies of them without their threads, for which DALI would
# wait for ever when a copy is destroyed.
_pipelines: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _abandon_pipelines() -> None:
    """Keep the copies of pipelines in a forked process from being destroyed."""
    for pipeline in _pipelines:
        # One reference more than there are: not even the interpreter's end destroys it, which would wait,
        # too.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
        pipeline._pipe = None


os.register_at_fork(after_in_child=_abandon_pipelines)
