"""Blocks of shards that are read ahead: which, in which order, and what becomes of requests and errors."""

import errno
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from loaders.batch import Request
from loaders.dataset import open_split
from loaders.read import blocks
from loaders.read.blocks import BlockReader
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.formats.shards import ShardFile
from tests.conftest import IMAGES

BLOCK_BYTES = 16 * 1024  # a shard of the tests has many


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The blocks that are read, in order, of files that seem not to be in the cache."""
    read = blocks.read_block
    found: list[tuple[str, int]] = []

    def note(path: Path, number: int) -> None:
        found.append((str(path), number))
        read(path, number)

    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(blocks, "_READERS", 1)
    monkeypatch.setattr(blocks, "is_cached", lambda descriptor, start: False)
    monkeypatch.setattr(blocks, "read_block", note)
    return found


def requests_for(*batches: list[int]) -> Iterator[Request]:
    for positions in batches:
        yield Request(0, np.array(positions, np.int64))


@pytest.mark.parametrize("kind", ["shards", "keep-shards"])
def test_blocks_are_those_of_the_pictures_once_and_in_order(
    kind: str, converted: dict[str, Path], shaped: dict[str, Path], asked: list[tuple[str, int]]
) -> None:
    data = open_split({**converted, **shaped}[kind], "train")
    order = np.random.default_rng(3).permutation(IMAGES).tolist()
    batches = [order[start : start + 7] for start in range(0, IMAGES, 7)]
    expected: dict[tuple[str, int], None] = {}
    for position in order:
        (shard,), (row,) = (found.tolist() for found in data.locate(np.array([position])))
        start, count = FORMATS["shards"].find_samples(Path(data.files[shard]))[row].tolist()
        for number in range(start // BLOCK_BYTES, (start + count - 1) // BLOCK_BYTES + 1):
            expected[data.files[shard], number] = None
    with closing(BlockReader(data)) as reader:
        served = [*reader.read_ahead(requests_for(*batches, batches[0]))]
        reader._pool.submit(int).result()  # it does what it was asked for one after the other
    assert [request.positions.tolist() for request in served] == [*batches, batches[0]]
    assert asked == [*expected]


def test_nothing_is_asked_for_where_the_cache_has_it(
    converted: dict[str, Path], asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "is_cached", lambda descriptor, start: True)
    data = open_split(converted["shards"], "train")
    with closing(BlockReader(data)) as reader:
        assert len([*reader.read_ahead(requests_for([3, 1], [2]))]) == 2
        with ShardFile(Path(data.files[0])) as shard:
            reader.read_shard(shard)
    assert asked == []


def test_no_request_behind_an_empty_one_is_taken_before_it_is_served(converted: dict[str, Path]) -> None:
    taken = 0

    def requests() -> Iterator[Request]:
        nonlocal taken
        for positions in ([1], [], [2]):
            taken += 1
            yield Request(0, np.array(positions, np.int64))

    with closing(BlockReader(open_split(converted["shards"], "train"))) as reader:
        ahead = reader.read_ahead(requests())
        counts = [(len(request.positions), taken) for request in ahead]
    assert counts == [(1, 2), (0, 2), (1, 3)]


def test_a_block_is_read_into_the_cache_where_linux_cannot_fill_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "advise", lambda *asked: False)
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * blocks.BLOCK_BYTES // 2))
    with mock.patch.object(blocks.os, "preadv", wraps=blocks.os.preadv) as reads:
        blocks.read_block(path, 1)
    ((_, (buffer,), start), _) = reads.call_args
    assert (start, len(buffer)) == (blocks.BLOCK_BYTES, blocks.BLOCK_BYTES // 2)


def test_a_disk_that_fails_is_an_error_that_names_the_shard(
    converted: dict[str, Path], asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, number: int) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(blocks, "read_block", fail)
    data = open_split(converted["shards"], "train")
    path = Path(data.files[0])
    named = pytest.raises(DatasetError, match=path.name)
    with closing(BlockReader(data)) as reader, ShardFile(path) as shard, named:
        reader.read_shard(shard)


def test_the_open_shard_is_read_when_another_file_has_its_name(
    converted: dict[str, Path], asked: list[tuple[str, int]], tmp_path: Path
) -> None:
    data = open_split(converted["shards"], "train")
    path = tmp_path / Path(data.files[0]).name
    path.write_bytes(Path(data.files[0]).read_bytes())
    with closing(BlockReader(data)) as reader, ShardFile(path) as shard:
        path.unlink()
        reader.read_shard(shard)
        assert [number for _, number in asked] == [*range(-(-shard.bytes // BLOCK_BYTES))]
