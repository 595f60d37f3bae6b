"""The end of a conversion or an update: index, list of rejects, and the manifest, which makes it count."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from precache.conversion.journal import SOURCE_CHECKSUMS, WrittenShard
from precache.conversion.update import UpdatePlan
from precache.dataset.columns import Column
from precache.dataset.index import (
    REJECTED_NAME,
    VALUE,
    Array,
    Ints,
    Rejected,
    SampleIndex,
    Sizes,
    SourceState,
    left_out_arrays,
    write_index,
    write_rejected,
)
from precache.dataset.manifest import Manifest, Update, write_manifest
from precache.dataset.shard_table import ShardTable
from precache.dataset.statistics import ChannelStatistics, statistics_by_split
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.pictures import images
from precache.pictures.codecs import made_by
from precache.plan import ConvertPlan
from precache.recipe import Recipe
from precache.sources import SourceOptions
from precache.sources.base import Samples, Scan


def commit(
    scan: Scan,
    plan: ConvertPlan,
    options: SourceOptions,
    written: Mapping[str, WrittenShard],
    folder: Path,
    update: UpdatePlan | None = None,
) -> Manifest:
    """Check that the counts add up, then write the index and, last, the manifest; in place of the one before.

    Args:
        written: the shards of `plan` by name.
        update: of the dataset in `folder`; None of a conversion.

    Raises:
        DatasetError: the counts do not add up, or there is no picture.
    """
    samples, shards = scan.samples, [written[shard.name] for shard in plan.shards]
    rows = np.concatenate([np.empty(0, np.int64), *(shard.rows for shard in plan.shards)])
    columns = {
        name: np.concatenate([shard.columns[name] for shard in shards])
        for name in (shards[0].columns if shards else ())
    }
    rejected = list(chain.from_iterable(shard.rejected for shard in shards))
    index = _indexed(samples, rows, columns, rejected, plan.recipe)
    entries = [shard.entry for shard in shards if shard.entry.samples]
    statistics = statistics_by_split(
        ((shard.entry.split, shard.sums) for shard in shards if shard.entry.samples), plan.recipe.dtype
    )
    checksums = np.zeros(len(samples), np.uint64)
    checksums[rows] = columns.get(SOURCE_CHECKSUMS, ())
    before: Manifest | None = None
    updates: tuple[Update, ...] = ()
    next_id = int(samples.ids.max(initial=-1)) + 1
    if update is not None:
        before, difference = update.dataset.manifest, update.difference
        checksums[difference.stays] = difference.state.checksums[difference.stay_as]
        done, index = _after(update, index)
        updates, next_id = (*before.updates, done), difference.next_id
        rejected += update.rejected
        statistics = _statistics_after(before, [shard.split for shard in entries], statistics)
        entries = [*before.shards, *entries]
    _check_counts(scan, int(index.served.sum()), rejected)
    rejected.sort(key=lambda picture: picture.id)
    by_id = np.argsort(samples.ids)
    state = SourceState(samples.file_bytes[by_id], samples.modified_ns[by_id], checksums[by_id])
    ignored = tuple((ignored.path, ignored.reason) for ignored in scan.ignored)
    table = ShardTable.of(entries, FORMATS[plan.recipe.format])
    table = replace(table, largest=_largest(index, table))
    others = {**table.arrays(), **state.arrays(), **left_out_arrays(rejected, ignored)}
    splits_of_gone = np.repeat(table.splits, table.samples)[~index.served]
    gone = np.bincount(splits_of_gone, minlength=len(table.split_names)).tolist()
    manifest = Manifest(
        recipe=plan.recipe,
        made_by=made_by() if before is None else before.made_by,
        source_digest=scan.digest,
        source_bytes=int(samples.file_bytes.clip(0).sum()),
        classes=scan.classes,
        samples_per_class=_count_classes(scan, table, index),
        shards=table,
        index=write_index(folder, index, table.samples, others, len(updates)),
        scanned=scan.scanned,
        rejected=tuple(rejected),
        ignored=ignored,
        source_options=options.given(),
        target=scan.target,
        fields={name: column.kind for name, column in index.fields.items()},
        statistics=statistics,
        # a converted dataset that was updated has ids of its own
        next_id=next_id if updates or next_id > scan.scanned else 0,
        updates=updates,
        removed={split: n for split, n in zip(table.split_names, gone, strict=True) if n},
    )
    if before is not None and before.rejected and not rejected:
        (folder / REJECTED_NAME).unlink(missing_ok=True)
    write_rejected(folder, manifest.rejected)
    write_manifest(folder, manifest)
    return manifest


def _indexed(
    samples: Samples, rows: Ints, columns: Mapping[str, Array], rejected: Sequence[Rejected], recipe: Recipe
) -> SampleIndex:
    """The samples at `rows` as indexed: what the scan knows of them, and the columns of what was written."""
    kept = ~np.isin(samples.ids[rows], [picture.id for picture in rejected])
    scanned = samples.select(rows[kept])
    found = {
        "ids": Column(scanned.ids),
        "labels": Column(scanned.labels),
        "paths": Column(np.frombuffer(scanned.paths, np.uint8), scanned.path_ends),
        **{f"{VALUE}{name}": column for name, column in scanned.fields.items()},
    }
    if scanned.targets is not None:
        found["targets"] = scanned.targets
    if not columns:
        return SampleIndex(found)
    found |= {name: Column(columns[name]) for name in ("source_sizes", "checksums")}
    if recipe.stored_size is None:
        found["shapes"] = Column(_stored_shapes(columns["source_sizes"], recipe))
    if len(columns["mask_checksums"]):
        found["mask_checksums"] = Column(columns["mask_checksums"])
    return SampleIndex(found)


def _after(update: UpdatePlan, added: SampleIndex) -> tuple[Update, SampleIndex]:
    """What an update does that adds these samples, and the index of all samples after it."""
    known = update.difference.known
    gone = known.rows[update.difference.gone]
    removed = ~known.index.served
    removed[gone[gone >= 0]] = True
    index = known.index if not len(added) else known.index.join(added)
    if removed.any():
        flags = np.concatenate((removed, np.zeros(len(added), np.bool_)))
        index = index.with_columns({"removed": Column(flags.astype(np.uint8))})
    return Update(len(added), int((gone >= 0).sum()), update.target.made_by), index


def _statistics_after(
    before: Manifest, added: Sequence[str], statistics: Mapping[str, ChannelStatistics]
) -> dict[str, ChannelStatistics]:
    """Of each split after an update, which `added` shards to some; none of one that has pictures without."""
    known = {**before.statistics}
    for split in dict.fromkeys(added):
        had, got = known.pop(split, None), statistics.get(split)
        if got is not None and had is not None:
            got = had.joined(got)
        elif split in before.samples_per_class:
            got = None
        if got is not None:
            known[split] = got
    return known


def _largest(index: SampleIndex, table: ShardTable) -> Sizes | None:
    """int32 [shards, 2]: the greatest height and width of what each shard stores, where they vary."""
    if index.shapes is None:
        return None
    starts = np.cumsum(table.samples) - table.samples
    return np.maximum.reduceat(index.shapes, starts, axis=0)


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
