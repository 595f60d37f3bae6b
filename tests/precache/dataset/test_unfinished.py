"""Sidecars: what is written is read back, and no changed byte is taken."""

import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from precache.dataset.files import FileEntry
from precache.dataset.statistics import PixelSums
from precache.dataset.unfinished import (
    MODIFIED_NS,
    SOURCE_CHECKSUMS,
    Sidecar,
    encode_columns,
    read_sidecar,
    sidecar_path,
)
from precache.errors import DatasetError

texts = st.text(st.characters(exclude_categories=()))  # surrogates, too
numbers = st.integers(0, 2**64 - 1)


def make_sidecar(reasons: list[str], checksums: list[int], shard: str = "train-00000") -> Sidecar:
    return Sidecar(
        shard=shard,
        inputs_digest="c0ffee",
        files=(FileEntry(f"{shard}.tar", 512, "0123abcd"), FileEntry(f"{shard}.idx", 7, "00000000")),
        rejected=tuple(enumerate(reasons)),
        sums=PixelSums(3, (1, 2, 3), (4, 5, 2**63)),
        columns=encode_columns(
            {
                "source_sizes": [(7, number % 9) for number in range(len(checksums))],
                "checksums": checksums,
                MODIFIED_NS: [-(2**63), 2**63 - 1],
                SOURCE_CHECKSUMS: checksums,
            }
        ),
    )


def read_back(raw: bytes, folder: Path) -> Sidecar:
    sidecar_path(folder, "train-00000").write_bytes(raw)
    return read_sidecar(folder, "train-00000", "c0ffee")


@given(st.lists(texts, max_size=3), st.lists(numbers, max_size=5))
@settings(max_examples=50)
def test_a_sidecar_is_read_as_it_was_written(reasons: list[str], checksums: list[int]) -> None:
    sidecar = make_sidecar(reasons, checksums)
    with TemporaryDirectory() as folder:
        again = read_back(sidecar.to_json(), Path(folder))
    assert (again.files, again.rejected, again.sums) == (sidecar.files, sidecar.rejected, sidecar.sums)
    assert again.samples == len(checksums)
    assert_array_equal(again.column("checksums"), np.array(checksums, np.uint64))
    assert again.column("source_sizes").shape == (len(checksums), 2)
    assert again.column(MODIFIED_NS).tolist() == [-(2**63), 2**63 - 1]


def test_no_changed_byte_of_a_sidecar_is_taken(tmp_path: Path) -> None:
    raw = make_sidecar(["truncated"], [1, 2**64 - 1]).to_json()
    for position in range(len(raw) - 1):
        damaged = bytearray(raw)
        damaged[position] ^= 1
        with pytest.raises(DatasetError, match=r"train-00000\.json"):
            read_back(bytes(damaged), tmp_path)
        with pytest.raises(DatasetError):
            read_back(raw[:position], tmp_path)


def test_the_sidecar_of_another_shard_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="another shard"):
        read_back(make_sidecar([], [], shard="train-00001").to_json(), tmp_path)


def test_reading_a_sidecar_takes_memory_of_its_size(tmp_path: Path) -> None:
    raw = make_sidecar([], [1, 2]).to_json()
    tracemalloc.start()
    try:
        read_back(raw, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
