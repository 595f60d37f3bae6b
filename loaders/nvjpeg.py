"""Backend `nvjpeg`: JPEGs decoded in batches by the GPU's own decoders, through torchvision.

Pictures are resized on the GPU as the reference does it. What nvJPEG does not decode to the reference's
RGB (other formats, CMYK, turned by EXIF), and what it refuses, is decoded by `precache.images`.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from torch.nn.functional import interpolate
from torchvision.io import ImageReadMode, decode_jpeg

from loaders.batch import DecodedBatch, LoaderSpec, Positions, Request
from loaders.crops import Crops
from loaders.dataset import RAW, SplitData
from loaders.integrity import SampleCheck
from loaders.sequential import EncodedShards
from loaders.threads import Pool
from precache import images, jpeg
from precache.errors import ImageError, SampleError, SettingError
from precache.formats import FORMATS, StoredSample
from precache.reading import MAX_PIXELS


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> "NvjpegReader":
    """A reader over `data`: a raw tree, or a folder of format `webdataset` or `dali`."""
    if spec.device.type != "cuda":
        raise SettingError(
            f"backend 'nvjpeg' decodes on a GPU, device is {str(spec.device)!r}; "
            f"build with device 'cuda', or choose another backend"
        )
    return NvjpegReader(spec, data, crops, spec.device)


class NvjpegReader:
    """Decodes each batch with one call, on a stream of its own."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops, device: torch.device) -> None:
        self.random_access = data.kind == RAW
        self._data = data
        self._crops = crops
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pool = Pool(max(1, spec.workers), "read")
        if not self.random_access:
            window_shards = data.window_shards(spec.memory_bytes)
            self._check = SampleCheck(data, spec.check)
            self._shards = EncodedShards(data, self._read_shard, window_shards, self._check)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        for request, names, contents in self._encoded(requests):
            with torch.cuda.stream(self._stream):  # None is none, on the CPU
                squares, refused = self._decode(names, contents)
                kept = [slot for slot in range(len(names)) if slot not in refused]
                positions: Positions = request.positions[kept]
                shape = (0, self._crops.size, self._crops.size, 3)
                batch = (
                    torch.stack(squares)
                    if squares
                    else torch.empty(shape, dtype=torch.uint8, device=self._device)
                )
            self._drain()  # another stream goes on with it
            ids = self._data.ids
            yield DecodedBatch(
                batch,
                torch.from_numpy(self._data.labels[positions]),
                torch.from_numpy(ids[positions]),
                {int(ids[request.positions[slot]]): error for slot, error in refused.items()},
            )

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _drain(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _encoded(
        self, requests: Iterator[Request]
    ) -> Iterator[tuple[Request, list[str], list[bytes | ImageError]]]:
        """Each request with the names and the contents of its pictures."""
        if self.random_access:
            for request in requests:
                files = [self._data.files[position] for position in request.positions.tolist()]
                yield request, files, self._pool.map(_read, files)
            return
        for request, samples in self._shards.read(requests):
            names = [f"{shard}: sample {sample.id}" for sample, shard in samples]
            positions = request.positions.tolist()
            yield request, names, [self._compared(p, s) for p, (s, _) in zip(positions, samples, strict=True)]

    def _compared(self, position: int, sample: StoredSample) -> bytes | ImageError:
        assert isinstance(sample.data, bytes)
        try:
            self._check.compare(position, sample.data, sample.damage)
        except SampleError as error:
            return error
        return sample.data

    def _decode(
        self, names: list[str], contents: list[bytes | ImageError]
    ) -> tuple[list[torch.Tensor], dict[int, ImageError]]:
        """Squares uint8 [size, size, 3] of what can be decoded, and why the others cannot, by number."""
        plain = {
            slot: torch.from_numpy(np.frombuffer(content, np.uint8).copy())
            for slot, content in enumerate(contents)
            if not isinstance(content, ImageError) and _is_plain(content)
        }
        # The decoder writes to its output without regard to what the stream still has to do, and the output
        # may be memory that the stream still reads: https://github.com/pytorch/vision/pull/9606
        self._drain()
        try:
            decoded = decode_jpeg(list(plain.values()), ImageReadMode.RGB, self._device) if plain else []
            pictures = dict(zip(plain, decoded, strict=True))
        except RuntimeError:  # one of them is damaged; which one, the reference finds out
            pictures = {}
        squares, refused = [], {}
        for slot, (name, content) in enumerate(zip(names, contents, strict=True)):
            try:
                picture = pictures.get(slot)
                squares.append(
                    self._square(self._by_reference(content, name) if picture is None else picture)
                )
            except ImageError as error:
                refused[slot] = error
        return squares, refused

    def _by_reference(self, content: bytes | ImageError, name: str) -> torch.Tensor:
        """uint8 [3, height, width] on the device."""
        if isinstance(content, ImageError):
            raise content
        pixels = torch.from_numpy(np.array(images.decode(content, name)))
        return pixels.to(self._device).permute(2, 0, 1)

    def _square(self, picture: torch.Tensor) -> torch.Tensor:
        """uint8 [size, size, 3]: torchvision's `Resize(stored)` of a raw tree's picture, then the centre."""
        stored, size = self._crops.stored, self._crops.size
        height, width = picture.shape[1:]
        if self.random_access and min(height, width) != stored:
            width, height = images.resized_size(width, height, stored)
            floats = picture[None].to(torch.float32)
            resized = interpolate(floats, (height, width), mode="bilinear", antialias=True)[0]
            picture = resized.round_().clamp_(0, 255).to(torch.uint8)
        left, top = images.centre_offset(width, size), images.centre_offset(height, size)
        return picture[:, top : top + size, left : left + size].permute(1, 2, 0)

    def _read_shard(self, path: str) -> list[StoredSample]:
        return list(FORMATS[self._data.kind].read_shard(Path(path)))


def _read(file: str) -> bytes | ImageError:
    try:
        return images.read_bytes(file)
    except ImageError as error:
        return error


def _is_plain(content: bytes) -> bool:
    """Whether nvJPEG decodes this to the reference's RGB: a whole, upright JPEG in grey or YCbCr."""
    if not content.startswith(jpeg.START) or jpeg.breaks_off(content):
        return False
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(content, strict=False)
    except ValueError:
        return False
    small = height * width <= MAX_PIXELS  # what is larger is refused by `images.decode`, by name
    return small and colorspace in ("Gray", "YCbCr") and jpeg.orientation(content) == 1
