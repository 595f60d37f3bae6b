"""Pictures of a mapped shard stay as they are, whatever happens to its file."""

from pathlib import Path

import numpy as np
import pytest

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
    shown, overwritten = shard.picture(0), shard.picture(3)
    shard.will_need(0)
    overwritten[:] = 0
    assert path.read_bytes() == whole, "a write by mistake stays out of the file"
    with atomic_write(path) as another:
        another.write(b"another")
    assert np.array_equal(shown, pictures[0])
    shard.close(drop_cached=True)
    path.unlink()
    assert np.array_equal(shown, pictures[0])
