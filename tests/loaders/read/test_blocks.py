"""Reading blocks of shards ahead: which ones, in which order, and how errors are passed on."""

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
from precache.formats.shards import ShardFile
from tests.conftest import IMAGES

BLOCK_BYTES = 16 * 1024  # a shard of the tests has many


@pytest.fixture
def blocks_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(path, number) of each block that is read, in order; no file seems to be in the cache."""
    read_block = blocks.read_block
    numbers: list[tuple[str, int]] = []

    def read_and_record(path: Path, number: int) -> None:
        numbers.append((str(path), number))
        read_block(path, number)

    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(blocks, "_READERS", 1)
    monkeypatch.setattr(blocks, "is_cached", lambda descriptor, start: False)
    monkeypatch.setattr(blocks, "read_block", read_and_record)
    return numbers


def requests_for(*batches: list[int]) -> Iterator[Request]:
    for positions in batches:
        yield Request(0, np.array(positions, np.int64))


@pytest.mark.parametrize("kind", ["shards", "keep-shards"])
def test_reader_reads_each_block_of_the_pictures_once_in_order(
    kind: str, converted: dict[str, Path], shaped: dict[str, Path], blocks_read: list[tuple[str, int]]
) -> None:
    data = open_split({**converted, **shaped}[kind], "train")
    order = np.random.default_rng(3).permutation(IMAGES).tolist()
    batches = [order[start : start + 7] for start in range(0, IMAGES, 7)]
    expected: dict[tuple[str, int], None] = {}
    for position in order:
        shard = int(data.locate(np.array([position]))[0][0])
        start, count = data.index.byte_ranges[position].tolist()
        for number in range(start // BLOCK_BYTES, (start + count - 1) // BLOCK_BYTES + 1):
            expected[data.files[shard], number] = None
    with closing(BlockReader(data)) as reader:
        for request in requests_for(*batches, batches[0]):
            reader.fetch(request)
        reader._pool.submit(int).result()  # its one thread has then read all blocks
    assert blocks_read == [*expected]


def test_reader_reads_no_block_that_is_cached(
    converted: dict[str, Path], blocks_read: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "is_cached", lambda descriptor, start: True)
    data = open_split(converted["shards"], "train")
    with closing(BlockReader(data)) as reader:
        for request in requests_for([3, 1], [2]):
            reader.fetch(request)
        with ShardFile(Path(data.files[0])) as shard:
            reader.read_shard(shard)
    assert blocks_read == []


def test_block_is_read_with_preadv_where_linux_cannot_populate_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "advise", lambda *arguments: False)
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * blocks.BLOCK_BYTES // 2))
    with mock.patch.object(blocks.os, "preadv", wraps=blocks.os.preadv) as reads:
        blocks.read_block(path, 1)
    ((_, (buffer,), start), _) = reads.call_args
    assert (start, len(buffer)) == (blocks.BLOCK_BYTES, blocks.BLOCK_BYTES // 2)


def test_failing_disk_raises_dataset_error_with_the_shards_path(
    converted: dict[str, Path], blocks_read: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, number: int) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(blocks, "read_block", fail)
    data = open_split(converted["shards"], "train")
    path = Path(data.files[0])
    raised = pytest.raises(DatasetError, check=lambda error: error.path == path)
    with closing(BlockReader(data)) as reader, ShardFile(path) as shard, raised:
        reader.read_shard(shard)


def test_open_shard_is_read_after_another_file_took_its_name(
    converted: dict[str, Path], blocks_read: list[tuple[str, int]], tmp_path: Path
) -> None:
    data = open_split(converted["shards"], "train")
    path = tmp_path / Path(data.files[0]).name
    path.write_bytes(Path(data.files[0]).read_bytes())
    with closing(BlockReader(data)) as reader, ShardFile(path) as shard:
        path.unlink()
        reader.read_shard(shard)
        assert [number for _, number in blocks_read] == [*range(-(-shard.bytes // BLOCK_BYTES))]
