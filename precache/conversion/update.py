"""Update a dataset whose source grew, or lost pictures (`--update`): find the difference and plan the work.

A picture keeps its shard, row, id and label as long as its path, its content and its labelling stay. One that
is gone is marked as removed in the index; one that changed is removed and added. Added pictures get ids above
the highest one ever used, in the order of the paths, and shards of their own. Labels stay: new classes come
behind the existing ones.

No file that the manifest names is written to: an update writes new shards, a new index and a new state of the
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
from precache.dataset.index import (
    Ints,
    Rejected,
    SampleIndex,
    Sizes,
    SourceState,
    checksum_of,
    damaged_index_error,
)
from precache.engines import KILLED
from precache.errors import DatasetError, ImageError
from precache.pictures import images
from precache.pictures.kinds import decoder_versions
from precache.plan import ConvertPlan, ExistingSamples, keeps_splits, plan_update
from precache.recipe import Recipe
from precache.reporting import warn
from precache.sources import SourceOptions
from precache.sources.base import Samples, Scan, changed_rows
from precache.sources.masks import mask_reader, render_mask

_AGAIN = "convert it again with --overwrite"
_FOLDER_OPTIONS = ("root", "mask")  # their content is compared, and not their paths


@dataclass(frozen=True, slots=True, eq=False)
class KnownPictures:
    """The source pictures of which a dataset has a record, rejected ones too, by id.

    Attributes:
        ids: int64 [k], ascending.
        rows: int64 [k], rows of the index; -1 for rejected pictures.
        number_of: path, made unique by `_keys` -> position in `ids`.
        index: index of all samples, removed ones too.
        splits: names of the splits.
        split_of: int32 [n] for each sample of the index, position in `splits`.
    """

    ids: Ints
    rows: Ints
    number_of: dict[bytes, int]
    index: SampleIndex
    splits: tuple[str, ...]
    split_of: Sizes

    @classmethod
    def from_dataset(cls, dataset: ConvertedDataset) -> "KnownPictures":
        """Return the pictures of `dataset`.

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
            raise damaged_index_error(
                dataset.path / manifest.index.name, "a picture is both rejected and served, or twice"
            )
        rows = np.concatenate((served, np.full(len(rejected), -1)))[order]
        path_of = {picture.id: os.fsencode(picture.path) for picture in manifest.rejected}
        pairs = zip(rows.tolist(), ids[order].tolist(), strict=True)
        paths = (path_of[id_] if row < 0 else index["paths"].row_array(row).tobytes() for row, id_ in pairs)
        number_of = {key: number for number, key in enumerate(_keys(paths))}
        table = manifest.shards
        split_of = np.repeat(table.splits, table.samples)
        return cls(ids[order], rows, number_of, index, table.split_names, split_of)


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """The difference between a source and a dataset made from it.

    Attributes:
        scan: scan of the source, with the labels and ids of the dataset, and new ids for new pictures.
        known: pictures of the dataset.
        unchanged: int64 [m], rows of the scan's samples that have not changed.
        unchanged_known: int64 [m], their positions in `known`.
        new: int64 [a], rows of the scan's samples that are new or changed, in the order of their paths.
        removed: int64 [r], positions in `known` of pictures that are gone or changed.
        state: state of the source that the dataset recorded, for the pictures in `known`.
        next_id: the id that follows those of the new pictures.
    """

    scan: Scan
    known: KnownPictures
    unchanged: Ints
    unchanged_known: Ints
    new: Ints
    removed: Ints
    state: SourceState
    next_id: int

    def __bool__(self) -> bool:
        return bool(len(self.new) or len(self.removed))


