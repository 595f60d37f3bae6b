"""Format `webdataset`: JPEGs in tar files, with DALI's index beside each.

    00000042.jpg    the picture, a baseline JPEG of the recipe's size, fit and quality
    00000042.cls    the label, an ASCII integer; only where samples are labelled with one class each
    00000042.json   {"height": ..., "path": ..., "width": ...} of the source picture; where there are any,
                    also "target": indices of classes, or numbers, and "fields": {NAME: number, text or lists}

Fields have an object of their own, because one may be called `width`. The key is the sample's id in 8 digits.
The tar is POSIX ustar with fixed owner, mode and time, so that its bytes depend on its content alone. The
index `.idx` has one line `v1.2 <samples>`, then one line per sample with
`<extension> <data offset> <bytes> <name>` for each of its files, as DALI's own tool writes it:
https://github.com/NVIDIA/DALI/blob/main/tools/wds2idx.py
"""

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from precache.errors import DatasetError, os_reason
from precache.formats.base import ByteRange, Format, Sample, StoredSample, shard_remedy
from precache.pictures.images import Size
from precache.storage import read_regular
from precache.storage.output import OutputFile

SUFFIX = ".tar"
INDEX_SUFFIX = ".idx"
_BLOCK = tarfile.BLOCKSIZE


class WebDatasetWriter:
    """Writer of a tar and, at the end, its index."""

    def __init__(self, base: Path, count: int, size: Size | None) -> None:
        """Create the file that becomes `base` + '.tar'; arguments as of `ShardWriter`."""
        self._index: list[str] = []
        self._file = OutputFile(base.with_name(base.name + SUFFIX))
        self._index_path = base.with_name(base.name + INDEX_SUFFIX)

    def add(self, sample: Sample) -> ByteRange:
        """Write one more sample, and return the bytes of its picture, with the tar header before it."""
        start = self._file.bytes
        contents = {"jpg": bytes(sample.data)}
        if sample.label >= 0:
            contents["cls"] = str(sample.label).encode()
        contents["json"] = _description(sample)
        entries = []
        for extension, content in contents.items():
            name = f"{sample.id:08d}.{extension}"
            entries.append(f"{extension} {self._file.bytes + _BLOCK} {len(content)} {name}")
            self._file.write(_header(name, len(content)) + content + bytes(-len(content) % _BLOCK))
        self._index.append(" ".join(entries))
        return start, _BLOCK + len(contents["jpg"])

    def finish(self) -> list[OutputFile]:
        """Write the tar's end and its index, and close both files, which are not durable yet."""
        with OutputFile(self._index_path) as index_file, self._file as file:
            file.write(bytes(2 * _BLOCK))
            file.write(bytes(-file.bytes % tarfile.RECORDSIZE))
            index_file.write("\n".join([f"v1.2 {len(self._index)}", *self._index, ""]).encode())
        return [file, index_file]

    def abandon(self) -> None:
        """Remove what was written; also after `finish` has raised."""
        self._file.abandon()


def read_shard(path: Path) -> Iterator[StoredSample]:
    """Yield the samples of a tar of `WebDatasetWriter`, in stored order; reads the whole tar first.

    The headers are parsed here because the `tarfile` module, which the webdataset library uses, takes 130 us
    for those of one sample.
    """
    try:
        content = read_regular(path)
        parts: dict[bytes, bytes] = {}
        for name, data in _members(content):
            key, _, extension = name.partition(b".")
            parts[extension] = data
            if extension == b"json":  # the last file of a sample
                jpeg, label = parts.get(b"jpg", b""), int(parts.get(b"cls", b"-1"))
                yield StoredSample(int(key), label, jpeg)
                parts.clear()
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"cannot be read as a tar of samples ({os_reason(error)})", path=path, remedy=shard_remedy(path)
        ) from error


def read_sample(stored: bytes) -> StoredSample:
    """Parse a picture with the tar header before it; its label is in another file of the tar."""
    name = stored[:100].rstrip(b"\0")
    if stored[_MAGIC] != b"ustar" or int(stored[_SIZE], 8) != len(stored) - _BLOCK:
        raise ValueError("no tar header of this size")
    return StoredSample(int(name.removesuffix(b".jpg")), -1, stored[_BLOCK:])


def _members(tar: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of each file in a tar of plain ustar headers."""
    position = 0
    while (name := tar[position : position + 100].rstrip(b"\0")) != b"":
        header = tar[position : position + _BLOCK]
        if header[_MAGIC] != b"ustar":
            raise ValueError(f"no tar header at byte {position:,}")
        start = position + _BLOCK
        stop = start + int(header[_SIZE], 8)
        if not start <= stop <= len(tar):
            raise ValueError(f"breaks off in {name.decode('ascii', 'replace')}")
        yield name, tar[start:stop]
        position = stop + -stop % _BLOCK
    if position >= len(tar):
        raise ValueError("its end is missing")


def _description(sample: Sample) -> bytes:
    """Encode the content of a sample's `.json`."""
    width, height = sample.original_size
    # in UTF-8, whatever encoding the program has for the names of files
    path = os.fsencode(sample.path).decode(errors="surrogateescape")
    known: dict[str, Any] = {"height": height, "path": path, "width": width}
    if sample.target is not None:
        known["target"] = sample.target
    if sample.fields:
        known["fields"] = dict(sample.fields)
    return json.dumps(known).encode()


def _header(name: str, size: int) -> bytes:
    """Make the ustar header that the `tarfile` module makes of `name` and `size`, in a tenth of its time."""
    header = bytearray(_EMPTY_HEADER)
    header[: len(name)] = name.encode()
    header[_SIZE] = b"%011o" % size
    header[_CHECKSUM] = b" " * 8  # POSIX counts the checksum as blanks in its own sum
    header[_CHECKSUM] = b"%06o\0 " % sum(header)
    return bytes(header)


def _empty_header() -> bytes:
    member = tarfile.TarInfo()
    member.mode = 0o644
    return member.tobuf(tarfile.USTAR_FORMAT)


_SIZE, _CHECKSUM, _MAGIC = slice(124, 135), slice(148, 156), slice(257, 262)  # positions by POSIX
_EMPTY_HEADER = _empty_header()
FORMAT = Format(
    suffix=SUFFIX,
    index_suffix=INDEX_SUFFIX,
    writer=WebDatasetWriter,
    read_shard=read_shard,
    read_sample=read_sample,
    holds_pixels=False,
    backend="webdataset",
    bytes_per_sample=5 * _BLOCK + _BLOCK // 2 + 90,  # three headers, two blocks of text, padding; index
    bytes_per_shard=2 * _BLOCK + tarfile.RECORDSIZE // 2,  # two empty blocks, and half a record
)
