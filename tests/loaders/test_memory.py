"""Window mode on data of twice the memory that it may take; Linux control groups hold it to that."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, convert
from tests.command import ROOT

pytestmark = pytest.mark.slow

MIB = 1 << 20
MEMORY_BYTES = 64 * MIB
LIMIT = MEMORY_BYTES + 256 * MIB
SIZE = 512
PICTURES = 2 * LIMIT // (SIZE**2 * 3)
SERVE = """
import os, sys, torch, loaders  # what they take is charged to the group that this process is in now

path, procs, memory_bytes = sys.argv[1:]
open(procs, "w").write(str(os.getpid()))
served = 0
reading = loaders.Reading(memory_bytes=int(memory_bytes), workers=2)
with loaders.build(path, shuffle="window", batch_size=16, reading=reading) as loader:
    for batch in loader:
        served += len(batch.ids)
print(served)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """The process list of a control group that may take `LIMIT` bytes, page cache included."""
    root = Path("/sys/fs/cgroup")
    first = (root / "cgroup.controllers").exists()
    folder = (root if first else root / "memory") / f"precache-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if first else "memory.limit_in_bytes")).write_text(str(LIMIT))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no control group to be had ({error.strerror})")
    yield folder / "cgroup.procs"
    for _ in range(50):  # until the system has seen the last process end
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            break


def test_window_mode_stays_within_memory_bytes_and_256_mib(group: Path, tmp_path: Path) -> None:
    tree = tmp_path / "raw" / "class"
    tree.mkdir(parents=True)
    first = tree / "0.png"
    Image.fromarray(np.zeros((SIZE, SIZE, 3), np.uint8)).save(first)
    for number in range(1, PICTURES):
        os.link(first, tree / f"{number}.png")
    recipe = Recipe(format="shards", size=SIZE, fit="crop", shard_bytes=8 * MIB)
    convert(tree.parent, tmp_path / "shards", recipe, workers=2)
    stored = sum(file.stat().st_size for file in (tmp_path / "shards").iterdir())
    assert stored >= 2 * LIMIT * 0.99
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path / "shards"), str(group), str(MEMORY_BYTES)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result  # -9: it took more, and was killed
    assert result.stdout.split() == [str(PICTURES)]
