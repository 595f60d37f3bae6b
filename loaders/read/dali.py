"""Backend `dali`: NVIDIA DALI decodes and resizes, on the GPU where the loader's device is one.

The pictures' bytes are read here, in the order that the loader asks for, and handed to a DALI
pipeline: DALI's own readers can neither keep that order nor resume in the middle of an epoch. What DALI
does not convert to RGB as the reference does (CMYK, transparency, 16 bit) is decoded by `pictures.images`
and handed over as pixels. What is served of each picture is drawn here, and cut out and resized by DALI.

DALI cannot leave a picture out of a batch. One that `pictures.images` refuses is kept from the pipeline,
or, if only DALI finds it, dropped: then the pipeline is built anew and gets the same batches again. A
JPEG whose data is damaged, but ends as it should, DALI decodes to what it makes of it, without a word;
`precache check` finds these.
"""

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.device import BorrowedTensors
from loaders.read.decoding import Asked, Encoded, EncodedPictures
from loaders.settings import LoaderSpec
from loaders.threads import check_exit
from precache.errors import DatasetError, ImageError, MissingDependencyError
from precache.packages import dali_package
from precache.pictures.sizes import sides
from precache.storage import check_can_open

_QUEUE_BATCHES = 2
_Asked: TypeAlias = tuple[Request, list[Encoded], dict[int, ImageError]]
"""A batch on its way through the pipeline, and why pictures were kept from it, by their numbers."""
_BLACK = np.frombuffer(b"P6 1 1 255\n\0\0\0", np.uint8)  # PPM, of one pixel


