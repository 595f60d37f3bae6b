"""Format `dali`: JPEGs in TFRecord files, with DALI's index beside each.

    record      uint64 length | uint32 crc(length) | data | uint32 crc(data)   (little-endian)
    data        a tf.train.Example:
                    image/encoded      bytes   a baseline JPEG of the recipe's size, fit and quality
                    image/class/label  int64   the label; only where samples have one class each
                    sample/id          int64   the sample's id
                    target             int64   indices of classes; or float: numbers to be predicted
                    field/NAME         int64, float or bytes (UTF-8), one value or a flat list of them
                    shape/NAME         int64   the shape of field/NAME, where that is a list
    crc         CRC-32C, masked: rotated right by 15 bits, plus 0xA282EAD8

Floats have 32 bits here, and 64 in the dataset's index. A list without values has no type.

The index `.idx` has one line per record, `<offset> <bytes>`, with headers counted in, as DALI's
tfrecord2idx writes it. Sources: https://www.tensorflow.org/tutorials/load_data/tfrecord and
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from precache.errors import DatasetError, os_reason
from precache.formats.base import ByteRange, Format, Sample, StoredSample, shard_remedy
from precache.pictures.images import Size
from precache.storage import read_regular
from precache.storage.output import OutputFile

SUFFIX = ".tfrecord"
INDEX_SUFFIX = ".idx"
_DAMAGE = "its record does not match its checksum; run 'precache verify' on its folder"
IMAGE_KEY, LABEL_KEY, ID_KEY = "image/encoded", "image/class/label", "sample/id"
TARGET_KEY, FIELD_KEY, SHAPE_KEY = "target", "field/", "shape/"


class TFRecordWriter:
    """Writer of a TFRecord file and, at the end, its index."""

    def __init__(self, base: Path, count: int, size: Size | None) -> None:
        """Create the file that becomes `base` + '.tfrecord'; arguments as of `ShardWriter`."""
        self._index: list[str] = []
        self._file = OutputFile(base.with_name(base.name + SUFFIX))
        self._index_path = base.with_name(base.name + INDEX_SUFFIX)

    def add(self, sample: Sample) -> ByteRange:
        """Write one more sample, and return the bytes of its record."""
        record, start = _record(_encode_example(sample)), self._file.bytes
        self._index.append(f"{start} {len(record)}\n")
        self._file.write(record)
        return start, len(record)

    def finish(self) -> list[OutputFile]:
        """Write the index, and close both files, which are not durable yet."""
        with OutputFile(self._index_path) as index_file, self._file:
            index_file.write("".join(self._index).encode())
        return [self._file, index_file]

    def abandon(self) -> None:
        """Remove what was written; also after `finish` has raised."""
        self._file.abandon()


def read_shard(path: Path) -> Iterator[StoredSample]:
    """Yield the samples of the TFRecord file at `path`, in stored order; reads the whole file first."""
    try:
        for data, intact in _records(memoryview(read_regular(path))):
            yield _decode_example(data) if intact else StoredSample(-1, -1, b"", _DAMAGE)
    except (OSError, struct.error, ValueError, KeyError, IndexError) as error:
        raise DatasetError(
            f"cannot be read as TFRecords ({os_reason(error)})", path=path, remedy=shard_remedy(path)
        ) from error


def read_sample(stored: bytes) -> StoredSample:
    """Parse one record; ValueError if it is damaged beyond its data."""
    try:
        ((data, intact),) = _records(memoryview(stored))
        return _decode_example(data) if intact else StoredSample(-1, -1, b"", damage=_DAMAGE)
    except (struct.error, KeyError, IndexError) as error:
        raise ValueError(f"no record ({error})") from error


def _records(content: memoryview) -> Iterator[tuple[memoryview, bool]]:
    """Yield the data of each record as a view, and whether it matches its checksum."""
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
# `varint(number << 3 | wire type)` and a value; wire type 0 is a varint, 2 is length and bytes, 1 and 5 are
# 8 and 4 bytes: https://protobuf.dev/programming-guides/encoding/
#   Example   { Features features = 1; }
#   Features  { map<string, Feature> feature = 1; }      a map entry is { key = 1; value = 2; }
#   Feature   { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; }
#   BytesList { repeated bytes value = 1; }    FloatList { repeated float value = 1 [packed]; }
#   Int64List { repeated int64 value = 1 [packed]; }
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_FIXED_BYTES = {1: 8, 5: 4}


def _encode_example(sample: Sample) -> bytes:
    features = {IMAGE_KEY: _feature(bytes(sample.data))}
    if sample.label >= 0:
        features[LABEL_KEY] = _feature(sample.label)
    features[ID_KEY] = _feature(sample.id)
    if sample.target is not None:
        features[TARGET_KEY] = _feature(sample.target)
    for name, value in sample.fields.items():
        features[FIELD_KEY + name] = _feature(value)
        if isinstance(value, list):
            features[SHAPE_KEY + name] = _feature(list(np.shape(value)))
    entries = [_field(1, key.encode()) + _field(2, value) for key, value in features.items()]
    return _field(1, b"".join(_field(1, entry) for entry in entries))


def _feature(value: Any) -> bytes:
    """Encode bytes, text, a number, or lists of numbers as a Feature; an empty list as an empty one."""
    if isinstance(value, str | bytes):
        content = value if isinstance(value, bytes) else value.encode()
        return _field(_BYTES_LIST, _field(1, content))
    numbers = np.ravel(value)
    if not len(numbers):
        return b""
    if numbers.dtype.kind == "f":
        with np.errstate(over="ignore"):  # a number that is too large for 32 bits becomes infinite
            return _field(_FLOAT_LIST, _field(1, numbers.astype("<f4").tobytes()))
    return _field(_INT64_LIST, _field(1, b"".join(map(_varint, numbers.tolist()))))


def _decode_example(data: memoryview) -> StoredSample:  # a view: each slice of bytes would copy the JPEG
    features: dict[str, memoryview] = {}
    for message in _fields_of_number(data, 1):
        for entry in _fields_of_number(message, 1):
            parts = dict(_fields(entry))
            features[str(parts[1], "utf-8")] = parts.get(2, data[:0])
    return StoredSample(
        id=_int(features[ID_KEY]),
        label=_int(features[LABEL_KEY]) if LABEL_KEY in features else -1,
        data=bytes(_list_content(features[IMAGE_KEY], _BYTES_LIST)),
    )


def _list_content(feature: memoryview, kind: int) -> memoryview:
    """Bytes in the list of this kind in a Feature: its only value, or all values where they are packed."""
    values = dict(_fields(feature)).get(kind)
    value = None if values is None else dict(_fields(values)).get(1)
    if value is None:
        raise ValueError(f"a feature without a list of kind {kind}")
    return value


def _int(feature: memoryview) -> int:
    value, _ = _read_varint(_list_content(feature, _INT64_LIST), 0)
    return value - 2**64 if value >= 2**63 else value


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _fields_of_number(message: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the contents of the fields of a message that have this number."""
    return (content for field_number, content in _fields(message) if field_number == number)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of each field of a message; the content of a varint is its bytes."""
    position = 0
    while position < len(message):
        tag, start = _read_varint(message, position)
        wire = tag & 7
        if wire == 2:
            length, start = _read_varint(message, start)
            position = start + length
        elif wire == 0:
            _, position = _read_varint(message, start)
        elif wire in _FIXED_BYTES:
            position = start + _FIXED_BYTES[wire]
        else:
            raise ValueError(f"unexpected wire type {wire}")
        if position > len(message):
            raise ValueError("a field is longer than its message")
        yield tag >> 3, message[start:position]


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative values as two's complement
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    byte = message[position]
    if byte < 0x80:  # most varints have one byte
        return byte, position + 1
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
    writer=TFRecordWriter,
    read_shard=read_shard,
    read_sample=read_sample,
    holds_pixels=False,
    backend="dali",
    bytes_per_sample=120,  # keys, lengths and checksums
    bytes_per_shard=0,
)
