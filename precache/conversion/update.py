"""A dataset whose source grew, or lost pictures: what is added, and what is served no more (`--update`).

A picture stays what it is, shard, row, id and label, as long as its path, its content and what it is labelled
with stay. One that is gone is marked as removed in the index; one that changed is removed and added. What is
added gets ids from the highest one ever used on, in the order of the paths, and shards of its own. Labels
stay: the names of new classes come behind those there are.

No file that the manifest names is written to: an update makes new shards, a new index and a new state of the
source, and ends, as a conversion does, with one rename that replaces the manifest.
"""

import copy
import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from precache.conversion.journal import Target, recipe_differences
from precache.dataset.columns import Column
from precache.dataset.converted import ConvertedDataset
from precache.dataset.index import Ints, Rejected, SampleIndex, Sizes, SourceState, checksum_of, damaged
from precache.engines import KILLED
from precache.errors import DatasetError, ImageError
from precache.pictures import images
from precache.pictures.kinds import made_by
from precache.plan import ConvertPlan, Grown, keeps_splits, plan_update
from precache.recipe import Recipe
from precache.reporting import warn
from precache.sources import SourceOptions
from precache.sources.base import Samples, Scan, changed_rows
from precache.sources.masks import reader_of, render_mask

_AGAIN = "convert it again with --overwrite"
_PLACES = ("root", "mask")  # folders: what is in them counts, not where they are


@dataclass(frozen=True, slots=True, eq=False)
class KnownPictures:
    """The pictures that a dataset knows of its source, rejected ones too, by id.

    Attributes:
        ids: int64 [k], ascending.
        rows: int64 [k], of the index; -1 for rejected pictures.
        number_of: path, as `_keys` has it -> number here.
        index: of all samples, removed ones too.
        split_of: int32 [n] for each sample of the index, index of `splits`.
    """

    ids: Ints
    rows: Ints
    number_of: dict[bytes, int]
    index: SampleIndex
    splits: tuple[str, ...]
    split_of: Sizes

    @classmethod
    def of(cls, dataset: ConvertedDataset) -> "KnownPictures":
        """The pictures of `dataset`.

        Raises:
            DatasetError: its index is damaged.
        """
        manifest = dataset.manifest
        index = dataset.read_index(removed=True)
        served = np.flatnonzero(index.served)
        rejected = [picture.id for picture in manifest.rejected]
        ids = np.concatenate((index.ids[served], np.array(rejected, np.int64)))
        order = np.argsort(ids, kind="stable")
        if (np.diff(ids[order]) == 0).any():
            raise damaged(
                dataset.path / manifest.index.name, "a picture is both rejected and served, or twice"
            )
        rows = np.concatenate((served, np.full(len(rejected), -1)))[order]
        path_of = {picture.id: os.fsencode(picture.path) for picture in manifest.rejected}
        bounds = zip(rows.tolist(), ids[order].tolist(), strict=True)
        paths = (
            path_of[number] if row < 0 else index["paths"].array(row).tobytes() for row, number in bounds
        )
        number_of = {key: number for number, key in enumerate(_keys(paths))}
        table = manifest.shards
        split_of = np.repeat(table.splits, table.samples)
        return cls(ids[order], rows, number_of, index, table.split_names, split_of)


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """The difference between a source and a dataset made from it.

    Attributes:
        scan: with the labels of the dataset, and its ids: what is new has those that it will get.
        known: of the dataset.
        stays: int64 [m], rows of the scan's samples that are as they were.
        stay_as: int64 [m], their numbers in `known`.
        new: int64 [a], rows of the scan's samples that are new or changed; by their paths.
        gone: int64 [g], numbers in `known` of pictures that are gone or changed.
        state: of the source, as the dataset has it, of the pictures in `known`.
        next_id: behind the ids of what is new.
    """

    scan: Scan
    known: KnownPictures
    stays: Ints
    stay_as: Ints
    new: Ints
    gone: Ints
    state: SourceState
    next_id: int

    def __bool__(self) -> bool:
        return bool(len(self.new) or len(self.gone))


