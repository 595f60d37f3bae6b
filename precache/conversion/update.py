"""Update a dataset whose source grew, or lost pictures (`--update`): find the difference and plan the work.

A picture keeps its shard, row, id and label as long as its path, its content and its labelling stay. One that
is gone is marked as removed in the index; one that changed is removed and added. Added pictures get ids above
the highest one ever used, in the order of the paths, and shards of their own. Labels stay: new classes come
behind the existing ones.

No file that the manifest names is written to: an update writes new shards, a new index and a new state of the
source, and ends, as a conversion does, with one rename that replaces the manifest.

Three tables meet here, and an array of positions is named by the table that it indexes:

    scan_rows          samples of the scan
    known_positions    pictures of which the dataset has a record, see `KnownPictures`
    index_rows         samples in the index of the dataset
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
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
    damaged_index_error,
)
from precache.errors import DatasetError, ImageError
from precache.pictures.kinds import decoder_versions
from precache.plan import ConvertPlan, ExistingSamples, keeps_splits, plan_update
from precache.recipe import Recipe
from precache.reporting import warn
from precache.sources import SourceOptions
from precache.sources.base import UNREADABLE, Samples, Scan, changed_rows

_AGAIN = "convert it again with --overwrite"


@dataclass(frozen=True, slots=True, eq=False)
class KnownPictures:
    """The k source pictures of which a dataset has a record, rejected ones too, by id.

    Attributes:
        ids: int64 [k], ascending.
        index_rows: int64 [k], rows in `index`; -1 for rejected pictures.
        state: state of the source that was recorded for the pictures.
        position_of: maps each path (repeats numbered by `_keys`) to its position in `ids`.
        index: index of all n samples, removed ones too.
        splits: names of the splits.
        split_of: int32 [n] for each sample of the index, position in `splits`.
    """

    ids: Ints
    index_rows: Ints
    state: SourceState
    position_of: dict[bytes, int]
    index: SampleIndex
    splits: tuple[str, ...]
    split_of: Sizes

    @classmethod
    def from_dataset(cls, dataset: ConvertedDataset) -> "KnownPictures":
        """Return the pictures of `dataset`.

        Raises:
            DatasetError: its index is damaged, or does not match its record of the source.
        """
        manifest = dataset.manifest
        index = dataset.read_index(removed=True)
        served_rows = np.flatnonzero(index.served)
        rejected_ids = np.array([picture.id for picture in manifest.rejected], np.int64)
        ids = np.concatenate((index.ids[served_rows], rejected_ids))
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        if (np.diff(ids) == 0).any():
            raise damaged_index_error(
                dataset.path / manifest.index.name, "a picture is both rejected and served, or twice"
            )
        index_rows = np.concatenate((served_rows, np.full(len(rejected_ids), -1)))[order]
        path_of_rejected = {picture.id: os.fsencode(picture.path) for picture in manifest.rejected}
        paths = (
            path_of_rejected[id_] if row < 0 else index["paths"].row_array(row).tobytes()
            for id_, row in zip(ids.tolist(), index_rows.tolist(), strict=True)
        )
        position_of = {key: position for position, key in enumerate(_keys(paths))}
        state = dataset.read_source_state()
        if len(state) != len(ids):
            raise DatasetError(
                "its record of the source does not match its index", path=dataset.path, remedy=_AGAIN
            )
        shards = manifest.shards
        split_of = np.repeat(shards.splits, shards.samples)
        return cls(ids, index_rows, state, position_of, index, shards.split_names, split_of)


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Pictures that are both in a scan and in a dataset; `matches[mask]` are some of them.

    Attributes:
        scan_rows: int64 [m], rows of the scan's samples.
        known_positions: int64 [m], positions of the same pictures in `KnownPictures`.
    """

    scan_rows: Ints
    known_positions: Ints

    def __len__(self) -> int:
        return len(self.scan_rows)

    def __getitem__(self, mask: npt.NDArray[np.bool_]) -> "Matches":
        return Matches(self.scan_rows[mask], self.known_positions[mask])


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """The difference between a source and a dataset made from it.

    Attributes:
        scan: scan of the source, with the labels and ids of the dataset, and new ids for new pictures.
        known: pictures of the dataset.
        unchanged: pictures that have not changed.
        new_scan_rows: int64 [a], rows of the scan's samples that are new or changed, in the order of their
            paths.
        removed_known_positions: int64 [r], positions in `known` of pictures that are gone or changed.
        next_id: the id that follows those of the new pictures.
    """

    scan: Scan
    known: KnownPictures
    unchanged: Matches
    new_scan_rows: Ints
    removed_known_positions: Ints
    next_id: int

    def __bool__(self) -> bool:
        return len(self.new_scan_rows) > 0 or len(self.removed_known_positions) > 0


