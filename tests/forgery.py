"""Datasets as a stranger may have made them: one value is another, and every checksum is computed anew."""

import io
import json
import math
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from precache.dataset.index import SHARD, checksum_of, parse_header, write_arrays
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.formats.tfrecord import _masked_crc
from precache.storage import crc32c
from tests.damage import edit_manifest

VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 3, 2**31, 2**36, 2**62, 2**63 - 1, 2**64, 10**400, 0.5, 1e300, math.nan, math.inf),
    *(True, None, "", "x", "\ud800", "train", [], [-1], [2**62, 2**62], [None], {}, {"train": -1}),
    *("U8", "F64", "I32", [2**40], [1], [0, 0], [0, 2**62], [-8, 0], [8, 0], {"": 2**40}),
)
"""What a value of JSON is changed to."""
NUMBERS = (
    *(-(2**63), -(2**31), -2, -1, 0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**36, 2**40, 2**62),
    *(2**63 - 1, 2**64 - 1),
)
"""What a number in a column, or in a shard, is changed to, where its type has it."""

Forge = Callable[[Path], None]


def of_manifest(path: Path) -> Iterator[tuple[str, Forge]]:
    """Each value of the manifest changed to each of VALUES, or removed, or twice."""
    content = json.loads((path / MANIFEST_NAME).read_bytes())
    for place in _places(content):
        if place[0] in ("version", "checksum", "index") and place[1:2] != ("columns",):
            continue
        name = ".".join(map(str, place))
        for value in VALUES:
            yield f"{name} = {value!r:.30}", _set(place, value)
        yield f"{name} removed", _removed(place)


