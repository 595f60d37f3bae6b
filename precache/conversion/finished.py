"""A shard that is written, and what the journal says of it: arrays as base64 of their little-endian bytes."""

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from precache.dataset.files import FileEntry
from precache.dataset.index import Checksums, Ints, Sizes
from precache.dataset.left_out import Rejected
from precache.dataset.shard_table import ShardEntry, file_names
from precache.dataset.statistics import PixelSums
from precache.formats import Format
from precache.plan import ShardPlan
from precache.sources.base import Samples

_ARRAYS = {
    "source_sizes": "<i4",
    "checksums": "<u8",
    "source_modified_ns": "<i8",
    "source_checksums": "<u8",
    "mask_checksums": "<u8",
}


@dataclass(frozen=True, slots=True, eq=False)
class FinishedShard:
    """A shard that is written; without files if every picture of it was rejected.

    Attributes:
        entry: its line in the manifest.
        rejected: the pictures that it lacks.
        source_sizes: int32 [n, 2], width and height of the upright source pictures, in stored order.
        checksums: uint64 [n], XXH3-64 of what is stored of each, in stored order.
        source_modified_ns: int64 [m], of all pictures that the plan has in the shard, in its order, rejected
            ones too: when they had last been written.
        source_checksums: uint64 [m], of the same: XXH3-64 of the files.
        mask_checksums: uint64 [n], XXH3-64 of the pixels of the masks, in stored order; or [0].
        sums: of the pixels of its samples; of none where they are not known.
        etags: of its files in an object storage, as it answered when they were uploaded; none on disk.
    """

    entry: ShardEntry
    rejected: tuple[Rejected, ...]
    source_sizes: Sizes
    checksums: Checksums
    source_modified_ns: Ints
    source_checksums: Checksums
    mask_checksums: Checksums
    sums: PixelSums
    etags: tuple[str, ...] = ()


def encode(shard: FinishedShard) -> dict[str, Any]:
    """`shard` as plain JSON values."""
    return {
        "entry": asdict(shard.entry),
        "rejected": [sample.to_json() for sample in shard.rejected],
        **{name: _text(getattr(shard, name), dtype) for name, dtype in _ARRAYS.items()},
        "sums": asdict(shard.sums),
        **({"etags": list(shard.etags)} if shard.etags else {}),
    }


def decode(
    content: dict[str, Any], plans: Mapping[str, ShardPlan], samples: Samples, form: Format
) -> FinishedShard | None:
    """What `encode` was given; None if it is no shard that this plan makes."""
    try:
        fields = dict(content["entry"])
        files = tuple(FileEntry(**file) for file in fields.pop("files"))
        entry = ShardEntry(files=files, **fields)
        rejected = tuple(Rejected.from_json(sample) for sample in content["rejected"])
        arrays = {name: _array(content[name], dtype) for name, dtype in _ARRAYS.items()}
        arrays["source_sizes"] = arrays["source_sizes"].reshape(-1, 2)
        sums, etags = PixelSums.from_json(content["sums"]), tuple(content.get("etags", ()))
        shard = FinishedShard(entry, rejected, **arrays, sums=sums, etags=etags)
        return shard if _fits(shard, plans[entry.name], samples, form) else None
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError):
        return None


def _fits(shard: FinishedShard, plan: ShardPlan, samples: Samples, form: Format) -> bool:
    entry, ids = shard.entry, samples.ids[plan.rows]
    names = tuple(file.name for file in entry.files)
    rejected = [sample.id for sample in shard.rejected]
    return (
        entry.split == plan.split
        and type(entry.samples) is int
        and entry.samples == len(shard.source_sizes) == len(shard.checksums) == len(ids) - len(rejected)
        and len(shard.mask_checksums) in (0, entry.samples)
        and len(shard.source_modified_ns) == len(shard.source_checksums) == len(ids)
        and names == (file_names(plan.name, form) if entry.samples else ())
        and len(shard.etags) in (0, len(names))
        and all(isinstance(etag, str) for etag in shard.etags)
        and len(set(rejected)) == len(rejected) == int(np.isin(ids, rejected).sum())
        and all(
            sample.path == samples[int(plan.rows[ids == sample.id][0])].path
            and isinstance(sample.reason, str)
            for sample in shard.rejected
        )
    )


def _text(array: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode("ascii")


def _array(text: str, dtype: str) -> npt.NDArray[Any]:
    array = np.frombuffer(base64.b64decode(text, validate=True), dtype)
    return array.astype(array.dtype.newbyteorder("="))