def compare(dataset: ConvertedDataset, scan: Scan, *, contents: bool = True) -> Difference:
    """What `scan`, of the source of `dataset`, differs in; `contents`: of pictures that were written to, too.

    Raises:
        DatasetError: what the samples are labelled with, or their fields, are of another kind.
        SourceError: a picture cannot be read.
    """
    manifest = dataset.manifest
    known = KnownPictures.of(dataset)
    scan = _relabelled(scan, manifest.classes)
    _check_kinds(dataset, known.index, scan)
    samples = scan.samples
    found = (known.number_of.get(key, -1) for key in _keys(_paths(samples)))
    numbers = np.fromiter(found, np.int64, len(samples))
    ids, stored = samples.ids.copy(), known.index.ids
    alike = (numbers >= 0) & (known.ids[numbers] == ids)
    # whether a sample may keep an id of its own: in a dataset that was made again it may be another's
    free = scan.own_ids & ~np.isin(ids, stored) & (alike | ~np.isin(ids, known.ids))
    state = dataset.read_source_state()
    if len(state) != len(known.ids):
        raise DatasetError(f"{dataset.path}: its record of the source does not match its index; {_AGAIN}")
    stays = np.flatnonzero(numbers >= 0)
    stays = stays[samples.file_bytes[stays] == state.bytes[numbers[stays]]]
    has_splits = keeps_splits(samples, dataset.manifest.recipe)
    stays = stays[_labelled_alike(known, numbers[stays], samples, stays, has_splits)]
    stays = stays[alike[stays] | ~free[stays]]
    if contents:
        stays = np.setdiff1d(stays, list(_written_to(dataset, known, scan, stays, state, numbers[stays])))
        stays = stays[_masked_alike(dataset, known, numbers[stays], scan, stays)]
    gone = np.setdiff1d(np.arange(len(known.ids)), numbers[stays])
    new = _by_path(samples, np.setdiff1d(np.arange(len(samples)), stays))
    next_id = max(manifest.next_id or 1 + int(known.ids[-1]), 1 + int(ids[free].max(initial=-1)))
    ids[stays] = known.ids[numbers[stays]]
    renumbered = new[~free[new]]
    ids[renumbered] = next_id + np.arange(len(renumbered))
    samples.ids = ids
    return Difference(scan, known, stays, numbers[stays], new, gone, state, next_id + len(renumbered))


def _check_kinds(dataset: ConvertedDataset, index: SampleIndex, scan: Scan) -> None:
    manifest, samples = dataset.manifest, scan.samples
    if scan.target != manifest.target:
        raise DatasetError(
            f"{dataset.path}: has target {manifest.target}, but {scan.root} now has target {scan.target}; "
            f"correct its labels, or {_AGAIN}"
        )
    if set(index.fields) != set(samples.fields):
        differing = ", ".join(sorted(set(index.fields) ^ set(samples.fields)))
        raise DatasetError(
            f"{dataset.path}: {scan.root} now has other fields ({differing}); leave them as they were, "
            f"or {_AGAIN}"
        )
    if (index.mask_checksums is None) != (reader_of(scan.source) is None):
        ours, theirs = ("no masks", "some") if index.mask_checksums is None else ("masks", "none")
        raise DatasetError(f"{dataset.path}: has {ours}, but {scan.root} now has {theirs}; {_AGAIN}")
    pairs = {name: (column, samples.fields[name]) for name, column in index.fields.items()}
    if index.targets is not None and samples.targets is not None:
        pairs["target"] = (index.targets, samples.targets)
    for name, (before, now) in pairs.items():
        if before.differs_in_kind(now):
            shapes = f"its {name!r} is {_shape(before)}, but in {scan.root} it is now {_shape(now)}"
            raise DatasetError(f"{dataset.path}: {shapes}; correct it, or {_AGAIN}")


def _shape(column: Column) -> str:
    return f"{column.kind} {[*column.values.shape[1:]]}" if column.values.ndim > 1 else column.kind


def _relabelled(scan: Scan, classes: tuple[str, ...]) -> Scan:
    """A copy of `scan` whose labels are indices of `classes`, followed by its further classes."""
    known = set(classes)
    every = (*classes, *(name for name in scan.classes if name not in known))
    label_of = {name: label for label, name in enumerate(every)}
    mapped = np.array([*(label_of[name] for name in scan.classes), -1], np.int64)  # the last one is label -1
    samples = copy.copy(scan.samples)
    samples.labels = mapped[samples.labels]
    if scan.target == "classes" and samples.targets is not None:
        samples.targets = Column(mapped[samples.targets.values], samples.targets.ends)
    return replace(scan, classes=every, samples=samples)


def _paths(samples: Samples) -> Iterator[bytes]:
    start = 0
    for end in samples.path_ends.tolist():
        yield samples.paths[start:end]
        start = end


def _keys(paths: Iterable[bytes]) -> Iterator[bytes]:
    """Each of `paths` where it comes first, and something else where it comes again."""
    seen: dict[bytes, int] = {}
    for path in paths:
        times = seen[path] = seen.get(path, 0) + 1
        yield path if times == 1 else b"%s\0%d" % (path, times)


def _by_path(samples: Samples, rows: Ints) -> Ints:
    """`rows` in the order of their paths."""
    paths = list(_paths(samples.select(rows)))
    return rows[sorted(range(len(rows)), key=paths.__getitem__)]


