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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment.cpu import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.deliver import Borrowed, check_exit
from loaders.read.decoding import Encoded, EncodedPictures
from loaders.settings import LoaderSpec
from precache.errors import DatasetError, ImageError, MissingDependencyError
from precache.packages import dali_package
from precache.pictures.sizes import sides

_QUEUE_BATCHES = 2
_Box = tuple[npt.NDArray[Any], ...]
"""(y, x) where what is served starts and ends, float32, to be resized with what lies around it; or, of random
crops, (y, x) where it starts and its (height, width), int32, and whether it is mirrored."""


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


@dataclass(slots=True)
class _Asked:
    """A batch on its way through the pipeline.

    Attributes:
        inputs: by its number, what the pipeline takes for a picture: what is decoded, and its `_Box`.
        refused: why the others were kept from it, by their numbers.
    """

    request: Request
    pictures: list[Encoded]
    inputs: dict[int, tuple[npt.NDArray[Any], ...]] = field(default_factory=dict)
    refused: dict[int, ImageError] = field(default_factory=dict)


class DaliReader:
    """Builds a pipeline for each `read`: one that is left midway still holds batches of it."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self._spec = spec
        self._data = data
        self._crops = crops
        self._encoded = EncodedPictures(spec, data)
        self.random_access = self._encoded.random_access
        self._trusted = not self.random_access and spec.reading.check != "never"
        self._feed: Generator[tuple[Request, list[Encoded]], None, None]
        self._in_pipeline: deque[_Asked] = deque()
        self._again: deque[_Asked] = deque()  # were in a pipeline that failed
        self._refused: set[str] = set()  # by DALI

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        self._feed = self._encoded.read(requests)
        self._in_pipeline.clear()
        self._again.clear()
        pipeline = self._build()
        outputs = Borrowed()
        whole = self._crops.size is None
        try:
            while True:
                try:
                    views = pipeline.run()
                except StopIteration:
                    if not self._in_pipeline:
                        return
                    yield self._serve(None, self._in_pipeline.popleft())
                    pipeline = self._build()
                except RuntimeError as error:
                    self._drop_refused(error)
                    pipeline = self._build()
                else:
                    if whole:
                        pictures = [outputs.take(picture).flatten() for picture in views[0]]
                    else:
                        pictures = [outputs.take(view.as_tensor()) for view in views]
                    served = pictures[0] if len(pictures) == 1 else torch.cat(pictures)
                    yield self._serve(served, self._in_pipeline.popleft())
        finally:
            self._feed.close()
            outputs.give_back()

    def close(self) -> None:
        """End the threads that read; the pipeline goes with the `read` that built it."""
        self._encoded.pool.close()

    def _serve(self, pictures: torch.Tensor | None, batch: _Asked) -> DecodedBatch:
        """`pictures`: what the pipeline made of those of `batch`; None if there are none."""
        if pictures is None:
            shape = (0,) if self._crops.size is None else (0, *sides(self._crops.size), self._data.channels)
            pictures = torch.empty(shape, dtype=torch.uint8)
        return DecodedBatch(pictures, batch.refused)

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
        pipeline.build()
        _pipelines.add(pipeline)
        return pipeline

    def _part(self, decoded: Any, box: list[Any]) -> Any:
        """What is served of the `decoded` pictures of a pipeline that is being made; `box` as of `_Box`."""
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
        batch = self._again.popleft() if self._again else self._prepare(*next(self._feed))
        self._in_pipeline.append(batch)
        if not batch.inputs:
            raise StopIteration  # DALI takes no empty batch: `read` serves it, and begins another run
        return tuple(map(list, zip(*batch.inputs.values(), strict=True)))

    def _prepare(self, request: Request, pictures: list[Encoded]) -> _Asked:
        """A batch of `pictures` for the pipeline, without those that cannot be decoded."""
        batch = _Asked(request, pictures)
        inputs: dict[int, tuple[npt.NDArray[np.uint8], tuple[int, int]]] = {}
        found = map(self._input, pictures) if self._trusted else self._encoded.pool.map(self._input, pictures)
        for slot, one in enumerate(found):
            if isinstance(one, ImageError):
                batch.refused[slot] = one
            else:
                inputs[slot] = one
        shapes = np.array([shape for _, shape in inputs.values()], np.int64).reshape(-1, 2)
        boxes = self._boxes(request.select(np.array([*inputs], np.int64)), shapes)
        for (slot, (content, _)), box in zip(inputs.items(), boxes, strict=True):
            batch.inputs[slot] = (content, *box)
        return batch

    def _input(self, picture: Encoded) -> tuple[npt.NDArray[np.uint8], tuple[int, int]] | ImageError:
        """What DALI decodes, and the height and width of that; or why it cannot be decoded.

        What has its checksum is what the converter wrote. Of the rest DALI gets what it decodes as the
        reference does: DALI 2.4 crashes on some damaged headers.
        """
        if picture.error is not None:
            return picture.error
        plain = self._trusted or picture.is_plain(turned=True)
        if plain and picture.path not in self._refused:
            return np.frombuffer(picture.data, np.uint8), picture.shape
        pixels = picture.try_decode()
        if isinstance(pixels, ImageError):
            return pixels
        content = b"P6 %d %d 255\n" % picture.shape[::-1] + pixels.tobytes()  # PPM: DALI reads it as it is
        return np.frombuffer(content, np.uint8), picture.shape

    def _boxes(self, request: Request, shapes: npt.NDArray[np.int64]) -> list[_Box]:
        """Of each picture, of these heights and widths: the box of each view, one behind the other."""
        count = len(request.positions)
        if self._crops.size is None or not count:
            return [()] * count
        ids = self._data.ids[request.positions]
        boxes, mirrored = self._crops.of(request.epoch, ids, shapes, request.places)
        corners, lengths = boxes[:, 1::-1], boxes[:, :1:-1]
        columns: tuple[npt.NDArray[Any], ...]
        if self._crops.random is None:
            columns = (corners.astype(np.float32), (corners + lengths).astype(np.float32))
        else:
            columns = (corners.astype(np.int32), lengths.astype(np.int32), mirrored.astype(np.int32))
        columns = tuple(map(np.ascontiguousarray, columns))  # DALI takes no strides
        return [
            tuple(column[slot + view * count] for view in range(self._crops.views) for column in columns)
            for slot in range(count)
        ]

    def _drop_refused(self, error: RuntimeError) -> None:
        """Take the pictures that made the pipeline fail out of its batches, and line these up again."""
        check_exit()  # which ends what the pipeline is fed by, too
        dropped = 0
        for batch in self._in_pipeline:
            slots = [*batch.inputs]
            decoded = self._encoded.pool.map(Encoded.try_decode, [batch.pictures[s] for s in slots])
            for slot, pixels in zip(slots, decoded, strict=True):
                if isinstance(pixels, ImageError):
                    del batch.inputs[slot]
                    batch.refused[slot] = pixels
                    self._refused.add(batch.pictures[slot].path)
                    dropped += 1
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
