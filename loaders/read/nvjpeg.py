"""Backend `nvjpeg`: JPEGs decoded in batches by the GPU's own decoders.

By TorchCodec's nvJPEG decoder where it is installed, else by torchvision's. TorchCodec (0.16 or newer)
applies EXIF orientation, and serves several threads at a time with a decoder each; torchvision has one per
device, and will drop it: https://github.com/meta-pytorch/torchcodec/issues/1560

What is served of each picture is cut out and resized on the GPU, antialiased. What nvJPEG does not decode to
the reference's RGB (other formats, CMYK), and what it refuses, is decoded by `pictures.images`, by threads.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import cache
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import interpolate, pad

from loaders.augment import Crops, weights
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.deliver import Lane, Pool, upload
from loaders.read.decoding import Encoded, EncodedPictures
from loaders.settings import LoaderSpec
from precache.errors import ImageError, MissingDependencyError, SettingError
from precache.pictures.jpeg import encode_jpeg
from precache.pictures.sizes import sides

Decode = Callable[[list[torch.Tensor], torch.device], list[torch.Tensor]]
"""(JPEGs, uint8 [bytes], on the CPU; device) -> RGB pictures, uint8 [3, height, width], on that device, for
work on the current stream; RuntimeError if one of them cannot be decoded."""

_LOGGER = logging.getLogger(__name__)


class GpuDecoder(NamedTuple):
    """A library's decoder, whether it applies EXIF orientation, and how many threads it serves at a time."""

    decode: Decode
    turns: bool
    most: int