def compare(dataset: ConvertedDataset, scan: Scan, *, contents: bool = True) -> Difference:
    """Return how `scan` differs from `dataset`, which was made from the same source.

    Args:
        contents: whether to compare the contents of pictures whose files were modified.

    Raises:
        DatasetError: the dataset is damaged, or the targets or fields of the samples are of another kind.
        SourceError: a picture cannot be read.
    """
    known = KnownPictures.from_dataset(dataset)
    scan = _with_labels_of(dataset.manifest.classes, scan)
    _check_kinds(dataset, known.index, scan)
    samples = scan.samples
    unchanged = _match_by_path(known, samples)
    has_known_id = np.zeros(len(samples), np.bool_)
    has_known_id[unchanged.scan_rows] = (
        known.ids[unchanged.known_positions] == samples.ids[unchanged.scan_rows]
    )
    # A sample can take the id that its source gave, unless the dataset knows another picture by that id: the
    # source may have been converted again.
    is_unused_id = ~np.isin(samples.ids, known.index.ids) & (has_known_id | ~np.isin(samples.ids, known.ids))
    can_take_id = is_unused_id & scan.own_ids

    old_bytes = known.state.bytes[unchanged.known_positions]
    unchanged = unchanged[samples.file_bytes[unchanged.scan_rows] == old_bytes]
    unchanged = unchanged[_have_same_labels(dataset, known, scan, unchanged)]
    unchanged = unchanged[(has_known_id | ~can_take_id)[unchanged.scan_rows]]
    if contents:
        changed_scan_rows = list(_scan_rows_to_convert_again(dataset, known, scan, unchanged))
        unchanged = unchanged[~np.isin(unchanged.scan_rows, changed_scan_rows)]
    removed_known_positions = np.setdiff1d(np.arange(len(known.ids)), unchanged.known_positions)
    new_scan_rows = _sort_by_path(samples, np.setdiff1d(np.arange(len(samples)), unchanged.scan_rows))

    highest_id = int(max(known.ids.max(initial=-1), samples.ids[can_take_id].max(initial=-1)))
    first_new_id = max(dataset.manifest.next_id, highest_id + 1)
    ids = samples.ids.copy()
    ids[unchanged.scan_rows] = known.ids[unchanged.known_positions]
    renumbered = new_scan_rows[~can_take_id[new_scan_rows]]
    ids[renumbered] = first_new_id + np.arange(len(renumbered))
    return Difference(
        scan=replace(scan, samples=replace(samples, ids=ids)),
        known=known,
        unchanged=unchanged,
        new_scan_rows=new_scan_rows,
        removed_known_positions=removed_known_positions,
        next_id=first_new_id + len(renumbered),
    )


def _match_by_path(known: KnownPictures, samples: Samples) -> Matches:
    """Return the pictures whose paths are both in a dataset and in a scan."""
    positions = (known.position_of.get(key, -1) for key in _keys(_paths(samples)))
    known_positions = np.fromiter(positions, np.int64, len(samples))
    return Matches(np.arange(len(samples)), known_positions)[known_positions >= 0]


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
    targets = scan.samples.targets
    if scan.target == "classes" and targets is not None:
        targets = Column(new_labels[targets.values], targets.ends)
    samples = replace(scan.samples, labels=new_labels[scan.samples.labels], targets=targets)
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


def _sort_by_path(samples: Samples, scan_rows: Ints) -> Ints:
    """Return `scan_rows` in the order of their paths."""
    paths = list(_paths(samples.select(scan_rows)))
    return scan_rows[sorted(range(len(scan_rows)), key=paths.__getitem__)]