def compare(dataset: ConvertedDataset, scan: Scan, *, contents: bool = True) -> Difference:
    """Return how `scan` differs from `dataset`, which was made from the same source.

    Args:
        contents: whether to compare the contents of pictures whose files were modified, and masks.

    Raises:
        DatasetError: the targets or fields of the samples are of another kind.
        SourceError: a picture cannot be read.
    """
    manifest = dataset.manifest
    known = KnownPictures.from_dataset(dataset)
    scan = _with_labels_of(manifest.classes, scan)
    _check_kinds(dataset, known.index, scan)
    samples = scan.samples
    positions = (known.number_of.get(key, -1) for key in _keys(_paths(samples)))
    numbers = np.fromiter(positions, np.int64, len(samples))  # positions in `known`, -1 for new paths
    ids, stored_ids = samples.ids.copy(), known.index.ids
    has_same_id = (numbers >= 0) & (known.ids[numbers] == ids)
    # whether a sample may keep an id that its source gave: if the source was converted again, another sample
    # may have had that id
    is_free = scan.own_ids & ~np.isin(ids, stored_ids) & (has_same_id | ~np.isin(ids, known.ids))
    state = dataset.read_source_state()
    if len(state) != len(known.ids):
        raise DatasetError(
            "its record of the source does not match its index", path=dataset.path, remedy=_AGAIN
        )
    unchanged = np.flatnonzero(numbers >= 0)
    unchanged = unchanged[samples.file_bytes[unchanged] == state.bytes[numbers[unchanged]]]
    has_splits = keeps_splits(samples, dataset.manifest.recipe)
    unchanged = unchanged[_have_same_labels(known, numbers[unchanged], samples, unchanged, has_splits)]
    unchanged = unchanged[has_same_id[unchanged] | ~is_free[unchanged]]
    if contents:
        changed = list(_changed_rows(dataset, known, scan, unchanged, state, numbers[unchanged]))
        unchanged = np.setdiff1d(unchanged, changed)
        unchanged = unchanged[_have_same_masks(dataset, known, numbers[unchanged], scan, unchanged)]
    removed = np.setdiff1d(np.arange(len(known.ids)), numbers[unchanged])
    new = _sort_by_path(samples, np.setdiff1d(np.arange(len(samples)), unchanged))
    next_id = max(manifest.next_id or 1 + int(known.ids[-1]), 1 + int(ids[is_free].max(initial=-1)))
    ids[unchanged] = known.ids[numbers[unchanged]]
    renumbered = new[~is_free[new]]
    ids[renumbered] = next_id + np.arange(len(renumbered))
    next_id += len(renumbered)
    samples.ids = ids
    return Difference(scan, known, unchanged, numbers[unchanged], new, removed, state, next_id)


def _check_kinds(dataset: ConvertedDataset, index: SampleIndex, scan: Scan) -> None:
    manifest, samples = dataset.manifest, scan.samples
    if scan.target != manifest.target:
        raise DatasetError(
            f"has target {manifest.target}, but {scan.root} now has target {scan.target}",
            path=dataset.path,
            remedy=f"correct its labels, or {_AGAIN}",
        )
    if set(index.fields) != set(samples.fields):
        differing = ", ".join(sorted(set(index.fields) ^ set(samples.fields)))
        raise DatasetError(
            f"{scan.root} now has other fields ({differing})",
            path=dataset.path,
            remedy=f"leave them as they were, or {_AGAIN}",
        )
    if (index.mask_checksums is None) != (mask_reader(scan.source) is None):
        before, now = ("no masks", "some") if index.mask_checksums is None else ("masks", "none")
        raise DatasetError(f"has {before}, but {scan.root} now has {now}", path=dataset.path, remedy=_AGAIN)
    pairs = {name: (column, samples.fields[name]) for name, column in index.fields.items()}
    if index.targets is not None and samples.targets is not None:
        pairs["target"] = (index.targets, samples.targets)
    for name, (stored, scanned) in pairs.items():
        if stored.differs_in_kind(scanned):
            raise DatasetError(
                f"its {name!r} is {_column_kind(stored)}, but in {scan.root} it is now "
                f"{_column_kind(scanned)}",
                path=dataset.path,
                remedy=f"correct it, or {_AGAIN}",
            )


def _column_kind(column: Column) -> str:
    """Return the kind of a column's values, and their shape if they are arrays."""
    return f"{column.kind} {[*column.values.shape[1:]]}" if column.values.ndim > 1 else column.kind