@cache
def find_decoder(device: torch.device) -> GpuDecoder:
    """The first of the installed ones that decodes a small JPEG on `device`.

    Raises:
        MissingDependencyError: none is installed, or none does.
    """
    tiny = torch.frombuffer(bytearray(encode_jpeg(np.zeros((16, 16, 3), np.uint8), 95)), dtype=torch.uint8)
    why = ""
    for find in (_torchcodec, _torchvision):
        if why:
            _LOGGER.warning("torchcodec does not decode JPEGs on %s, torchvision is used: %s", device, why)
        try:
            decoder = find()
            decoder.decode([tiny], device)
        except ModuleNotFoundError:
            continue
        # a wheel without nvJPEG, or one that does not fit this torch or CUDA
        except (ImportError, OSError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
        else:
            return decoder
    raise MissingDependencyError(
        f"backend 'nvjpeg': what is installed does not decode JPEGs on {device} (torchvision: {why}); "
        f"'pip install torchcodec' of a version for this CUDA, or choose another backend"
    )


def _torchcodec() -> GpuDecoder:
    from torchcodec.decoders import decode_jpeg

    return GpuDecoder(lambda jpegs, device: decode_jpeg(jpegs, device=device), turns=True, most=4)


def _torchvision() -> GpuDecoder:
    from torchvision.io import ImageReadMode, decode_jpeg

    rgb = ImageReadMode.RGB
    return GpuDecoder(lambda jpegs, device: decode_jpeg(jpegs, rgb, device), turns=False, most=1)


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> "NvjpegReader":
    """A reader over `data`: a raw tree, or a folder of format `webdataset` or `dali`."""
    if spec.device.type != "cuda":
        raise SettingError(
            f"backend 'nvjpeg' decodes on a GPU, device is {str(spec.device)!r}; "
            f"build with device 'cuda', or choose another backend"
        )
    return NvjpegReader(spec, data, crops, spec.device)


class NvjpegReader:
    """Decodes a few batches at a time, each with one call, in a thread and on a stream of its own."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops, device: torch.device) -> None:
        self._data = data
        self._encoded = EncodedPictures(spec, data, spec.workers)
        self.random_access = self._encoded.random_access
        self._crops = crops
        self._device = device
        self._decoder = find_decoder(device)
        decoders = max(1, min(spec.workers, self._decoder.most))
        self._lanes: SimpleQueue[Lane] = SimpleQueue()  # those that no thread uses
        for _ in range(decoders):
            self._lanes.put(Lane(device))
        self._decoders = Pool(decoders, "decode")
        self._ahead = decoders - 1

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        running: deque[Future[DecodedBatch]] = deque()
        try:
            for asked in self._encoded.read(requests):
                running.append(self._decoders.submit(self._decode_batch, *asked))
                while len(running) > self._ahead:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()
            wait(running)

    def close(self) -> None:
        """End the threads."""
        self._decoders.close()
        self._encoded.pool.close()

    def _decode_batch(self, request: Request, encoded: list[Encoded]) -> DecodedBatch:
        lane = self._lanes.get_nowait()
        refused: dict[int, ImageError] = {}
        try:
            with lane.active():
                served = self._serve(request, self._decode(lane, encoded, refused))
                ready = lane.mark()
        finally:
            self._lanes.put(lane)
        return DecodedBatch(served, refused, ready)

    def _decode(
        self, lane: Lane, encoded: list[Encoded], refused: dict[int, ImageError]
    ) -> dict[int, torch.Tensor]:
        """uint8 [3, height, width], by number, of those that can be decoded; the others go to `refused`."""
        jpegs = {
            slot: torch.from_numpy(np.frombuffer(picture.data, np.uint8).copy())
            for slot, picture in enumerate(encoded)
            if picture.is_plain(turned=self._decoder.turns)
        }
        pictures = self._decode_plain(lane, jpegs)
        others = [slot for slot in range(len(encoded)) if slot not in pictures]
        decoded = self._encoded.pool.map(Encoded.try_decode, [encoded[slot] for slot in others])
        for slot, pixels in zip(others, decoded, strict=True):
            if isinstance(pixels, ImageError):
                refused[slot] = pixels
            else:
                pictures[slot] = upload(torch.from_numpy(pixels), self._device).permute(2, 0, 1)
        return pictures

    def _decode_plain(self, lane: Lane, jpegs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """uint8 [3, height, width] of `jpegs`, by number; those are left out that the decoder refuses."""
        if not jpegs:
            return {}
        # The decoder writes to its output without regard to what the stream still has to do, and the output
        # may be memory that the stream still reads: https://github.com/pytorch/vision/pull/9606
        lane.drain()
        try:
            return dict(zip(jpegs, self._decoder.decode([*jpegs.values()], self._device), strict=True))
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            lane.drain_device()  # it may still write, to memory that others get now
        if len(jpegs) == 1:
            return {}
        half = [*jpegs][: len(jpegs) // 2]  # one of them is damaged: the others are decoded here all the same
        first = self._decode_plain(lane, {slot: jpegs.pop(slot) for slot in half})
        return first | self._decode_plain(lane, jpegs)

    def _serve(self, request: Request, pictures: dict[int, torch.Tensor]) -> torch.Tensor:
        """What is served of `pictures`, by number: `images` of a DecodedBatch."""
        slots, size = sorted(pictures), self._crops.size
        shapes = np.array([pictures[slot].shape[1:] for slot in slots], np.int64).reshape(-1, 2)
        request = request.select(np.array(slots, np.int64))
        ids = self._data.ids[request.positions]
        boxes, mirrored = self._crops.of(request.epoch, ids, shapes, request.places)
        shape = (0,) if size is None else (0, *sides(size), self._data.channels)
        served = [torch.empty(shape, dtype=torch.uint8, device=self._device)]
        for number, (box, flipped) in enumerate(zip(boxes.tolist(), mirrored.tolist(), strict=True)):
            # a grey JPEG is decoded to three channels that are the same
            stored = pictures[slots[number % len(slots)]][: self._data.channels]
            part = _part(stored, box, self._crops)
            part = (part.flip(-1) if flipped else part).permute(1, 2, 0)
            served.append(part.flatten() if size is None else part[None])
        return torch.cat(served)


def _part(picture: torch.Tensor, box: list[int] | list[float], crops: Crops) -> torch.Tensor:
    """uint8 [3, height, width]: `box`, as of `loaders.augment.Boxes`, made the size that is served."""
    size = (round(box[3]), round(box[2])) if crops.size is None else sides(crops.size)
    if (box[3], box[2]) != size and not isinstance(box[0], int):
        x, y, across, down = (
            torch.full((1,), float(value), dtype=torch.float32, device=picture.device) for value in box
        )
        rows = weights(y, down, picture.shape[1], size[0], alone=False)
        columns = weights(x, across, picture.shape[2], size[1], alone=False)
        return _bytes(rows @ picture.to(torch.float32) @ columns.transpose(1, 2))
    left, top, width, height = map(int, box)
    part = picture[:, max(top, 0) : top + height, max(left, 0) : left + width]
    if part.shape[1:] != (height, width):  # the box reaches out of a small picture
        right, below = left + width - picture.shape[2], top + height - picture.shape[1]
        part = pad(part, [max(0, side) for side in (-left, right, -top, below)])
    if size == (height, width):
        return part
    return _bytes(interpolate(part[None].to(torch.float32), size, mode="bilinear", antialias=True)[0])


def _bytes(floats: torch.Tensor) -> torch.Tensor:
    return floats.round_().clamp_(0, 255).to(torch.uint8)
