"""The end of a conversion or an update: index, list of rejects, and the manifest, which makes it count."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from precache.conversion.finished import FinishedShard
from precache.conversion.update import UpdatePlan
from precache.dataset.columns import Column
from precache.dataset.index import VALUE, Checksums, Ints, SampleIndex, Sizes, SourceState, write_index
from precache.dataset.left_out import REJECTED_NAME, Rejected, left_out_arrays, write_rejected
from precache.dataset.manifest import Manifest, Update, write_manifest
from precache.dataset.shard_table import ShardEntry, ShardTable
from precache.dataset.statistics import ChannelStatistics, statistics_by_split
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.pictures import images
from precache.pictures.kinds import made_by
from precache.plan import ConvertPlan
from precache.recipe import Recipe
from precache.sources import SourceOptions
from precache.sources.base import Scan


def commit(
    scan: Scan,
    plan: ConvertPlan,
    options: SourceOptions,
    finished: Mapping[str, FinishedShard],
    destination: Path,
) -> Manifest:
    """Check that the counts add up, then write the index and, last, the manifest.

    Raises:
        DatasetError: they do not, or no picture could be converted.
    """
    written = _Written.of(scan, plan, finished)
    _check_counts(scan, len(written.index), written.rejected)
    source_checksums = np.empty(len(scan.samples), np.uint64)
    source_checksums[written.rows] = written.source_checksums
    state = SourceState(scan.samples.file_bytes, scan.samples.modified_ns, source_checksums)
    next_id = int(scan.samples.ids.max()) + 1  # a converted dataset that was updated has ids of its own
    ignored = tuple((ignored.path, ignored.reason) for ignored in scan.ignored)
    described = _write_index(
        destination, written.shards, written.index, state, (written.rejected, ignored), plan.recipe
    )
    manifest = Manifest(
        recipe=plan.recipe,
        made_by=made_by(),
        source_digest=scan.digest,
        source_bytes=int(scan.samples.file_bytes.clip(0).sum()),
        classes=scan.classes,
        samples_per_class=_count_classes(scan, described["shards"], written.index),
        **described,
        scanned=scan.scanned,
        rejected=written.rejected,
        ignored=ignored,
        source_options=options.given(),
        target=scan.target,
        fields={name: column.kind for name, column in written.index.fields.items()},
        statistics=written.statistics,
        next_id=next_id if next_id > scan.scanned else 0,
    )
    write_rejected(destination, manifest.rejected)
    write_manifest(destination, manifest)
    return manifest


def commit_update(update: UpdatePlan, finished: Mapping[str, FinishedShard]) -> Manifest:
    """Check that the counts add up, then write the new index and, last, the manifest in place of the old one.

    Raises:
        DatasetError: they do not, or no picture is left.
    """
    before, difference = update.dataset.manifest, update.difference
    folder, scan, known = update.dataset.path, difference.scan, difference.known
    written = _Written.of(scan, update.plan, finished)
    rejected = tuple(sorted((*update.rejected, *written.rejected), key=lambda picture: picture.id))
    gone = known.rows[difference.gone]
    removed = ~known.index.served
    removed[gone[gone >= 0]] = True
    index = known.index if not len(written.index) else known.index.join(written.index)
    if removed.any():
        flags = np.concatenate((removed, np.zeros(len(written.index), np.bool_)))
        index = index.with_columns({"removed": Column(flags.astype(np.uint8))})
    _check_counts(scan, int(index.served.sum()), rejected)
    ignored = tuple((ignored.path, ignored.reason) for ignored in scan.ignored)
    shards = (*before.shards, *written.shards)
    state, left_out = _state_after(update, written), (rejected, ignored)
    described = _write_index(folder, shards, index, state, left_out, update.plan.recipe, update.number)
    table = described["shards"]
    stored = np.repeat(table.splits, table.samples)
    counts = np.bincount(stored[~index.served], minlength=len(table.split_names)).tolist()
    done = Update(
        added=len(written.index),
        removed=int((gone >= 0).sum()),
        made_by=update.target.made_by,
    )
    manifest = replace(
        before,
        recipe=update.plan.recipe,
        source_digest=scan.digest,
        source_bytes=int(scan.samples.file_bytes.clip(0).sum()),
        classes=scan.classes,
        samples_per_class=_count_classes(scan, table, index),
        **described,
        scanned=scan.scanned,
        rejected=rejected,
        ignored=ignored,
        source_options=update.options.given(),
        fields={name: column.kind for name, column in index.fields.items()},
        statistics=_statistics_after(before, written),
        next_id=difference.next_id,
        updates=(*before.updates, done),
        removed={split: count for split, count in zip(table.split_names, counts, strict=True) if count},
    )
    if before.rejected and not rejected:
        (folder / REJECTED_NAME).unlink(missing_ok=True)
    write_rejected(folder, rejected)
    write_manifest(folder, manifest)
    return manifest


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """The shards of a plan, put together.

    Attributes:
        shards: those with samples, in their order.
        rows: int64 [m], of the scan's samples, rejected ones too.
        source_checksums: uint64 [m], of these.
        rejected: by their ids.
        index: of the samples.
        statistics: of each split, see the manifest.
    """

    shards: tuple[ShardEntry, ...]
    rows: Ints
    source_checksums: Checksums
    rejected: tuple[Rejected, ...]
    index: SampleIndex
    statistics: dict[str, ChannelStatistics]

    @classmethod
    def of(cls, scan: Scan, plan: ConvertPlan, finished: Mapping[str, FinishedShard]) -> "_Written":
        done = [finished[shard.name] for shard in plan.shards]
        rejected = sorted((sample for shard in done for sample in shard.rejected), key=lambda r: r.id)
        rows = np.concatenate([np.empty(0, np.int64), *(shard.rows for shard in plan.shards)])
        kept = ~np.isin(scan.samples.ids[rows], [sample.id for sample in rejected])
        checksums = _joined([shard.source_checksums for shard in done], np.uint64)
        named = scan.samples.select(rows[kept])
        sizes = _joined([shard.source_sizes for shard in done], np.int32).reshape(-1, 2)
        columns = {
            "ids": Column(named.ids),
            "labels": Column(named.labels),
            "source_sizes": Column(sizes),
            "checksums": Column(_joined([shard.checksums for shard in done], np.uint64)),
            "source_checksums": Column(checksums[kept]),
            "paths": Column(np.frombuffer(named.paths, np.uint8), named.path_ends),
            **{f"{VALUE}{name}": column for name, column in named.fields.items()},
        }
        if named.targets is not None:
            columns["targets"] = named.targets
        if plan.recipe.stored_size is None:
            columns["shapes"] = Column(_stored_shapes(sizes, plan.recipe))
        if any(len(shard.mask_checksums) for shard in done):
            columns["mask_checksums"] = Column(_joined([shard.mask_checksums for shard in done], np.uint64))
        index = SampleIndex(columns)
        shards = tuple(shard.entry for shard in done if shard.entry.samples)
        sums = ((shard.entry.split, shard.sums) for shard in done if shard.entry.samples)
        statistics = statistics_by_split(sums, plan.recipe.dtype)
        return cls(shards, rows, checksums, tuple(rejected), index, statistics)


def _write_index(
    folder: Path,
    shards: Sequence[ShardEntry],
    index: SampleIndex,
    state: SourceState,
    left_out: tuple[tuple[Rejected, ...], tuple[tuple[str, str], ...]],
    recipe: Recipe,
    updates: int = 0,
) -> dict[str, Any]:
    """Write the index; what the manifest says of it, and the shards."""
    table = ShardTable.of(shards, FORMATS[recipe.format])
    table = replace(table, largest=_largest(index, table))
    others = {**table.arrays(), **state.arrays(), **left_out_arrays(*left_out)}
    return {"index": write_index(folder, index, table.samples, others, updates), "shards": table}


def _largest(index: SampleIndex, table: ShardTable) -> Sizes | None:
    """int32 [shards, 2]: the greatest height and width of what each shard stores, where they vary."""
    if index.shapes is None:
        return None
    starts = np.cumsum(table.samples) - table.samples
    return np.maximum.reduceat(index.shapes, starts, axis=0)


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _check_counts(scan: Scan, written: int, rejected: Sequence[Rejected]) -> None:
    if scan.scanned != written + len(rejected) + len(scan.ignored):
        raise DatasetError(
            f"{scan.root}: {scan.scanned:,} files scanned, but {written:,} converted, {len(rejected):,} "
            f"rejected and {len(scan.ignored):,} ignored; this is a bug; please report it"
        )
    if not written:
        raise DatasetError(
            f"{scan.root}: none of its {len(scan.samples):,} pictures can be converted; "
            f"the first one, {rejected[0].path}, {rejected[0].reason}"
        )


def _stored_shapes(source_sizes: Sizes, recipe: Recipe) -> Sizes:
    """int32 [n, 2]: height and width of what is stored of pictures of these sizes."""
    how = recipe.rendering
    fitted = [images.fitted_size(width, height, how) for width, height in source_sizes.tolist()]
    return np.array(fitted, np.int32).reshape(-1, 2)[:, ::-1]


def _state_after(update: UpdatePlan, written: _Written) -> SourceState:
    """Of the source after an update."""
    difference = update.difference
    samples = difference.scan.samples
    checksums = np.empty(len(samples), np.uint64)
    checksums[difference.stays] = difference.state.checksums[difference.stay_as]
    checksums[written.rows] = written.source_checksums
    by_id = np.argsort(samples.ids)
    return SourceState(samples.file_bytes[by_id], samples.modified_ns[by_id], checksums[by_id])


def _statistics_after(before: Manifest, written: _Written) -> dict[str, ChannelStatistics]:
    """Of each split after an update; none of one that got or has pictures without them."""
    known = {**before.statistics}
    for split in dict.fromkeys(shard.split for shard in written.shards):
        had, got = known.pop(split, None), written.statistics.get(split)
        if got is not None and had is not None:
            got = had.joined(got)
        elif split in before.samples_per_class:
            got = None
        if got is not None:
            known[split] = got
    return known


def _count_classes(scan: Scan, shards: ShardTable, index: SampleIndex) -> dict[str, tuple[int, ...]]:
    """Split -> number of samples of each class; `index` is of all samples of `shards`."""
    counts = {}
    for split in shards.split_names:
        rows = np.repeat(shards.of_split(split), shards.samples) & index.served
        labels = index.labels[rows]
        if scan.target == "classes" and index.targets is not None:
            labels = index.targets.select(rows).values
        elif scan.target != "class":
            labels = labels[:0]
        counts[split] = tuple(np.bincount(labels, minlength=len(scan.classes)).tolist())
    return counts