def _labelled_alike(
    known: KnownPictures, numbers: Ints, samples: Samples, rows: Ints, has_splits: bool
) -> npt.NDArray[np.bool_]:
    """bool [m]: whether the pictures at `rows` are labelled as they were, with the same fields and split.

    Rejected ones are: nothing else is known of them. Splits are compared where `has_splits`.
    """
    alike = np.ones(len(rows), np.bool_)
    converted = known.rows[numbers] >= 0
    before, now = known.rows[numbers][converted], rows[converted]
    same = known.index.labels[before] == samples.labels[now]
    if has_splits:
        names = [known.splits.index(name) if name in known.splits else -1 for name in samples.split_names]
        same &= known.split_of[before] == np.array(names, np.int64)[samples.splits[now]]
    columns = [(column, samples.fields[name]) for name, column in known.index.fields.items()]
    if known.index.targets is not None and samples.targets is not None:
        columns.append((known.index.targets, samples.targets))
    for its, theirs in columns:
        same &= its.select(before).same(theirs.select(now))
    alike[converted] = same
    return alike


def _written_to(
    dataset: ConvertedDataset, known: KnownPictures, scan: Scan, rows: Ints, state: SourceState, numbers: Ints
) -> Iterator[int]:
    """Those of `rows` whose content has changed, or that were rejected and would not be now.

    A picture may have become readable; or its mask, of which nothing is known, may have come.
    """
    times = state.modified_ns[numbers]
    times = np.where(times == 0, -1, times)  # unknown, as in a dataset in memory: the bytes tell
    checksums = state.checksums[numbers]
    yield from changed_rows(scan, rows, times, checksums)
    how, rejected = dataset.manifest.recipe.rendering, dataset.manifest.rejected
    changed = (checksums == 0) & (scan.samples.modified_ns[rows] != times)
    may_have_masks = np.zeros(len(rows), np.bool_)
    if reader_of(scan.source) is not None:
        deadly = [picture.id for picture in rejected if picture.reason == KILLED]
        may_have_masks = (known.rows[numbers] < 0) & ~np.isin(known.ids[numbers], deadly)
    for place in np.flatnonzero(changed | may_have_masks).tolist():  # one by one: some may be large
        ref = scan.samples[int(rows[place])]
        with suppress(ImageError):
            data = scan.source.read(ref, how.max_pixels)
            if not changed[place]:
                size = images.render(data, scan.source.where(ref), how)[1]
                render_mask(scan.source, ref, size, how)
            yield int(rows[place])


def _masked_alike(
    dataset: ConvertedDataset, known: KnownPictures, numbers: Ints, scan: Scan, rows: Ints
) -> npt.NDArray[np.bool_]:
    """bool [m]: whether the pictures at `rows` have the masks that they had; rejected ones do."""
    checksums, sizes = known.index.mask_checksums, known.index.source_sizes
    alike = np.ones(len(rows), np.bool_)
    if checksums is None:
        return alike
    before = known.rows[numbers]
    places = np.flatnonzero(before >= 0).tolist()

    def is_same(place: int) -> bool:
        width, height = sizes[before[place]].tolist()
        ref = scan.samples[int(rows[place])]
        try:
            mask = render_mask(scan.source, ref, (width, height), dataset.manifest.recipe.rendering)
        except ImageError:  # the conversion rejects it by name
            return False
        return mask is not None and checksum_of(mask) == checksums[before[place]]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        alike[places] = list(pool.map(is_same, places))
    return alike


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePlan:
    """An update to be carried out: all that is written depends on it.

    Attributes:
        dataset: as it is.
        difference: of the source.
        plan: the shards of what is new.
        target: for the journal.
        rejected: pictures that were rejected before, and are as they were.
    """

    dataset: ConvertedDataset
    difference: Difference
    plan: ConvertPlan
    target: Target
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
    shards = manifest.shards
    grown = Grown(
        update=len(manifest.updates) + 1,
        shards={split: int(shards.numbers[shards.of_split(split)].max()) + 1 for split in shards.split_names},
        kept={
            split: known.index.labels[stay & (known.split_of == number)]
            for number, split in enumerate(known.splits)
        },
    )
    added = plan_update(scan.samples, difference.new, recipe, grown)
    target = Target(recipe, _digest(dataset, difference), software, grown.update)
    stay_ids = set(known.ids[difference.stay_as].tolist())
    rejected = tuple(picture for picture in manifest.rejected if picture.id in stay_ids)
    return UpdatePlan(dataset, difference, added, target, rejected)


def _digest(dataset: ConvertedDataset, difference: Difference) -> str:
    """SHA-256 (hex) over what an update is made of: the dataset, the source, and which pictures changed."""
    digest = hashlib.sha256(f"{dataset.digest} {difference.scan.digest}".encode())
    for numbers in (difference.new, difference.gone):
        digest.update(repr(numbers.tolist()).encode())
    return digest.hexdigest()


def _check_asked(dataset: ConvertedDataset, recipe: Recipe, options: SourceOptions) -> None:
    manifest = dataset.manifest
    was, asked = manifest.recipe, recipe
    if (
        was.has_split_list and asked.has_split_list
    ):  # a list names the pictures that there are: it grows with them
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
            f"use the same; leave these options as they were, or {_AGAIN}"
        )
