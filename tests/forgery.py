"""Forged datasets: one value is changed, and every checksum is computed anew, as a stranger might do."""

import io
import json
import math
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from precache.dataset.index import INDEX_NAME, SHARD, ArrayEntry, write_arrays
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.formats.tfrecord import _masked_crc
from precache.storage import checksum_of, crc32c
from tests.damage import edit_manifest

VALUES: tuple[Any, ...] = (
    -1, 0, 1, 3, 2**31, 2**36, 2**62, 2**63 - 1, 2**64, 10**400, 0.5, 1e300, math.nan, math.inf,
    True, None, "", "x", "\ud800", "train", [], [-1], [2**62, 2**62], [None], {}, {"train": -1},
    "U8", "F64", "I32", [2**40], [1], [0, 0], [0, 2**62], [-8, 0], [8, 0], {"": 2**40},
)  # fmt: skip
"""Values that replace a value of JSON."""
NUMBERS = (
    -(2**63), -(2**31), -2, -1, 0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**36, 2**40, 2**62, 2**63 - 1,
    2**64 - 1,
)  # fmt: skip
"""Numbers that replace a number in a column or in a shard, if its type can hold them."""

Forge = Callable[[Path], None]
"""Forges the dataset in a folder."""


def forge_manifest(path: Path) -> Iterator[tuple[str, Forge]]:
    """Yield forgeries of the manifest, each with a description: a value is replaced, or removed."""
    content = json.loads((path / MANIFEST_NAME).read_bytes())
    for keys in _paths_in(content):
        if keys[0] in ("version", "checksum", "index") and keys[1:2] != ("columns",):
            continue
        name = ".".join(map(str, keys))
        for value in VALUES:
            yield f"{name} = {value!r:.30}", _set_value(keys, value)
        yield f"{name} removed", _remove(keys)


