"""What a conversion asks of its destination: room, few rejects, and nothing else where it is finished."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from precache.checks.difference import compare
from precache.console.notices import counted
from precache.conversion.estimate import predict_bytes
from precache.conversion.journal_header import Target
from precache.dataset.converted import ConvertedDataset, open_dataset
from precache.dataset.files import first_problem
from precache.dataset.left_out import Rejected
from precache.errors import DatasetError
from precache.manifest import Manifest
from precache.plan import ShardPlan
from precache.recipe import Recipe
from precache.sources import SourceOptions
from precache.sources.base import Scan
from precache.sources.source_state import changed_pictures
from precache.storage.objects import ObjectStore
from precache.storage.urls import Location, Url


def check_finished(
    destination: Location, scan: Scan, target: Target, options: SourceOptions, limit: int
) -> Manifest:
    """The manifest of the finished dataset; DatasetError if it is not what is asked for."""
    again = "choose another DST" if isinstance(destination, Url) else "pass --overwrite to convert again"
    dataset = open_dataset(destination)
    manifest = dataset.manifest
    check_there(dataset)
    found = {"recipe": manifest.recipe.to_json(), "source_digest": manifest.source_digest}
    target.check_same(destination, found, finished=True)
    if manifest.source_options.get("boxes") != options.boxes:
        raise DatasetError(
            f"{destination}: is finished, with boxes {manifest.source_options.get('boxes')!r}, and "
            f"{options.boxes!r} are asked for; {again}"
        )
    if len(manifest.rejected) > limit:
        raise DatasetError(
            f"{destination}: is finished, but {_are_rejected(len(manifest.rejected), limit)}; "
            f"repair or remove them, and {again}"
        )
    changed = _changed(scan, dataset)
    if changed:
        follow = "" if isinstance(destination, Url) else "pass --update to follow the source, or "
        raise DatasetError(
            f"{destination}: {counted(len(changed), 'source picture')} changed since the conversion, "
            f"at the same size (first: {changed[0]}); {follow}{again}"
        )
    return manifest


def check_there(dataset: ConvertedDataset) -> None:
    """Raise DatasetError unless all files of the dataset are there, with their sizes."""
    place, files = dataset.place, dataset.manifest.files
    if isinstance(place, Path):
        if problem := first_problem(place, files):
            raise DatasetError(f"{problem}; the dataset is damaged: pass --overwrite to convert again")
        return
    sizes = {found.name: found.bytes for found in ObjectStore(place).list()}
    if lost := [file.name for file in files if sizes.get(file.name) != file.bytes]:
        raise DatasetError(f"{place / lost[0]}: missing or cut; the dataset is damaged: choose another DST")


def _changed(scan: Scan, dataset: ConvertedDataset) -> list[str]:
    """The pictures of `scan`, where paths and sizes are those of `dataset`, that hold something else."""
    if dataset.manifest.updates:
        difference = compare(dataset, scan)
        return [scan.source.where(difference.scan.samples[row]) for row in difference.new.tolist()]
    state = dataset.read_source_state()
    rows = np.arange(len(scan.samples))
    if len(state) != len(rows):
        return []
    return list(changed_pictures(scan, rows, state.modified_ns, state.checksums))


def check_room(
    scan: Scan,
    recipe: Recipe,
    waiting: Sequence[ShardPlan],
    folder: Path,
    on_start: Callable[[int, int], None],
    *,
    staged: int | None = None,
) -> None:
    """Raise DatasetError if the disk of `folder` cannot take what is still to be written.

    Args:
        on_start: called with what the dataset will take, and what is free, in bytes.
        staged: of shards that only pass by, so many lie there at a time.
    """
    predicted, pictures = predict_bytes(scan, recipe), len(scan.samples)
    share = sum(len(shard.rows) for shard in waiting) / pictures
    what, remedy = "the dataset needs", "make room, or choose a DST on another disk or a smaller --size"
    if staged is not None:
        largest = max((len(shard.rows) for shard in waiting), default=0)
        share = min(share, max(staged, 1) * largest / pictures)
        what, remedy = "shards on their way need", "make room, or set TMPDIR to a folder on a larger disk"
    free = shutil.disk_usage(folder).free
    on_start(predicted, free)
    if predicted * share > free:
        raise DatasetError(
            f"{folder}: {what} about {predicted * share:,.0f} bytes, and {free:,} are free; {remedy}"
        )


def check_rejects(folder: Location, rejected: Sequence[Rejected], limit: int) -> None:
    """Raise DatasetError if more than `limit` pictures are rejected."""
    if len(rejected) > limit:
        raise DatasetError(
            f"{folder}: stopped, {_are_rejected(len(rejected), limit)}; first: {rejected[0].path}, "
            f"{rejected[0].reason}; repair or remove them and pass --overwrite, or leave them "
            f"out with a higher --max-rejects"
        )


def _are_rejected(number: int, limit: int) -> str:
    are = "picture is" if number == 1 else "pictures are"
    return f"{number:,} {are} rejected and at most {limit:,} may be"