def _with_labels_of(classes: tuple[str, ...], scan: Scan) -> Scan:
    """Return a copy of `scan` whose labels are indices of `classes`, followed by its new classes."""
    known = set(classes)
    all_classes = (*classes, *(name for name in scan.classes if name not in known))
    label_of = {name: label for label, name in enumerate(all_classes)}
    new_labels = np.array([*(label_of[name] for name in scan.classes), -1], np.int64)  # at [-1], label -1
    samples = copy.copy(scan.samples)
    samples.labels = new_labels[samples.labels]
    if scan.target == "classes" and samples.targets is not None:
        samples.targets = Column(new_labels[samples.targets.values], samples.targets.ends)
    return replace(scan, classes=all_classes, samples=samples)


def _paths(samples: Samples) -> Iterator[bytes]:
    """Yield the path of each sample."""
    start = 0
    for end in samples.path_ends.tolist():
        yield samples.paths[start:end]
        start = end


def _keys(paths: Iterable[bytes]) -> Iterator[bytes]:
    """Yield each path, and a unique key in its place where the path occurs again."""
    counts: dict[bytes, int] = {}
    for path in paths:
        counts[path] = counts.get(path, 0) + 1
        yield path if counts[path] == 1 else b"%s\0%d" % (path, counts[path])


def _sort_by_path(samples: Samples, rows: Ints) -> Ints:
    """Return `rows` in the order of their paths."""
    paths = list(_paths(samples.select(rows)))
    return rows[sorted(range(len(rows)), key=paths.__getitem__)]