def _paths_in(content: Any, parent: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value in a document of JSON."""
    if parent:
        yield parent
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    for key, value in items:
        yield from _paths_in(value, (*parent, key))


def _set_value(keys: tuple[Any, ...], value: Any) -> Forge:
    def forge(path: Path) -> None:
        content = json.loads((path / MANIFEST_NAME).read_bytes())
        _parent(content, keys)[keys[-1]] = value
        edit_manifest(path, **content)

    return forge


def _remove(keys: tuple[Any, ...]) -> Forge:
    def forge(path: Path) -> None:
        content = json.loads((path / MANIFEST_NAME).read_bytes())
        if len(keys) == 1:  # edit_manifest keeps entries that it does not get
            (path / MANIFEST_NAME).write_text("{}")
            content.pop(keys[0])
        else:
            del _parent(content, keys)[keys[-1]]
        edit_manifest(path, **content)

    return forge


def _parent(content: Any, keys: tuple[Any, ...]) -> Any:
    """Return the object or array that holds the value at `keys`."""
    for key in keys[:-1]:
        content = content[key]
    return content


def forge_header(path: Path) -> Iterator[tuple[str, Forge]]:
    """Yield forgeries of the index's header, each with a description: a value replaced, an entry removed."""
    _, header, _ = _parts(path)
    for name in header:
        for keys in _paths_in(header[name]):
            for value in VALUES:
                yield f"{name}.{'.'.join(map(str, keys))} = {value!r:.30}", set_header(name, keys, value)
        yield f"{name} removed", set_header(name, (), None)


def set_header(name: str, keys: tuple[Any, ...], value: Any) -> Forge:
    """Set one value in the header's entry of a column; without keys, remove the entry."""

    def forge(path: Path) -> None:
        entry, header, rest = _parts(path)
        if keys:
            _parent(header[name], keys)[keys[-1]] = value
        else:
            del header[name]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        start = len(text).to_bytes(8, "little") + text
        (path / INDEX_NAME).write_bytes(start + rest)
        entry |= {"bytes": len(start) + len(rest), "header": f"{checksum_of(start):016x}"}
        for column in entry["columns"].copy():
            if (known := header.get(column)) is None:
                del entry["columns"][column]
                continue
            try:  # the checksum of a column that still has a place in the file
                first, last = known["data_offsets"]
                entry["columns"][column] = f"{checksum_of(rest[first:last]):016x}"
            except (TypeError, ValueError, KeyError):
                pass
        edit_manifest(path, index=entry)

    return forge


def _parts(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Read the index: its entry in the manifest, its header, and the bytes after the header."""
    entry = json.loads((path / MANIFEST_NAME).read_bytes())["index"]
    content = (path / INDEX_NAME).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return entry, json.loads(content[8:start]), content[start:]


def forge_columns(path: Path) -> Iterator[tuple[str, Forge]]:
    """Yield forgeries of each column of the index, each with a description: numbers, rows, axes, types."""
    for name, array in _arrays(path).items():
        for number in NUMBERS:
            if array.dtype.kind in "iu":
                limits = np.iinfo(array.dtype)
                if not limits.min <= number <= limits.max:
                    continue
            for change in ("first", "last", "all"):
                yield f"{name}: {change} = {number}", _set_column(name, change, number)
        for change in ("reversed", "doubled", "shorter", "empty", "one more axis", "float", "bytes"):
            yield f"{name}: {change}", _set_column(name, change, 0)


def _arrays(path: Path) -> dict[str, Any]:
    """Read all columns of the index, by name."""
    _, header, rest = _parts(path)
    data = np.frombuffer(rest, np.uint8)
    return {name: msgspec.convert(array, ArrayEntry).view(data) for name, array in header.items()}


def _set_column(name: str, change: str, number: int) -> Forge:
    """Change one number of a column, or all of it."""

    def forge(path: Path) -> None:
        arrays = _arrays(path)
        array = arrays[name].copy()
        flat = array.reshape(-1)
        match change:
            case "first":
                flat[:1] = number
            case "last":
                flat[-1:] = number
            case "all":
                array[...] = number
            case "reversed":
                array = np.ascontiguousarray(array[::-1])
            case "doubled":
                array = np.concatenate((array, array))
            case "shorter":
                array = array[:-1]
            case "empty":
                array = array[:0]
            case "one more axis":
                array = array[..., None]
            case "float":
                array = array.astype(np.float64)
            case "bytes":
                array = array.astype(np.uint8)
        write(path, {**arrays, name: array})

    return forge


def write(path: Path, arrays: dict[str, Any]) -> None:
    """Write an index of these columns, with correct checksums, in place of the one in the folder."""
    edit_manifest(path, index=msgspec.to_builtins(write_arrays(path, arrays)))


def forge_shards(path: Path) -> Iterator[tuple[str, Forge]]:
    """Yield forgeries of the first shard and its index, each with a description: headers, lengths, JPEGs."""
    forgers = {
        ".safetensors": _forge_safetensors,
        ".idx": _forge_dali_index,
        ".tar": _forge_tar,
        ".tfrecord": _forge_records,
    }
    for file in sorted(path.glob("train-00000.*")):
        for description, content in forgers[file.suffix](file.read_bytes()):
            yield f"{file.name}: {description}", _replace_file(file.name, content)


def _replace_file(name: str, content: bytes) -> Forge:
    """Replace a shard's file, and correct its checksum and those of its samples in the index."""

    def forge(path: Path) -> None:
        (path / name).write_bytes(content)
        arrays = {column: array.copy() for column, array in _arrays(path).items()}
        column = int(name.endswith(".idx"))
        arrays[f"{SHARD}bytes"][0, column] = len(content)
        arrays[f"{SHARD}crc32c"][0, column] = int(crc32c(content), 16)
        form = FORMATS[json.loads((path / MANIFEST_NAME).read_bytes())["recipe"]["format"]]
        with suppress(DatasetError):
            for row, sample in enumerate(form.read_shard(path / name)):
                arrays["checksums"][row : row + 1] = checksum_of(sample.data)
        write(path, arrays)

    return forge


def _forge_safetensors(content: bytes) -> Iterator[tuple[str, bytes]]:
    header = json.loads(content[8:4096])
    for keys in _paths_in(header):
        for value in VALUES:
            changed = json.loads(content[8:4096])
            _parent(changed, keys)[keys[-1]] = value
            text = json.dumps(changed, separators=(",", ":")).encode().ljust(4088)[:4088]
            yield f"{'.'.join(map(str, keys))} = {value!r:.30}", content[:8] + text + content[4096:]
    for number in NUMBERS:
        yield f"header of {number}", _number(number, 8) + content[8:]
        for name in ("labels", "ids", "offsets", "shapes"):
            first, last = (4096 + offset for offset in header[name]["data_offsets"])
            width = 4 if name == "shapes" else 8
            for offset in (first, last - width):
                yield f"{name} at {offset} = {number}", _with(content, offset, _number(number, width))


def _forge_dali_index(content: bytes) -> Iterator[tuple[str, bytes]]:
    words = re.split(rb"(\d+)", content)
    for index in range(1, len(words), 2):
        for number in (*NUMBERS, "x", 10**30, "9" * 5000, ""):
            changed = [*words[:index], str(number).encode(), *words[index + 1 :]]
            yield f"word {index} = {number!r:.30}", b"".join(changed)
    yield "empty", b""
    yield "binary", bytes(range(256))


def _forge_tar(content: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = tar.getmembers()[:4]
    sizes = (b"7" * 11, b"0" * 11, b"-0000000001", b"\x80" + b"\xff" * 10, b"x" * 11, b" " * 11)
    names = (b"", b"9" * 20 + b".jpg", b"x.json", b"-1.json", b"\xff.json")
    for member in members:
        for number in sizes:
            yield f"size of {member.name} = {number!r}", _with(content, member.offset + 124, number)
        for name in names:
            yield f"name of {member.name} = {name!r}", _with(content, member.offset, name.ljust(100, b"\0"))
        if member.name.endswith(".cls"):
            for label in (b"-9", b"9" * 30, b"1_0", b"\xff", b""):
                changed = _with(content, member.offset_data, label.ljust(512, b"\0"))
                yield f"{member.name} = {label!r}", changed
    yield from _forge_jpeg(content)


def _forge_records(content: bytes) -> Iterator[tuple[str, bytes]]:
    for number in NUMBERS:
        length = _number(number, 8)
        yield f"length = {number}", length + _number(_masked_crc(length), 4) + content[12:]
    stop = 12 + int.from_bytes(content[:8], "little")
    changes = [
        (f"byte {offset} = {byte}", _with(content, offset, bytes([byte])))
        for offset in (*range(12, 42), *range(stop - 90, stop))
        for byte in (0, 1, 8, 10, 127, 128, 255)
    ]
    for description, changed in (*changes, *_forge_jpeg(content)):
        yield description, _with(changed, stop, _number(_masked_crc(changed[12:stop]), 4))


def _forge_jpeg(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the file with other sizes in the header of its first JPEG."""
    offset = content.index(b"\xff\xc0", content.index(b"\xff\xd8\xff")) + 5
    for sides in ((65500, 65500), (0, 0), (1, 65535), (8000, 8000), (15, 16)):
        written = b"".join(side.to_bytes(2, "big") for side in sides)
        yield f"JPEG of {sides}", _with(content, offset, written)


def _with(content: bytes, offset: int, new: bytes) -> bytes:
    return content[:offset] + new + content[offset + len(new) :]


def _number(number: int, width: int) -> bytes:
    return (number % (1 << 8 * width)).to_bytes(width, "little")
