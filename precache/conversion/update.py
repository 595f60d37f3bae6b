"""A dataset whose source grew, or lost pictures: what is added, and what is served no more (`--update`).

A picture stays what it is, shard, row, id and label, as long as its path, its content and what it is labelled
with stay. One that is gone is marked as removed in the index; one that changed is removed and added. What is
added gets ids from the highest one ever used on, in the order of the paths, and shards of its own. Labels
stay: the names of new classes come behind those there are.

No file that the manifest names is written to: an update makes new shards, a new index and a new state of the
source, and ends, as a conversion does, with one rename that replaces the manifest.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from precache.conversion.difference import AGAIN, Difference, compare
from precache.conversion.journal import Target, recipe_differences
from precache.dataset.converted import ConvertedDataset
from precache.dataset.index import Rejected
from precache.dataset.manifest import Manifest
from precache.errors import DatasetError
from precache.pictures.codecs import made_by
from precache.plan import ConvertPlan, Grown, plan_update
from precache.recipe import Recipe
from precache.reporting import warn
from precache.sources import SourceOptions
from precache.sources.base import Scan

_PLACES = ("root", "mask")  # folders: what is in them counts, not where they are


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePlan:
    """An update to be carried out: all that is written depends on it.

    Attributes:
        dataset: as it is.
        difference: of the source.
        plan: the shards of what is new.
        target: for the journal.
        options: of the source, as asked for now.
        rejected: pictures that were rejected before, and are as they were.
    """

    dataset: ConvertedDataset
    difference: Difference
    plan: ConvertPlan
    target: Target
    options: SourceOptions
    rejected: tuple[Rejected, ...]


def plan(dataset: ConvertedDataset, scan: Scan, recipe: Recipe, options: SourceOptions) -> UpdatePlan | None:
    """What is to be done so that `dataset` holds what `scan` found; None if it does.

    Raises:
        DatasetError: the dataset was made by another recipe or with other options; or as `compare`.
        SettingError: as `plan_conversion`.
    """
    _check_asked(dataset, recipe, options)
    difference = compare(dataset, scan)
    if not difference:
        return None
    manifest, known, scan = dataset.manifest, difference.known, difference.scan
    software = made_by()
    if software != manifest.made_by:
        changed = [name for name in software if software[name] != manifest.made_by.get(name)]
        warn(
            f"{dataset.path}: was made with other versions of {', '.join(changed)}; what is added may be "
            f"decoded a little differently"
        )
    stay = np.zeros(len(known.index), np.bool_)
    rows = known.rows[difference.stay_as]
    stay[rows[rows >= 0]] = True
    grown = Grown(
        update=len(manifest.updates) + 1,
        shards=_next_shards(manifest),
        kept={
            split: known.index.labels[stay & (known.split_of == number)]
            for number, split in enumerate(known.splits)
        },
    )
    added = plan_update(scan.samples, difference.new, recipe, grown)
    target = Target(recipe, _digest(dataset, difference), software, grown.update)
    stay_ids = set(known.ids[difference.stay_as].tolist())
    rejected = tuple(picture for picture in manifest.rejected if picture.id in stay_ids)
    return UpdatePlan(dataset, difference, added, target, options, rejected)


def _digest(dataset: ConvertedDataset, difference: Difference) -> str:
    """SHA-256 (hex) over what an update is made of: the dataset, the source, and which pictures changed."""
    digest = hashlib.sha256(f"{dataset.digest} {difference.scan.digest}".encode())
    for numbers in (difference.new, difference.gone):
        digest.update(repr(numbers.tolist()).encode())
    return digest.hexdigest()


def _check_asked(dataset: ConvertedDataset, recipe: Recipe, options: SourceOptions) -> None:
    manifest = dataset.manifest
    was, asked = manifest.recipe, recipe
    if was.listed and asked.listed:  # a list names the pictures that there are: it grows with them
        asked = replace(asked, splits=was.splits)
    phrases = recipe_differences(was.to_json(), asked)
    made_with, given = manifest.source_options, options.given()
    for name in sorted({*made_with, *given}):
        before, now = made_with.get(name), given.get(name)
        if before != now and (name not in _PLACES or before is None or now is None):
            phrases.append(f"{name} {before}, asked for {now}")
    if phrases:
        raise DatasetError(
            f"{dataset.path}: was converted with other settings ({'; '.join(phrases)}), and an update must "
            f"use the same; leave these options as they were, or {AGAIN}"
        )


def _next_shards(manifest: Manifest) -> dict[str, int]:
    """Split -> number of its next shard."""
    last: dict[str, int] = {}
    for shard in manifest.shards:
        number = int(shard.name.removeprefix(f"{shard.split}-"))
        last[shard.split] = max(number, last.get(shard.split, 0))
    return {split: number + 1 for split, number in last.items()}