class DaliReader:
    """Builds a pipeline for each `read`: one that is left midway still holds batches of it."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        try:
            import nvidia.dali  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                f"backend 'dali' needs NVIDIA DALI; install it with 'pip install {dali_package()}', or the "
                f"build that 'precache doctor' names"
            ) from error
        self._spec = spec
        self._data = data
        self._crops = crops
        self._encoded = EncodedPictures(spec, data, spec.workers)
        self.random_access = self._encoded.random_access
        self._trusted = not self.random_access and spec.reading.check != "never"
        self._feed: Generator[Asked, None, None]
        self._in_pipeline: deque[_Asked] = deque()
        self._again: deque[Asked] = deque()  # were in a pipeline that failed
        self._refused: set[str] = set()  # by DALI

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        self._feed = self._encoded.read(requests)
        self._in_pipeline.clear()
        self._again.clear()
        pipeline = self._build()
        outputs = BorrowedTensors()
        whole = self._crops.size is None
        try:
            while True:
                try:
                    views = pipeline.run()
                except StopIteration:
                    return
                except RuntimeError as error:
                    self._drop_refused(error)
                    pipeline = self._build()
                else:
                    if whole:
                        pictures = [outputs.take(picture).flatten() for picture in views[0]]
                    else:
                        pictures = [outputs.take(view.as_tensor()) for view in views]
                    served = pictures[0] if len(pictures) == 1 else torch.cat(pictures)
                    _, asked, refused = self._in_pipeline.popleft()
                    yield DecodedBatch(served[:0] if len(refused) == len(asked) else served, refused)
        finally:
            self._feed.close()
            outputs.give_back()

    def close(self) -> None:
        """End the threads that read; the pipeline goes with the `read` that built it."""
        self._encoded.pool.close()

    def _build(self) -> Any:
        from nvidia.dali import Pipeline, fn, types

        device = self._spec.device
        on_gpu = device.type == "cuda"
        this = weakref.ref(self)  # a pipeline stays until garbage is collected
        pipeline = Pipeline(
            batch_size=self._spec.batch_size,
            num_threads=max(1, self._spec.workers),
            device_id=(device.index or 0) if on_gpu else None,
            prefetch_queue_depth=_QUEUE_BATCHES,
            exec_dynamic=True,
        )
        with pipeline:
            box = [types.FLOAT] * 2 if self._crops.random is None else [types.INT32] * 3
            views = 0 if self._crops.size is None else self._crops.views
            encoded, *boxes = fn.external_source(
                source=lambda: this()._next_input(),  # type: ignore[union-attr]  # it runs the pipeline
                num_outputs=1 + views * len(box),
                dtype=[types.UINT8, *box * views],
                batch=True,
            )
            how: dict[str, Any] = {
                "device": "mixed" if on_gpu else "cpu",
                "output_type": types.GRAY if self._data.channels == 1 else types.RGB,
                "jpeg_fancy_upsampling": True,  # as Pillow decodes
            }
            if views == 1 and self._crops.random is not None and self._crops.random.scale is not None:
                # the crop alone is decoded: the same pixels in less time
                how |= {"normalized_anchor": False, "normalized_shape": False}
                crop = fn.decoders.image_slice(encoded, boxes[0], boxes[1], axes=(0, 1), **how)
                pipeline.set_outputs(fn.flip(self._resize(crop), horizontal=boxes[2]))
            else:
                decoded, each = fn.decoders.image(encoded, **how), len(box)
                parts = [self._part(decoded, boxes[view * each :][:each]) for view in range(views)]
                pipeline.set_outputs(*(parts or [decoded]))
        try:
            pipeline.build()
        except RuntimeError:
            check_can_open(str(self._data.path))
            raise
        _pipelines.add(pipeline)
        return pipeline

    def _part(self, decoded: Any, box: list[Any]) -> Any:
        """What is served of the `decoded` pictures of a pipeline that is being made; `box` as of `_boxes`."""
        from nvidia.dali import fn

        if self._crops.random is None:
            return self._resize(decoded, roi_start=box[0], roi_end=box[1])
        # not as a region of `resize`, which looks at what lies around it
        part = fn.slice(decoded, *box[:2], axes=(0, 1), out_of_bounds_policy="pad", fill_values=0)
        if self._crops.random.scale is not None:
            part = self._resize(part)
        return fn.flip(part, horizontal=box[2])

    def _resize(self, pictures: Any, **region: Any) -> Any:
        from nvidia.dali import fn, types

        assert self._crops.size is not None
        size = sides(self._crops.size)
        return fn.resize(pictures, size=size, interp_type=types.INTERP_LINEAR, antialias=True, **region)

    def _next_input(self) -> tuple[list[npt.NDArray[Any]], ...]:
        """What `external_source` takes for one batch; StopIteration ends the run."""
        request, pictures = self._again.popleft() if self._again else next(self._feed)
        found = [*(map if self._trusted else self._encoded.pool.map)(self._input, pictures)]
        refused = {slot: one for slot, one in enumerate(found) if isinstance(one, ImageError)}
        inputs = {slot: (one, pictures[slot].shape) for slot, one in enumerate(found) if slot not in refused}
        inputs = inputs or {0: (_BLACK, (1, 1))}  # DALI takes no empty batch
        contents, shapes = zip(*inputs.values(), strict=True)
        boxes = self._boxes(request.select(np.array([*inputs])), np.array(shapes))
        self._in_pipeline.append((request, pictures, refused))
        return [*contents], *boxes

    def _input(self, picture: Encoded) -> npt.NDArray[np.uint8] | ImageError:
        """What DALI decodes; or why it cannot be decoded.

        What has its checksum is what the converter wrote. Of the rest DALI gets what it decodes as the
        reference does: DALI 2.4 crashes on some damaged headers.
        """
        if picture.error is not None:
            return picture.error
        plain = self._trusted or picture.is_plain()
        if plain and picture.path not in self._refused:
            return np.frombuffer(picture.data, np.uint8)
        pixels = picture.try_decode()
        if isinstance(pixels, ImageError):
            return pixels
        kind = 5 if pixels.shape[2] == 1 else 6  # PGM or PPM: DALI reads them as they are
        content = b"P%d %d %d 255\n" % (kind, *picture.shape[::-1]) + pixels.tobytes()
        return np.frombuffer(content, np.uint8)

    def _boxes(self, request: Request, shapes: npt.NDArray[np.int64]) -> list[list[npt.NDArray[Any]]]:
        """The boxes of pictures of these heights and widths, one view behind the other.

        Each of two lists: (y, x) where what is served starts, and where it ends, float32, to be resized with
        what lies around it; or, of random crops, of three: (y, x) where it starts and its (height, width),
        int32, and whether it is mirrored.
        """
        if self._crops.size is None:
            return []
        ids, count = self._data.ids[request.positions], len(shapes)
        boxes, mirrored = self._crops.boxes_and_flips(request.epoch, ids, shapes, request.places)
        corners, lengths = boxes[:, 1::-1], boxes[:, :1:-1]
        columns: tuple[npt.NDArray[Any], ...]
        if self._crops.random is None:
            columns = (corners.astype(np.float32), (corners + lengths).astype(np.float32))
        else:
            columns = (corners.astype(np.int32), lengths.astype(np.int32), mirrored.astype(np.int32))
        columns = tuple(map(np.ascontiguousarray, columns))  # DALI takes no strides
        views = range(0, count * self._crops.views, count)
        return [[*column[view : view + count]] for view in views for column in columns]

    def _drop_refused(self, error: RuntimeError) -> None:
        """Take the pictures that made the pipeline fail out of its batches, and line these up again."""
        check_exit()  # which ends what the pipeline is fed by, too
        asked = [picture for _, pictures, _ in self._in_pipeline for picture in pictures]
        suspects = [one for one in asked if one.error is None and one.path not in self._refused]
        decoded = zip(suspects, self._encoded.pool.map(Encoded.try_decode, suspects), strict=True)
        damaged = {one.path for one, pixels in decoded if isinstance(pixels, ImageError)}
        if not damaged:
            raise DatasetError(f"{self._data.path}: DALI cannot decode a picture of it: {error}") from error
        self._refused |= damaged
        self._again.extendleft((request, pictures) for request, pictures, _ in reversed(self._in_pipeline))
        self._in_pipeline.clear()


# Of this process: a forked one has not their threads, for which DALI would wait at its end, for ever.
_pipelines: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _disown() -> None:
    for pipeline in _pipelines:
        # not even destroyed when all else is: that waits, too
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
        pipeline._pipe = None


os.register_at_fork(after_in_child=_disown)
