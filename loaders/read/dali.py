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
from contextlib import closing
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import Image

from loaders.augment.cpu import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import RAW, SplitData
from loaders.deliver.devices import Borrowed
from loaders.deliver.threads import Pool
from loaders.read.integrity import SampleCheck
from loaders.read.sequential import EncodedShards
from loaders.settings import LoaderSpec
from precache.errors import DatasetError, ImageError, MissingDependencyError
from precache.packages import dali_package
from precache.pictures import images, jpeg
from precache.pictures.reading import MAX_PIXELS
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
        """Nothing to end: the pipeline goes with the `read` that built it."""

    def _serve(self, pictures: torch.Tensor | None, batch: _Encoded) -> DecodedBatch:
        """`pictures`: what the pipeline made of those of `batch`; None if there are none."""
        positions = batch.request.select([picture.slot for picture in batch.pictures]).positions
        if pictures is None:
            shape = (0,) if self._crops.size is None else (0, *sides(self._crops.size), self._data.channels)
            pictures = torch.empty(shape, dtype=torch.uint8)
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
            box = [types.FLOAT] * 2 if self._crops.random is None else [types.INT32] * 3
            views = 0 if self._crops.size is None else self._crops.views
            encoded, *boxes = fn.external_source(
                source=self._next_input,
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
        batch = self._again.popleft() if self._again else next(self._feed)
        self._in_pipeline.append(batch)
        if not batch.pictures:
            raise StopIteration  # DALI takes no empty batch: `read` serves it, and begins another run
        columns = zip(*(picture.inputs for picture in batch.pictures), strict=True)
        return tuple(list(column) for column in columns)

    def _read_raw(self, requests: Iterator[Request]) -> Generator[_Encoded, None, None]:
        for request in requests:
            batch = _Encoded(request)
            shapes = []
            for slot, position in enumerate(request.positions.tolist()):
                file, sample_id = self._data.files[position], int(self._data.ids[position])
                try:
                    content = images.read_bytes(file)
                    self._check(content, file)
                    encoded, shape = prepare(content, file)
                except ImageError as error:
                    batch.refused[sample_id] = error
                else:
                    batch.pictures.append(_Picture(content, file, slot, sample_id, (encoded,)))
                    shapes.append(shape)
            boxes = self._boxes(
                request.select([picture.slot for picture in batch.pictures]),
                np.array(shapes, np.int64).reshape(-1, 2),
            )
            batch.pictures = [
                replace(picture, inputs=(*picture.inputs, *box))
                for picture, box in zip(batch.pictures, boxes, strict=True)
            ]
            yield batch

    def _read_shards(self, requests: Iterator[Request]) -> Generator[_Encoded, None, None]:
        for request, samples in self._shards.read(requests):
            batch = _Encoded(request)
            boxes = self._boxes(request, self._data.shapes_at(request.positions))
            asked = zip(request.positions.tolist(), samples, boxes, strict=True)
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

    def _boxes(self, request: Request, shapes: npt.NDArray[np.int64]) -> list[_Box]:
        """Of each picture, of these heights and widths: the box of each view, one behind the other."""
        count = len(request.positions)
        if self._crops.size is None or not count:
            return [()] * count
        ids = self._data.ids[request.positions]
        boxes, mirrored = self._crops.of(request.epoch, ids, shapes, request.occurrences)
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


def _refusal(picture: _Picture) -> ImageError | None:
    """Why `precache.pictures.images` refuses a picture, or None."""
    try:
        images.decode(picture.content, picture.file)
    except ImageError as error:
        return error
    return None


_EXIF_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


def prepare(content: bytes, file: str) -> tuple[npt.NDArray[np.uint8], tuple[int, int]]:
    """What DALI decodes, and the height and width of that.

    Raises:
        ImageError: what `precache.pictures.images` has to decode for it cannot be decoded.
    """
    width, height, plain = _upright_size(content)
    if not plain:
        pixels = images.decode(content, file)
        width, height = pixels.size
        content = b"P6 %d %d 255\n" % pixels.size + pixels.tobytes()  # PPM: DALI reads it as it is
    return np.frombuffer(content, np.uint8), (height, width)


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
            if orientation != 1 and ("exif" not in picture.info or jpeg.XMP in content):
                plain = False  # it may stand in XMP, which Pillow reads and DALI does not
            return width, height, plain
    except Exception:  # images.decode says what is wrong with it
        return 0, 0, False
