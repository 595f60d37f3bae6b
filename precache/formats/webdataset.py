"""Format `webdataset`: JPEGs in tar files, with DALI's index beside each.

    00000042.jpg    the picture, a baseline JPEG of the recipe's size and quality
    00000042.cls    the label, an ASCII integer
    00000042.json   {"height": ..., "path": ..., "width": ...}: the source picture

The key is the sample's id in 8 digits. The tar is POSIX ustar with fixed owner, mode and time, so
that its bytes depend on its content alone. The index `.idx` has one line `v1.2 <samples>`, then one
line per sample with `<extension> <data offset> <bytes> <name>` for each of its three files; it is
the format of DALI's own tool: https://github.com/NVIDIA/DALI/blob/main/tools/wds2idx.py
"""

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from precache.errors import DatasetError
from precache.formats.sample import Format, Sample, StoredSample
from precache.images import encode_jpeg
from precache.recipe import Recipe
from precache.storage import atomic_write

SUFFIX = ".tar"
INDEX_SUFFIX = ".idx"


def write_shard(base: Path, samples: Iterable[Sample], recipe: Recipe) -> list[Path]:
    """Write `base` + '.tar' and, after it, `base` + '.idx'."""
    path, index_path = base.with_name(base.name + SUFFIX), base.with_name(base.name + INDEX_SUFFIX)
    index: list[str] = []
    with (
        atomic_write(path) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for sample in samples:
            index.append(" ".join(_add_sample(tar, sample, recipe.quality)))
    with atomic_write(index_path) as file:
        file.write("\n".join([f"v1.2 {len(index)}", *index, ""]).encode())
    return [path, index_path]


def read_shard(path: Path) -> Iterator[StoredSample]:
    """The samples of a tar in stored order, read sequentially."""
    try:
        with tarfile.open(path, "r|") as tar:
            jpeg = b""
            for member in tar:
                file = tar.extractfile(member)
                if file is not None and member.name.endswith(".jpg"):
                    jpeg = file.read()
                elif file is not None and member.name.endswith(".cls"):
                    yield StoredSample(int(member.name[:-4]), int(file.read()), jpeg)
    except (OSError, tarfile.TarError, ValueError) as error:
        raise DatasetError(
            f"{path}: cannot be read as a tar of samples ({error}); run 'precache verify' on its "
            f"folder, then 'precache convert --overwrite' to rewrite it"
        ) from error


def _add_sample(tar: tarfile.TarFile, sample: Sample, quality: int) -> Iterator[str]:
    width, height = sample.original_size
    origin = {"height": height, "path": sample.path, "width": width}
    contents = {
        "jpg": encode_jpeg(sample.pixels, quality),
        "cls": str(sample.label).encode(),
        "json": json.dumps(origin).encode(),
    }
    for extension, content in contents.items():
        member = tarfile.TarInfo(f"{sample.id:08d}.{extension}")
        member.size = len(content)
        member.mode = 0o644
        # ustar with a short name: the header is one block of 512 bytes, then the data
        yield f"{extension} {tar.offset + 512} {len(content)} {member.name}"
        tar.addfile(member, io.BytesIO(content))


FORMAT = Format(SUFFIX, INDEX_SUFFIX, write_shard, read_shard)