def _have_same_labels(
    known: KnownPictures, numbers: Ints, samples: Samples, rows: Ints, has_splits: bool
) -> npt.NDArray[np.bool_]:
    """Return bool [m]: whether the pictures at `rows` have the labels, fields and split that they had.

    The result is True for rejected pictures, whose labels are not recorded.

    Args:
        numbers: int64 [m], positions of the pictures in `known`.
        has_splits: whether samples stay in the splits of the source, so that splits are compared.
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
    for stored, scanned in columns:
        same &= stored.select(before).equal_rows(scanned.select(now))
    alike[converted] = same
    return alike


def _changed_rows(
    dataset: ConvertedDataset, known: KnownPictures, scan: Scan, rows: Ints, state: SourceState, numbers: Ints
) -> Iterator[int]:
    """Yield the `rows` whose content has changed, or that were rejected and can be converted now.

    A rejected picture may have become readable; or its mask, of which nothing is recorded, may exist now.

    Args:
        numbers: int64 [m], positions of the pictures at `rows` in `known`.
    """
    times = state.modified_ns[numbers]
    times = np.where(times == 0, -1, times)  # 0 is unknown, as in a dataset in memory: compare the bytes
    checksums = state.checksums[numbers]
    yield from changed_rows(scan, rows, times, checksums)
    rendering, rejected = dataset.manifest.recipe.rendering, dataset.manifest.rejected
    was_unreadable = (checksums == 0) & (scan.samples.modified_ns[rows] != times)
    may_have_masks = np.zeros(len(rows), np.bool_)
    if mask_reader(scan.source) is not None:
        fatal_ids = [picture.id for picture in rejected if picture.reason == KILLED]
        may_have_masks = (known.rows[numbers] < 0) & ~np.isin(known.ids[numbers], fatal_ids)
    for index in np.flatnonzero(was_unreadable | may_have_masks).tolist():  # one by one: some may be large
        ref = scan.samples[int(rows[index])]
        with suppress(ImageError):
            data = scan.source.read(ref, rendering.max_pixels)
            if not was_unreadable[index]:
                size = images.render(data, scan.source.where(ref), rendering)[1]
                render_mask(scan.source, ref, size, rendering)
            yield int(rows[index])


def _have_same_masks(
    dataset: ConvertedDataset, known: KnownPictures, numbers: Ints, scan: Scan, rows: Ints
) -> npt.NDArray[np.bool_]:
    """Return bool [m]: whether the pictures at `rows` still have their masks; True for rejected ones."""
    checksums, sizes = known.index.mask_checksums, known.index.source_sizes
    alike = np.ones(len(rows), np.bool_)
    if checksums is None:
        return alike
    index_rows = known.rows[numbers]
    converted = np.flatnonzero(index_rows >= 0).tolist()

    def is_same(number: int) -> bool:
        width, height = sizes[index_rows[number]].tolist()
        ref = scan.samples[int(rows[number])]
        try:
            mask = render_mask(scan.source, ref, (width, height), dataset.manifest.recipe.rendering)
        except ImageError:  # the conversion rejects the picture by name
            return False
        return mask is not None and checksum_of(mask) == checksums[index_rows[number]]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        alike[converted] = list(pool.map(is_same, converted))
    return alike


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePlan:
    """The plan of an update, on which every byte that it writes depends.

    Attributes:
        dataset: the dataset before the update.
        difference: difference between the source and the dataset.
        plan: shards of the new pictures.
        target: target for the journal.
        rejected: pictures that were rejected before, and have not changed.
    """

    dataset: ConvertedDataset
    difference: Difference
    plan: ConvertPlan
    target: Target
    rejected: tuple[Rejected, ...]


def prepare_update(
    dataset: ConvertedDataset, scan: Scan, recipe: Recipe, options: SourceOptions
) -> UpdatePlan | None:
    """Return the update after which `dataset` holds the pictures of `scan`; None if it does already.

    Raises:
        DatasetError: the dataset was made by another recipe or with other options; see `compare` for others.
        SettingError: the source has splits of its own, and the recipe asks for others.
    """
    _check_same_settings(dataset, recipe, options)
    difference = compare(dataset, scan)
    if not difference:
        return None
    manifest, known, scan = dataset.manifest, difference.known, difference.scan
    software = decoder_versions()
    if software != manifest.made_by:
        changed = [name for name in software if software[name] != manifest.made_by.get(name)]
        warn(
            f"{dataset.path}: was made with other versions of {', '.join(changed)}; what is added may be "
            f"decoded a little differently"
        )
    stay = np.zeros(len(known.index), np.bool_)
    rows = known.rows[difference.unchanged_known]
    stay[rows[rows >= 0]] = True
    shards = manifest.shards
    existing = ExistingSamples(
        update=len(manifest.updates) + 1,
        next_shards={
            split: int(shards.numbers[shards.split_mask(split)].max()) + 1 for split in shards.split_names
        },
        labels={
            split: known.index.labels[stay & (known.split_of == number)]
            for number, split in enumerate(known.splits)
        },
    )
    added = plan_update(scan.samples, difference.new, recipe, existing)
    target = Target(recipe, _digest(dataset, difference), software, existing.update)
    stay_ids = set(known.ids[difference.unchanged_known].tolist())
    rejected = tuple(picture for picture in manifest.rejected if picture.id in stay_ids)
    return UpdatePlan(dataset, difference, added, target, rejected)


def _digest(dataset: ConvertedDataset, difference: Difference) -> str:
    """Return the SHA-256 (hex) over an update's dataset and source, and the pictures that changed."""
    digest = hashlib.sha256(f"{dataset.digest} {difference.scan.digest}".encode())
    for numbers in (difference.new, difference.removed):
        digest.update(repr(numbers.tolist()).encode())
    return digest.hexdigest()


def _check_same_settings(dataset: ConvertedDataset, recipe: Recipe, options: SourceOptions) -> None:
    """Raise DatasetError unless the dataset was converted by this recipe and with these options."""
    manifest = dataset.manifest
    if manifest.recipe.has_split_list and recipe.has_split_list:  # a list grows with the source
        recipe = replace(recipe, splits=manifest.recipe.splits)
    phrases = recipe_differences(manifest.recipe.to_json(), recipe)
    old_options, new_options = manifest.source_options, options.to_json()
    for name in sorted({*old_options, *new_options}):
        before, now = old_options.get(name), new_options.get(name)
        if before != now and (name not in _FOLDER_OPTIONS or before is None or now is None):
            phrases.append(f"{name} {before}, asked for {now}")
    if phrases:
        raise DatasetError(
            f"was converted with other settings ({'; '.join(phrases)}), and an update must use the same",
            path=dataset.path,
            remedy=f"leave these options as they were, or {_AGAIN}",
        )
