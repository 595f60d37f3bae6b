"""The end of a conversion: index, list of rejects, and the manifest, which makes it a dataset."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from precache import images
from precache.codecs import made_by
from precache.errors import DatasetError
from precache.finished import FinishedShard
from precache.index import Checksums, SampleIndex, Sizes, SourceState, write_index, write_source_state
from precache.manifest import Manifest, write_manifest, write_rejected
from precache.plan import ConvertPlan
from precache.recipe import Recipe
from precache.sources import SourceOptions
from precache.sources.base import Samples, Scan
from precache.statistics import statistics_by_split


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
    done = [finished[shard.name] for shard in plan.shards]
    rejected = sorted((sample for shard in done for sample in shard.rejected), key=lambda r: r.id)
    rows = np.concatenate([shard.rows for shard in plan.shards])
    kept = rows[~np.isin(scan.samples.ids[rows], [sample.id for sample in rejected])]
    sizes = np.concatenate([shard.source_sizes for shard in done])
    written = sum(shard.entry.samples for shard in done)
    if not (
        written == len(kept) == len(sizes) and scan.scanned == written + len(rejected) + len(scan.ignored)
    ):
        raise DatasetError(
            f"{scan.root}: {scan.scanned:,} files scanned, but {written:,} converted, {len(rejected):,} "
            f"rejected and {len(scan.ignored):,} ignored; this is a bug; please report it"
        )
    if not written:
        raise DatasetError(
            f"{scan.root}: none of its {len(scan.samples):,} pictures can be converted; "
            f"the first one, {rejected[0].path}, {rejected[0].reason}"
        )
    labels = scan.samples.labels[kept]
    source_checksums = np.empty(len(scan.samples), np.uint64)
    source_checksums[rows] = np.concatenate([shard.source_checksums for shard in done])
    named = scan.samples.select(kept)
    index = SampleIndex(
        ids=named.ids,
        labels=labels,
        source_sizes=sizes,
        checksums=np.concatenate([shard.checksums for shard in done]),
        source_checksums=source_checksums[kept],
        paths=named.paths,
        path_ends=named.path_ends,
        targets=named.targets,
        fields=named.fields,
        shapes=_stored_shapes(sizes, plan.recipe),
        mask_checksums=_joined([shard.mask_checksums for shard in done]),
    )
    state = SourceState(scan.samples.file_bytes, scan.samples.modified_ns, source_checksums)
    manifest = Manifest(
        recipe=plan.recipe,
        made_by=made_by(),
        source_digest=scan.digest,
        source_bytes=int(scan.samples.file_bytes.clip(0).sum()),
        classes=scan.classes,
        samples_per_class=_count_classes(scan, done, named),
        shards=tuple(shard.entry for shard in done if shard.entry.samples),
        index=write_index(destination, index),
        scanned=scan.scanned,
        rejected=tuple(rejected),
        ignored=tuple((ignored.path, ignored.reason) for ignored in scan.ignored),
        source_state=write_source_state(destination, state),
        source_options=options.given(),
        target=scan.target,
        fields={name: column.kind for name, column in named.fields.items()},
        statistics=statistics_by_split(
            ((s.entry.split, s.sums) for s in done if s.entry.samples), plan.recipe.dtype
        ),
    )
    write_rejected(destination, rejected)
    write_manifest(destination, manifest)
    return manifest


def _joined(checksums: Sequence[Checksums]) -> Checksums | None:
    """All of them; None where there are none."""
    joined = np.concatenate(checksums)
    return joined if len(joined) else None


def _stored_shapes(source_sizes: Sizes, recipe: Recipe) -> Sizes | None:
    """int32 [n, 2]: height and width of what is stored of pictures of these sizes; None: all are as large."""
    if recipe.stored_size is not None:
        return None
    how = recipe.rendering
    fitted = [images.fitted_size(width, height, how) for width, height in source_sizes.tolist()]
    return np.array(fitted, np.int32)[:, ::-1]


def _count_classes(scan: Scan, done: Sequence[FinishedShard], written: Samples) -> dict[str, tuple[int, ...]]:
    """Split -> number of samples of each class; `written` in written order."""
    split_of = np.repeat([shard.entry.split for shard in done], [shard.entry.samples for shard in done])
    counts = {}
    for split in dict.fromkeys(shard.entry.split for shard in done if shard.entry.samples):
        rows = split_of == split
        labels = written.labels[rows]
        if scan.target == "classes" and written.targets is not None:
            labels = written.targets.select(rows).values
        elif scan.target != "class":
            labels = labels[:0]
        counts[split] = tuple(np.bincount(labels, minlength=len(scan.classes)).tolist())
    return counts
