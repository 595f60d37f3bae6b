"""Updates of small datasets, and where their samples lie."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from precache import convert, open_dataset
from precache.conversion.convert import Conversion
from precache.formats import FORMATS
from tests.conftest import small_recipe

BROKEN = b"\xff\xd8\xff no JPEG"


def update(tree: Path, out: Path, name: str = "shards", workers: int = 0, **settings: object) -> Conversion:
    splits = settings.pop("splits", "train=0.8,val=0.2")
    recipe = small_recipe(name, splits=splits, **settings)
    return convert(tree, out, recipe, workers=workers, update=True, max_rejects=0.5)


def grow(tree: Path, times: int) -> None:
    """Change the tree, another way each time: a picture gone, one changed, one broken, a new class."""
    classes = sorted(path for path in tree.iterdir() if path.is_dir())
    pictures = sorted(path for path in classes[0].iterdir() if path.suffix == ".jpg")
    pictures[0].unlink()
    shutil.copy(sorted(classes[1].iterdir())[0], pictures[1])
    (classes[0] / f"broken-{times}.jpg").write_bytes(b"\xff\xd8\xff" + bytes(times))
    shutil.copytree(classes[1], tree / f"00{times}.new")


def places(out: Path) -> dict[tuple[str, int], tuple[str, int, int, str]]:
    """(path, checksum) of each sample served -> its shard, row, id and class."""
    dataset = open_dataset(out)
    index = dataset.read_index(removed=True)
    rows = [(shard.name, row) for shard in dataset.manifest.shards for row in range(shard.samples)]
    return {
        (str(index.path(at)), int(index.checksums[at])): (
            *rows[at],
            int(index.ids[at]),
            dataset.manifest.classes[index.labels[at]],
        )
        for at in np.flatnonzero(index.served).tolist()
    }


def stored(out: Path) -> dict[int, bytes]:
    """Id -> what the shards hold of each sample that is served."""
    dataset = open_dataset(out)
    served = set(dataset.read_index().ids.tolist())
    read = FORMATS[dataset.manifest.recipe.format].read_shard
    samples = (sample for shard in dataset.manifest.shards for sample in read(dataset.shard_path(shard)))
    return {sample.id: bytes(sample.data) for sample in samples if sample.id in served}


def interrupt(tree: Path, out: Path) -> None:
    """Begin an update, and leave it with a finished shard."""
    recipe = small_recipe("shards", splits="train=0.8,val=0.2")
    with pytest.raises(KeyboardInterrupt):
        convert(tree, out, recipe, workers=0, update=True, max_rejects=0.5, on_progress=after_a_shard(out))


def after_a_shard(out: Path) -> Callable[[int, int], None]:
    shards = len(list(out.glob("*.safetensors")))

    def stop(done: int, total: int) -> None:
        if len(list(out.glob("*.safetensors"))) > shards:
            raise KeyboardInterrupt

    return stop
