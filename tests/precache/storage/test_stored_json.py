"""Stored JSON is read as it was written, or refused in one line with the path and the remedy."""

from contextlib import suppress
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.errors import DatasetError, SettingError
from precache.storage.stored_json import Count, decode, encode


class Counted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[2] = 2
    rows: Count = 0
    names: tuple[str, ...] = ()
    raw: bytes = b""

    def __post_init__(self) -> None:
        if len(self.names) > self.rows:
            raise ValueError("more names than rows")


RIGHT = Counted(rows=3, names=("a", "ä"), raw=b"\xff\0")
OTHER_TEXTS = Counted(rows=3, names=("\udcff", "\U0001f600", "\\ud"), raw=b"\xff\0")


def read(raw: bytes) -> Counted:
    return decode(raw, Counted, path="somewhere/x.json", remedy="do this")


@pytest.mark.parametrize("value", [RIGHT, OTHER_TEXTS])
@pytest.mark.parametrize("indent", [0, 1])
def test_values_are_read_as_they_were_written(indent: int, value: Counted) -> None:
    raw = encode(value, indent=indent)
    assert read(raw) == value
    assert encode(read(raw), indent=indent) == raw
    assert raw.endswith(b"}\n")
    assert (b"\n " in raw) == bool(indent)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"\0" * 9,
        encode(RIGHT)[:-9],
        encode(RIGHT) + b"{}",
        b'{"version": 1}',
        b'{"version": "2"}',
        b'{"rows": -1}',
        b'{"rows": 1e400}',
        b'{"rows": NaN}',
        b'{"rows": true}',
        b'{"rows": 99999999999999999999999999}',
        b'{"names": ["a"]}',
        b'{"rows": 1, "names": "a"}',
        b'{"rows": 1, "names": ["\xff"]}',
        b'{"rows": -1, "names": ["\\ud800"]}',
        b'{"rows": 1, "names": ["\\ud800"',
        b'{"rows": NaN, "names": ["\\ud800"]}',
        b'{"names": ["\\ud800"], "other": ' + b"[" * 100_000,
        b'{"raw": "*"}',
        b'{"other": 1}',
        b'{"names": ' + b"[" * 100_000,
        b"[" * 10_000_000,
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_what_was_not_written_is_refused_in_one_line(raw: bytes) -> None:
    with pytest.raises(DatasetError) as refused:
        read(raw)
    assert refused.value.path == "somewhere/x.json"
    assert refused.value.remedy == "do this"
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@given(st.sampled_from((RIGHT, OTHER_TEXTS)), st.integers(0), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(value: Counted, position: int, byte: int) -> None:
    raw = bytearray(encode(value))
    raw[position % len(raw)] = byte
    with suppress(DatasetError):
        assert isinstance(read(bytes(raw)), Counted)


def test_refuses_with_the_error_of_the_caller() -> None:
    with pytest.raises(SettingError):
        decode(b"[]", Counted, path="x", remedy="", error=SettingError)


def test_plain_values_deep_in_one_another_are_refused() -> None:
    with pytest.raises(DatasetError):
        decode(b'{"a":' * 1_000_000 + b"1", dict, path="x", remedy="")
