"""Pictures of a mapped shard stay as they are, whatever happens to its file."""

import errno
import gc
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from loaders.read.blocks import map_file
from loaders.read.shards import MappedShard
from precache import open_dataset
from precache.formats import FORMATS
from precache.formats.shards import DATA_START, ShardFile
from precache.storage import atomic_write


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("kind", ["shards", "keep-shards"])
def test_pictures_stay_when_another_file_takes_the_shards_name(
    kind: str, in_blocks: bool, converted: dict[str, Path], shaped: dict[str, Path], tmp_path: Path
) -> None:
    dataset = open_dataset({**converted, **shaped}[kind])
    path, whole = tmp_path / "x", dataset.shard_path(dataset.manifest.shards[0]).read_bytes()
    path.write_bytes(whole)
    pictures = [sample.data for sample in FORMATS["shards"].read_shard(path)]
    stored = b"".join(np.asarray(picture).tobytes() for picture in pictures)
    assert DATA_START % 4096 == 0, "pictures begin on a page"
    assert whole[DATA_START : DATA_START + len(stored)] == stored
    with ShardFile(path) as file:
        shard = MappedShard(file, in_blocks=in_blocks, locked=None)
    shown = shard.picture(0)
    shard.will_need(0)
    with pytest.raises(ValueError, match="read-only"):
        shown[:] = 0
    with atomic_write(path) as another:
        another.write(b"another")
    assert np.array_equal(shown, pictures[0])
    shard.close(drop_cached=True)
    path.unlink()
    assert np.array_equal(shown, pictures[0])


def memory_bytes(name: str) -> int:
    """Return a figure of this process's memory: `VmData`, what counts against limits, or `VmSize`."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_file_takes_no_data_memory_and_no_descriptor(tmp_path: Path) -> None:
    path, count = tmp_path / "sparse", 1 << 30
    with path.open("wb") as file:
        file.truncate(count)
    gc.collect()
    before = {name: memory_bytes(name) for name in ("VmData", "VmSize")}
    descriptors = len(os.listdir("/proc/self/fd"))
    with path.open("rb") as file:
        mapped = map_file(file.fileno(), count)
    view = mapped[count - 1 :]
    del mapped
    assert view.tolist() == [0]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert memory_bytes("VmSize") > before["VmSize"] + count // 2
    assert memory_bytes("VmData") < before["VmData"] + count // 2
    del view
    assert memory_bytes("VmSize") < before["VmSize"] + count // 2, "it is not mapped any more"


def test_map_that_the_system_refuses_raises_os_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    with path.open("rb") as file, pytest.raises(OSError, check=lambda error: error.errno == errno.EINVAL):
        map_file(file.fileno(), 10, start=1)