def _have_same_labels(
    dataset: ConvertedDataset, known: KnownPictures, scan: Scan, matches: Matches
) -> npt.NDArray[np.bool_]:
    """Return bool [m]: whether the pictures have the labels and fields that they had, and the split if kept.

    The result is True for rejected pictures, whose labels are not recorded.
    """
    samples = scan.samples
    index_rows = known.index_rows[matches.known_positions]
    converted = index_rows >= 0
    index_rows, scan_rows = index_rows[converted], matches.scan_rows[converted]
    same = known.index.labels[index_rows] == samples.labels[scan_rows]
    if keeps_splits(samples, dataset.manifest.recipe):
        known_splits = [
            known.splits.index(name) if name in known.splits else -1 for name in samples.split_names
        ]
        same &= known.split_of[index_rows] == np.array(known_splits, np.int64)[samples.splits[scan_rows]]
    columns = [(column, samples.fields[name]) for name, column in known.index.fields.items()]
    if known.index.targets is not None and samples.targets is not None:
        columns.append((known.index.targets, samples.targets))
    for stored, scanned in columns:
        same &= stored.select(index_rows).equal_rows(scanned.select(scan_rows))
    result = np.ones(len(matches), np.bool_)
    result[converted] = same
    return result


def _scan_rows_to_convert_again(
    dataset: ConvertedDataset, known: KnownPictures, scan: Scan, matches: Matches
) -> Iterator[int]:
    """Yield the rows in the scan of pictures that have changed, or were unreadable and can be read now."""
    scan_rows, known_positions = matches.scan_rows, matches.known_positions
    times = known.state.modified_ns[known_positions]
    times = np.where(times == 0, -1, times)  # 0 is unknown, as in a dataset in memory: compare the bytes
    checksums = known.state.checksums[known_positions]
    yield from changed_rows(scan, scan_rows, times, checksums)
    was_unreadable = (checksums == UNREADABLE) & (scan.samples.modified_ns[scan_rows] != times)
    for scan_row in scan_rows[was_unreadable].tolist():  # one by one: some may be large
        with suppress(ImageError):
            scan.source.read(scan.samples[scan_row], dataset.manifest.recipe.max_pixels)
            yield scan_row


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePlan:
    """The plan of an update, on which every byte that it writes depends.

    Attributes:
        dataset: the dataset before the update.
        difference: difference between the source and the dataset.
        plan: shards of the new pictures.
        journal_target: what the journal of an interrupted update must hold for this one to continue it.
        rejected: pictures that were rejected before, and have not changed.
    """

    dataset: ConvertedDataset
    difference: Difference
    plan: ConvertPlan
    journal_target: Target
    rejected: tuple[Rejected, ...]


def prepare_update(
    dataset: ConvertedDataset, scan: Scan, recipe: Recipe, options: SourceOptions
) -> UpdatePlan | None:
    """Return the update after which `dataset` holds the pictures of `scan`; None if nothing changed.

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
    unchanged_positions = difference.unchanged.known_positions
    index_rows = known.index_rows[unchanged_positions]
    stays = np.zeros(len(known.index), np.bool_)
    stays[index_rows[index_rows >= 0]] = True
    shards = manifest.shards
    existing = ExistingSamples(
        update=len(manifest.updates) + 1,
        next_shards={
            split: int(shards.numbers[shards.split_mask(split)].max()) + 1 for split in shards.split_names
        },
        labels={
            split: known.index.labels[stays & (known.split_of == position)]
            for position, split in enumerate(known.splits)
        },
    )
    added = plan_update(scan.samples, difference.new_scan_rows, recipe, existing)
    journal_target = Target(recipe, _digest(dataset, difference), software, existing.update)
    unchanged_ids = set(known.ids[unchanged_positions].tolist())
    rejected = tuple(picture for picture in manifest.rejected if picture.id in unchanged_ids)
    return UpdatePlan(dataset, difference, added, journal_target, rejected)


def _digest(dataset: ConvertedDataset, difference: Difference) -> str:
    """Return the SHA-256 (hex) over an update's dataset and source, and the pictures that changed."""
    digest = hashlib.sha256(f"{dataset.digest} {difference.scan.digest}".encode())
    for positions in (difference.new_scan_rows, difference.removed_known_positions):
        digest.update(repr(positions.tolist()).encode())
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
        if before != now and (name != "root" or before is None or now is None):
            phrases.append(f"{name} {before}, asked for {now}")
    if phrases:
        raise DatasetError(
            f"was converted with other settings ({'; '.join(phrases)}), and an update must use the same",
            path=dataset.path,
            remedy=f"leave these options as they were, or {_AGAIN}",
        )