def _places(content: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if before:
        yield before
    items = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in items:
        yield from _places(value, (*before, key))


def _set(place: tuple[Any, ...], value: Any) -> Forge:
    def forge(path: Path) -> None:
        content = json.loads((path / MANIFEST_NAME).read_bytes())
        _parent(content, place)[place[-1]] = value
        edit_manifest(path, **content)

    return forge


def _removed(place: tuple[Any, ...]) -> Forge:
    def forge(path: Path) -> None:
        content = json.loads((path / MANIFEST_NAME).read_bytes())
        if len(place) == 1:  # edit_manifest keeps what it is not told of
            (path / MANIFEST_NAME).write_text("{}")
            content.pop(place[0])
        else:
            _parent(content, place).__delitem__(place[-1])
        edit_manifest(path, **content)

    return forge


def _parent(content: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        content = content[key]
    return content


def of_header(path: Path) -> Iterator[tuple[str, Forge]]:
    """Each entry of the index's header changed."""
    _, header, _ = _parts(path)
    for name in header:
        for place in _places(header[name]):
            for value in VALUES:
                yield f"{name}.{'.'.join(map(str, place))} = {value!r:.30}", set_header(name, place, value)
        yield f"{name} removed", set_header(name, (), None)


def set_header(name: str, place: tuple[Any, ...], value: Any) -> Forge:
    """One value of the entry of a column is another."""

    def forge(path: Path) -> None:
        entry, header, rest = _parts(path)
        if place:
            _parent(header[name], place)[place[-1]] = value
        else:
            del header[name]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        start = len(text).to_bytes(8, "little") + text
        (path / entry["name"]).write_bytes(start + rest)
        entry |= {"bytes": len(start) + len(rest), "header": f"{checksum_of(start):016x}"}
        for column in entry["columns"].copy():
            if (known := header.get(column)) is None:
                del entry["columns"][column]
                continue
            try:  # as far as there is something
                first, last = known["data_offsets"]
                entry["columns"][column] = f"{checksum_of(rest[first:last]):016x}"
            except (TypeError, ValueError, KeyError):
                pass
        edit_manifest(path, index=entry)

    return forge


def _parts(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The manifest's entry, the header, and what is behind it."""
    entry = json.loads((path / MANIFEST_NAME).read_bytes())["index"]
    content = (path / entry["name"]).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return entry, json.loads(content[8:start]), content[start:]


def of_columns(path: Path) -> Iterator[tuple[str, Forge]]:
    """A number in each column of the index changed, or all; rows swapped, missing, and too many."""
    for name, array in _arrays(path).items():
        for number in NUMBERS:
            if (
                np.iinfo(array.dtype).min <= number <= np.iinfo(array.dtype).max
                if array.dtype.kind in "iu"
                else True
            ):
                for where in ("first", "last", "all"):
                    yield f"{name}: {where} = {number}", _set_column(name, where, number)
        for how in ("reversed", "doubled", "shorter", "empty", "one more axis", "float", "bytes"):
            yield f"{name}: {how}", _set_column(name, how, 0)


def _arrays(path: Path) -> dict[str, Any]:
    entry, _, rest = _parts(path)
    start = (path / entry["name"]).stat().st_size - len(rest)
    places = parse_header((path / entry["name"]).read_bytes()[:start], start + len(rest))
    return {
        name: np.frombuffer(rest, place.dtype, math.prod(place.shape), place.start - start).reshape(
            place.shape
        )
        for name, place in places.items()
    }


def _set_column(name: str, how: str, number: int) -> Forge:
    def forge(path: Path) -> None:
        arrays = _arrays(path)
        array = arrays[name].copy()
        flat = array.reshape(-1)
        if how in ("first", "last"):
            flat[{"first": slice(0, 1), "last": slice(-1, None)}[how]] = number
        elif how == "all":
            array[...] = number
        else:
            array = {
                "reversed": lambda: np.ascontiguousarray(array[::-1]),
                "doubled": lambda: np.concatenate((array, array)),
                "shorter": lambda: array[:-1],
                "empty": lambda: array[:0],
                "one more axis": lambda: array[..., None],
                "float": lambda: array.astype(np.float64),
                "bytes": lambda: array.astype(np.uint8),
            }[how]()
        write(path, {**arrays, name: array})

    return forge


def write(path: Path, arrays: dict[str, Any]) -> None:
    """Write the index anew of these columns, with the checksums that they have."""
    entry = json.loads((path / MANIFEST_NAME).read_bytes())["index"]
    edit_manifest(path, index=asdict(write_arrays(path / entry["name"], arrays)))


def of_shards(path: Path) -> Iterator[tuple[str, Forge]]:
    """A number in the first shard, or in the index beside it, changed: of a header, a length, a JPEG."""
    change = {
        ".safetensors": _pixels_changed,
        ".idx": _index_changed,
        ".tar": _tar_changed,
        ".tfrecord": _records_changed,
    }
    for file in sorted(path.glob("train-00000.*")):
        for what, changed in change[file.suffix](file.read_bytes()):
            yield f"{file.name}: {what}", _set_file(file.name, changed)


def _set_file(name: str, changed: bytes) -> Forge:
    def forge(path: Path) -> None:
        (path / name).write_bytes(changed)
        arrays = {column: array.copy() for column, array in _arrays(path).items()}
        column = int(name.endswith(".idx"))
        arrays[f"{SHARD}bytes"][0, column] = len(changed)
        arrays[f"{SHARD}crc32c"][0, column] = int(crc32c(changed), 16)
        form = FORMATS[json.loads((path / MANIFEST_NAME).read_bytes())["recipe"]["format"]]
        with suppress(DatasetError):
            for row, sample in enumerate(form.read_shard(path / name)):
                arrays["checksums"][row : row + 1] = checksum_of(sample.data)
        write(path, arrays)

    return forge


def _pixels_changed(content: bytes) -> Iterator[tuple[str, bytes]]:
    header = json.loads(content[8:4096])
    for place in _places(header):
        for value in VALUES:
            changed = json.loads(content[8:4096])
            _parent(changed, place)[place[-1]] = value
            text = json.dumps(changed, separators=(",", ":")).encode().ljust(4088)[:4088]
            yield f"{'.'.join(map(str, place))} = {value!r:.30}", content[:8] + text + content[4096:]
    for number in NUMBERS:
        yield f"header of {number}", _number(number, 8) + content[8:]
        for name in ("labels", "ids", "offsets", "shapes"):
            first, last = (4096 + place for place in header[name]["data_offsets"])
            width = 4 if name == "shapes" else 8
            for at in (first, last - width):
                changed_at = content[:at] + _number(number, width) + content[at + width :]
                yield f"{name} at {at} = {number}", changed_at


def _index_changed(content: bytes) -> Iterator[tuple[str, bytes]]:
    words = re.split(rb"(\d+)", content)
    for at in range(1, len(words), 2):
        for number in (*NUMBERS, "x", 10**30, "9" * 5000, ""):
            yield (
                f"word {at} = {number!r:.30}",
                b"".join((*words[:at], str(number).encode(), *words[at + 1 :])),
            )
    yield "empty", b""
    yield "binary", bytes(range(256))


def _tar_changed(content: bytes) -> Iterator[tuple[str, bytes]]:
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
    yield from _jpeg_changed(content)


def _records_changed(content: bytes) -> Iterator[tuple[str, bytes]]:
    for number in NUMBERS:
        length = _number(number, 8)
        yield f"length = {number}", length + _number(_masked_crc(length), 4) + content[12:]
    stop = 12 + int.from_bytes(content[:8], "little")
    changes = [
        (f"byte {at} = {byte}", _with(content, at, bytes([byte])))
        for at in (*range(12, 42), *range(stop - 90, stop))
        for byte in (0, 1, 8, 10, 127, 128, 255)
    ]
    for what, changed in (*changes, *_jpeg_changed(content)):
        yield what, _with(changed, stop, _number(_masked_crc(changed[12:stop]), 4))


def _jpeg_changed(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The first JPEG in a file says that it is of another size."""
    at = content.index(b"\xff\xc0", content.index(b"\xff\xd8\xff")) + 5
    for sides in ((65500, 65500), (0, 0), (1, 65535), (8000, 8000), (15, 16)):
        written = b"".join(side.to_bytes(2, "big") for side in sides)
        yield f"JPEG of {sides}", _with(content, at, written)


def _with(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def _number(number: int, width: int) -> bytes:
    return (number % (1 << 8 * width)).to_bytes(width, "little")
