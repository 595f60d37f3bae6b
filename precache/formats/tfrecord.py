"""Format `dali`: JPEGs in TFRecord files, with DALI's index beside each.

    record      uint64 length | uint32 crc(length) | data | uint32 crc(data)   (little-endian)
    data        a tf.train.Example:
                    image/encoded      bytes   a baseline JPEG of the recipe's size and quality
                    image/class/label  int64   the label
                    sample/id          int64   the sample's id
    crc         CRC-32C, masked: rotated right by 15 bits, plus 0xA282EAD8

The index `.idx` has one line per record, `<offset> <bytes>`, headers counted in, as DALI's
tfrecord2idx writes it. Sources: https://www.tensorflow.org/tutorials/load_data/tfrecord and
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto
"""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import google_crc32c
import numpy as np

from precache.errors import DatasetError
from precache.formats.base import Format, Places, Sample, StoredSample, read_index, remedy
from precache.output import OutputFile, write_beside
from precache.storage import read_regular

SUFFIX = ".tfrecord"
INDEX_SUFFIX = ".idx"
_DAMAGE = "its record does not match its checksum; run 'precache verify' on its folder"
IMAGE_KEY, LABEL_KEY, ID_KEY = "image/encoded", "image/class/label", "sample/id"


def write_shard(base: Path, samples: Iterable[Sample], count: int, size: int) -> list[OutputFile]:
    """Write `base` + '.tfrecord' and `base` + '.idx' beside."""
    path, index_path = base.with_name(base.name + SUFFIX), base.with_name(base.name + INDEX_SUFFIX)
    index: list[str] = []
    with write_beside(path) as file:
        for sample in samples:
            record = _record(_encode_example(sample))
            index.append(f"{file.bytes} {len(record)}\n")
            file.write(record)
    with write_beside(index_path) as index_file:
        index_file.write("".join(index).encode())
    return [file, index_file]


def read_shard(path: Path) -> Iterator[StoredSample]:
    """The samples of a TFRecord file in stored order; the file is read whole, its checksums are compared."""
    try:
        for data, intact in _records(memoryview(read_regular(path))):
            yield _decode_example(data) if intact else StoredSample(-1, -1, b"", _DAMAGE)
    except (OSError, struct.error, ValueError, KeyError, IndexError) as error:
        raise DatasetError(f"{path}: cannot be read as TFRecords ({error}); {remedy(path)}") from error


def find_samples(path: Path) -> Places:
    """Where in the file at `path` its records lie, by the index beside it."""
    return read_index(path.with_suffix(INDEX_SUFFIX), _parse_index)


def _parse_index(index: bytes) -> Iterator[tuple[int, int]]:
    for line in index.splitlines():
        start, size = line.split()
        yield int(start), int(size)


def read_sample(stored: bytes) -> StoredSample:
    """The sample of one record."""
    try:
        ((data, intact),) = _records(memoryview(stored))
        return _decode_example(data) if intact else StoredSample(-1, -1, b"", _DAMAGE)
    except (struct.error, KeyError, IndexError) as error:
        raise ValueError(f"no record ({error})") from error


def _records(content: memoryview) -> Iterator[tuple[memoryview, bool]]:
    """The data of each record, in place, and whether it is that of its checksum."""
    position = 0
    while position < len(content):
        start = position + 12
        length, crc = struct.unpack_from("<QI", content, position)
        if crc != _masked_crc(content[position : position + 8]):
            raise ValueError(f"the length of the record at byte {position:,} does not match its checksum")
        if start + length + 4 > len(content):
            raise ValueError(f"breaks off in the record at byte {position:,}")
        data = content[start : start + length]
        yield data, struct.unpack_from("<I", content, start + length) == (_masked_crc(data),)
        position = start + length + 4


def _masked_crc(data: bytes | memoryview) -> int:
    crc: int = google_crc32c.extend(0, np.frombuffer(data, np.uint8))  # the library takes arrays, not views
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", _masked_crc(length)), data, struct.pack("<I", _masked_crc(data)))
    )


# Protocol buffers, as far as tf.train.Example needs them. A message is a run of fields, each
# `varint(number << 3 | wire type)` and a value; wire type 0 is a varint, 2 is length and bytes.
#   Example   { Features features = 1; }
#   Features  { map<string, Feature> feature = 1; }      a map entry is { key = 1; value = 2; }
#   Feature   { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; }
#   BytesList { repeated bytes value = 1; }    Int64List { repeated int64 value = 1 [packed]; }


def _encode_example(sample: Sample) -> bytes:
    features = {
        IMAGE_KEY: _field(1, _field(1, bytes(sample.data))),
        LABEL_KEY: _field(3, _field(1, _varint(sample.label))),
        ID_KEY: _field(3, _field(1, _varint(sample.id))),
    }
    entries = (_field(1, _field(1, key.encode()) + _field(2, value)) for key, value in features.items())
    return _field(1, b"".join(entries))


def _decode_example(data: memoryview) -> StoredSample:  # a view: each slice of bytes would copy the JPEG
    features: dict[str, memoryview] = {}
    for entry in _fields(_only_field(data)):
        key, value = _fields(entry)
        features[str(key, "utf-8")] = _only_field(_only_field(value))
    label, _ = _read_varint(features[LABEL_KEY], 0)
    sample_id, _ = _read_varint(features[ID_KEY], 0)
    return StoredSample(sample_id, label, bytes(features[IMAGE_KEY]))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _fields(message: memoryview) -> Iterator[memoryview]:
    position = 0
    while position < len(message):
        tag = message[position]  # one byte: no number is above 15
        if tag & 7 != 2:
            raise ValueError(f"unexpected wire type {tag & 7}")
        length, position = _read_varint(message, position + 1)
        yield message[position : position + length]
        position += length


def _only_field(message: memoryview) -> memoryview:
    (content,) = _fields(message)
    return content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


FORMAT = Format(
    suffix=SUFFIX,
    index_suffix=INDEX_SUFFIX,
    write_shard=write_shard,
    read_shard=read_shard,
    find_samples=find_samples,
    read_sample=read_sample,
    holds_pixels=False,
    bytes_per_sample=120,  # keys, lengths and checksums
    bytes_per_shard=0,
)
