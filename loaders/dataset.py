"""What a path holds: a raw tree or a converted folder, seen the same way; and what is fetched from a URL."""

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import le
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.deliver import stop_check
from loaders.order import WINDOW_SHARDS
from loaders.settings import count_local_ranks
from precache.dataset.columns import Column, from_zero
from precache.dataset.converted import ConvertedDataset, OpenedFolder, is_converted, open_dataset
from precache.dataset.files import hold_whole
from precache.dataset.index import SampleIndex, checksum_of
from precache.dataset.manifest import MANIFEST_NAME
from precache.dataset.shard_table import ShardTable
from precache.errors import (
    DatasetError,
    ImageError,
    NothingFoundError,
    SettingError,
    SourceError,
    check_choice,
    did_you_mean,
    printable,
    shell_command,
)
from precache.formats import FORMATS, StoredSample
from precache.formats.shards import DATA_START, picture_starts
from precache.pictures.images import CHANNELS, Rendering
from precache.pictures.reading import steadily
from precache.pictures.sizes import Size, sides, written
from precache.plan import split_rows
from precache.recipe import DEFAULT_SPLITS, Recipe, flag_name
from precache.reporting import abridge
from precache.sources.base import Scan
from precache.sources.rejected_list import default_list, read_list, rejected_rows
from precache.sources.splits import apply_list, is_list_file
from precache.sources.tree import list_tree, split_of
from precache.storage import read_regular_part
from precache.storage.shard_cache import Cache, CachedFiles
from precache.storage.urls import Location, Url, locate

RAW = "raw"
DEFAULT_SIZE = 224
"""Side in pixels of what is served unless another is asked for, or less is stored."""
T = TypeVar("T")
_FEW = 4  # a shard at a URL of which a quarter is needed is fetched whole
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteShards:
    """What is fetched for each shard of a split.

    Attributes:
        mirror: fetches the files of the dataset.
        shards: in stored order.
        parts: by number, of those shards that are not fetched whole, see `ShardPart`.
    """

    mirror: CachedFiles
    shards: ShardTable
    parts: Mapping[int, "ShardPart"] = field(default_factory=dict)

    def hold(
        self, number: int, *, with_index: bool = False, check: Callable[[], None] | None = None
    ) -> ExitStack:
        """Have shard `number` on this machine until the stack is closed; it is fetched if need be.

        Args:
            check: called meanwhile, by several threads; what it raises ends the fetching. Default: Ending if
                the thread that calls this is to end.

        Raises:
            StorageError: it cannot be fetched.
        """
        check = check or stop_check()
        shard, *others = self.shards[number].files
        part = self.parts.get(number)
        with ExitStack() as held:
            for file in others if with_index or part is not None else ():
                # it says where samples lie
                held.enter_context(hold_whole(self.mirror, file, check))
            held.enter_context(self.mirror.hold(shard, check, part))
            return held.pop_all()

    def damaged(self, number: int) -> str:
        """Shard `number` was damaged here: remove it, so that it is fetched again; what to say of it."""
        part = self.parts.get(number)
        for file in self.shards[number].files:
            self.mirror.forget(file.name)
            if part is not None:
                self.mirror.forget(f"{part.prefix}{file.name}")
        return (
            f"its bytes changed since they were fetched (checksum), so its shard was removed from the cache; "
            f"run again, and it is fetched from {self.mirror.url}"
        )

    def ahead(self, window_shards: int, largest_bytes: int) -> int:
        """How many shards may be fetched beyond two windows, the one that is served and the one behind it.

        Raises:
            SettingError: the cache is too small for two windows.
        """
        most_bytes = self.mirror.cache.bytes
        if most_bytes is None:
            return window_shards
        windows_bytes = 2 * min(window_shards, len(self.shards)) * largest_bytes
        if most_bytes < windows_bytes:
            raise SettingError(
                f"cache_bytes is too small: needs {windows_bytes:,} for two windows of shards of "
                f"{self.mirror.url}, got {most_bytes:,}; raise it, or pass memory_bytes={most_bytes} for "
                f"smaller windows"
            )
        return min(window_shards, max(0, most_bytes // count_local_ranks() - windows_bytes) // largest_bytes)


@dataclass(frozen=True, slots=True)
class SplitData:
    """The samples of one split, in stored order.

    The index of a converted folder is mapped: what is used of it is in memory once for all processes. Where
    classes, subset or updates leave samples out, each of the others costs 8 bytes.

    Attributes:
        path: the folder, or the URL.
        kind: `raw`, or the format of a converted folder.
        index: of the samples: all that `precache.dataset.index` says; of a raw tree ids and labels.
        shard_samples: int64 [shards], in stored order; a raw tree is one shard.
        files: paths of the shards, see `held`; of the pictures themselves for a raw tree.
        shard_bytes: int64 [shards], sizes of the shards' files; none for a raw tree.
        shards: as the manifest has them; None for a raw tree.
        classes: class names.
        size: of the stored pictures; the side that they were fitted to where each has a size of its own; the
            default to resize to for a raw tree.
        channels: of the stored pictures; a raw tree's become RGB.
        dtype: of their values, uint8 or uint16. Backends carry bytes, uint8 [..., pixel_bytes], which are
            values again where they are resized, and where a batch is sent.
        statistics: mean and standard deviation of each channel, of values in 0-1; None where the manifest
            has none. Those of split `train` where there is one: what is trained with is what is served.
        rendering: how pictures became what is stored; None for a raw tree.
        boxes: the field of boxes; empty if there is none.
        digest: identity of the dataset, and of what is left out of it, hex; of a raw tree by the names of
            its pictures, whose sizes nobody has asked for.
        class_depth: how deep the class folders of a raw tree lie.
        part_of: the whole split and the positions int64 [n] in it, where this is a part; None: all, labelled
            otherwise. `shard_samples` counts what is served of each shard.
        remote: fetches the shards of a dataset at a URL; else None.
        folder: of a converted dataset, as it was opened; None for a raw tree and at a URL.
        shard_starts: int64 [shards + 1], the position of each shard's first sample, and behind the last one.
    """

    path: Location
    kind: str
    index: SampleIndex
    shard_samples: Positions
    files: Sequence[str]
    shard_bytes: Positions
    shards: ShardTable | None
    classes: tuple[str, ...]
    size: Size
    digest: str
    channels: int = 3
    dtype: np.dtype[Any] = np.dtype(np.uint8)  # noqa: RUF009 (a constant)
    class_depth: int = 1
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    rendering: Rendering | None = None
    boxes: str = ""
    part_of: "tuple[SplitData, Positions | None] | None" = field(default=None, repr=False, compare=False)
    remote: RemoteShards | None = field(default=None, repr=False, compare=False)
    folder: OpenedFolder | None = field(default=None, repr=False, compare=False)
    shard_starts: Positions = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = np.concatenate(([0], np.cumsum(self.shard_samples, dtype=np.int64)))
        object.__setattr__(self, "shard_starts", starts)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ids(self) -> Column:
        """int64 [n], ranks in the sorted scan of the source tree; indexed like an array."""
        return self.index["ids"]

    @property
    def labels(self) -> Column:
        """int64 [n], likewise; -1 where a sample has not just one class."""
        return self.index["labels"]

    @property
    def shapes(self) -> Column | None:
        """int32 [n, 2], likewise: height and width of each stored picture; None where all are of `size`."""
        return self.index.get("shapes")

    @property
    def pixel_bytes(self) -> int:
        """Of all channels of a pixel."""
        return self.channels * self.dtype.itemsize

    @contextmanager
    def held(self, number: int, *, with_index: bool = False) -> Iterator[Path]:
        """The path of shard `number`, which stays until the end of the block; at a URL it is fetched before.

        Raises:
            StorageError: one cannot be fetched.
            DatasetError: what was read there is of another dataset, which took the place of this one.
        """
        if self.remote is not None:
            with self.remote.hold(number, with_index=with_index):
                yield Path(self.files[number])
        else:
            assert self.folder is not None
            with self.folder.unchanged():
                yield Path(self.files[number])

    def read(self, number: int, reader: Callable[[Path], T], *, with_index: bool = False) -> T:
        """What `reader` makes of shard `number`, see `held`; damaged in the cache, it is fetched again.

        Raises:
            DatasetError: of `reader`; at a URL, of what has just been fetched.
        """
        try:
            with self.held(number, with_index=with_index) as path:
                return reader(path)
        except DatasetError:
            if self.remote is None:
                raise
        self.remote.damaged(number)
        with self.held(number, with_index=with_index) as path:
            return reader(path)

    def read_sample(self, position: int, path: Path, place: Positions) -> StoredSample:
        """What is stored of the sample at `position`, of its shard at `path`; the content is not compared.

        Args:
            place: int64 [2], where the index says that it lies: first byte and bytes.

        Raises:
            SampleError: something else lies there.
        """
        start, count = place.tolist()
        try:
            content = steadily(lambda: read_regular_part(path, start, count), str(path))
            sample = FORMATS[self.kind].read_sample(content)
            problem = f"its index points to sample {sample.id}"
            if sample.id in (-1, self.ids[position]):
                return sample
        except ValueError as error:
            problem = f"not where its index says ({error})"
        verify = shell_command("precache verify", self.path)
        raise self.index.error(position, self.file(position), f"{problem}; run: {verify}")

    def locate(self, positions: Positions) -> tuple[Positions, Positions]:
        """Of the samples at `positions`: int64 [n] numbers of their shards, int64 [n] their rows in these."""
        if self.part_of is not None:
            return self.whole.locate(self.in_whole(positions))
        shards = np.searchsorted(self.shard_starts, positions, side="right") - 1
        return shards, positions - self.shard_starts[shards]

    def shard_positions(self, number: int) -> slice:
        """Positions of the samples of shard `number`."""
        return slice(int(self.shard_starts[number]), int(self.shard_starts[number + 1]))

    @property
    def whole(self) -> "SplitData":
        """All samples that the shards hold."""
        return self if self.part_of is None else self.part_of[0]

    def in_whole(self, positions: Positions | slice) -> Positions:
        """Positions in `whole` of the samples at `positions`."""
        if self.part_of is not None and self.part_of[1] is not None:
            return self.part_of[1][positions]
        if isinstance(positions, slice):
            return np.arange(*positions.indices(len(self)))
        return from_zero(positions, len(self))

    def select(self, positions: Positions) -> "SplitData":
        """The samples at `positions` alone, in this order; ascending if readers go shard by shard."""
        raw = self.kind == RAW
        digest = hashlib.sha256(self.digest.encode() + self.ids[positions].tobytes()).hexdigest()
        return replace(
            self,
            index=self.index.at(positions),
            shard_samples=np.bincount(self.locate(positions)[0], minlength=len(self.shard_samples)),
            files=tuple(self.files[position] for position in positions.tolist()) if raw else self.files,
            digest=digest,
            part_of=(self.whole, self.in_whole(positions)),
        )

    def relabel(self, classes: tuple[str, ...], labels: Positions) -> "SplitData":
        """The same samples labelled as `classes`: `labels`, int64, has what each label becomes."""
        return self.with_labels(classes, Column(labels[self.labels[:]]))

    def with_labels(self, classes: tuple[str, ...], labels: Column) -> "SplitData":
        """The same samples with these labels, of `classes`."""
        index = self.index.with_columns({"labels": labels})
        return replace(self, classes=classes, index=index, part_of=self.part_of or (self, None))

    def file(self, position: int) -> str:
        """The file that holds the sample at `position`: its shard, or the picture itself."""
        if self.kind == RAW:
            return self.files[position]
        return self.files[int(self.locate(np.array([position]))[0][0])]

    def path_at(self, position: int) -> str:
        """Path of the picture at `position`, relative to the source tree, with forward slashes."""
        if self.kind == RAW:
            return os.path.relpath(self.files[position], str(self.path)).replace(os.sep, "/")
        return self.index.path(position)

    def path_of(self, sample_id: object) -> str:
        """Path of the picture of the sample of this id, as `path_at`.

        Raises:
            SettingError: the split has no such sample.
        """
        if len(rows := np.flatnonzero(self.ids == sample_id)):
            return self.path_at(int(rows[0]))
        raise SettingError(f"sample {sample_id!r}: {self.path} has none of this id in this split")

    def targets(self) -> list[Any]:
        """What each sample is labelled with: a class, a list of classes, a number, or a list of numbers."""
        if (targets := self.index.targets) is None:
            return list(self.labels.tolist())
        return [targets.value(row) for row in range(len(targets))]

    def shapes_at(self, positions: Positions | slice) -> Positions:
        """int64 [n, 2]: height and width of what is stored of the samples at `positions`."""
        if self.shapes is not None:
            return self.shapes[positions].astype(np.int64)  # type: ignore[no-any-return]
        return np.broadcast_to(np.array(sides(self.size), np.int64), (len(self), 2))[positions]

    @property
    def max_sides(self) -> tuple[int, int]:
        """Height and width that no stored picture exceeds."""
        if self.shapes is None:
            return sides(self.size)
        known = None if self.shards is None else self.shards.largest
        height, width = (self.shapes.values if known is None else known).max(axis=0).tolist()
        return height, width

    @property
    def varies(self) -> bool:
        """Whether each picture has a size of its own."""
        return self.kind == RAW or self.shapes is not None

    def crop_ratio(self, asked: float, served: Size) -> float:
        """How much of the shorter side to serve as `served`, a default, if this was asked for."""
        if self.kind == RAW:
            return asked
        return min(1.0, max(asked, min(sides(served)) / min(sides(self.size))))

    def warn_if_smaller(self, needed: Size, served: Size, *, enlarged: bool = True) -> None:
        """Say it where less is stored than is `needed` to serve `served`, and what becomes of it."""
        if self.kind == RAW or all(map(le, sides(needed), sides(self.size))):
            return
        cut = "" if needed == served else f" is cut from {written(needed)}, and"
        made = "is enlarged from them, so it is blurred" if enlarged else "has black around them"
        warnings.warn(
            f"{self.path} stores {written(self.size)} pixels: size {written(served)}{cut} {made}; convert "
            f"with --size {written(needed)}, or build with a smaller size",
            stacklevel=2,
        )

    def window_shards(self, memory_bytes: int | None) -> int:
        """How many shards a window holds so that two of them, read and next, fit into `memory_bytes`.

        Raises:
            SettingError: not even two shards fit, or not two windows into the cache of a URL.
        """
        if not len(self.shard_bytes):
            return WINDOW_SHARDS
        if memory_bytes is not None:
            largest = int(self.shard_bytes.max())
            if memory_bytes < 2 * largest:
                raise SettingError(
                    f"memory_bytes is too small: needs {2 * largest:,} for two shards of {self.path}, got "
                    f"{memory_bytes:,}; give at least that, or convert again with smaller --shard-bytes"
                )
            return memory_bytes // (2 * largest)
        if self.remote is not None:
            self.remote.ahead(WINDOW_SHARDS, int(self.shard_bytes.max()))
        return WINDOW_SHARDS


def depth_flags(class_depth: int) -> tuple[str, ...]:
    """The flags of a command that reads a tree whose class folders lie so deep."""
    return () if class_depth == 1 else ("--class-depth", str(class_depth))


def reason_with_remedy(error: ImageError, root: Location | str, class_depth: int, what: str) -> str:
    """Why a picture of the raw tree at `root` cannot be read, what to do, and the command that lists all."""
    command = shell_command("precache check", root, *depth_flags(class_depth))
    return f"{error.reason}; {what}; to list all such pictures, run: {command}"


def served_size(parts: Sequence[SplitData], size: Size | None) -> Size:
    """What to serve of these splits if `size` was asked for; None: what `loaders.build` says, the least."""
    if size is not None:
        return size
    known = (part.size if isinstance(part.size, tuple) else min(part.size, DEFAULT_SIZE) for part in parts)
    return min(known, key=sides)


def open_split(
    path: str | os.PathLike[str] | Url,
    split: str,
    *,
    splits: str | os.PathLike[str] | None = None,
    split_seed: int = 0,
    class_depth: int | None = None,
    allow_empty: bool | None = None,
    skip_rejected: bool = False,
    cache: Cache | None = None,
) -> SplitData:
    """List the samples of `split` in the raw tree or converted folder at `path`, or converted at a URL.

    Args:
        split: its name, or another spelling of it, as `precache.sources.tree` knows them: valid for val.
        splits: shares of a raw tree's splits, or a list file, as of `precache convert --splits`.
        split_seed: `Recipe.seed` of such a conversion; it draws the splits.
        class_depth: how deep the class folders of a raw tree lie, see `list_tree`; default 1.
        allow_empty: keep class folders of a raw tree without a picture as classes; False: raise of them;
            None: leave them out, with a warning.
        skip_rejected: leave out what the tree's list of `precache check`, if it has one, says of the files as
            they are now; a converted folder holds none of them anyway.
        cache: where files of a URL are kept.

    Raises:
        NothingFoundError: there is neither at `path`; or a class without a picture, see `allow_empty`.
        SourceError, DatasetError: what is there cannot be read, or a list is not one.
        SettingError: it has no such split; or it is converted, and a setting is for raw trees.
    """
    path = locate(path)
    if isinstance(path, Url) or is_converted(path):
        dataset = open_dataset(path, cache) if isinstance(path, Url) else open_dataset(path)
        _check_of_raw_trees(dataset, splits=splits, class_depth=class_depth)
        return _converted(dataset, split)
    depth = 1 if class_depth is None else class_depth
    try:
        scan = list_tree(path, depth, allow_empty=allow_empty is not None)
    except SourceError as error:
        if isinstance(error.__cause__, OSError):  # who knows what is there
            raise
        if not path.exists():
            if is_converted(path.parent):
                raise NothingFoundError(
                    f"{path}: does not exist; {path.parent} is a converted dataset: give that, and "
                    f"split={path.name!r}"
                ) from error
            raise NothingFoundError(
                f"{path}: does not exist; expected a tree of class folders with pictures, or what 'precache "
                f"convert' made of one{did_you_mean(path) or '; check the path'}"
            ) from error
        if isinstance(error, NothingFoundError):
            raise NothingFoundError(
                f"{error}; nor is it what 'precache convert' has finished (no {MANIFEST_NAME})"
            ) from error
        raise
    for warning in scan.warnings:
        _LOGGER.warning("%s", printable(warning))
    if allow_empty is False:
        filled = set(np.unique(scan.samples.labels).tolist())
        empty = [repr(name) for label, name in enumerate(scan.classes) if label not in filled]
        if empty:
            raise NothingFoundError(
                f"{path}: class folders without a picture: {abridge(empty)}; remove them, or give "
                f"allow_empty=True"
            )
    return _raw(scan, split, splits, split_seed, depth, skip_rejected=skip_rejected)


def _check_of_raw_trees(dataset: ConvertedDataset, **given: object) -> None:
    """SettingError where a setting is given that a conversion has decided."""
    for name, value in given.items():
        if value is not None:
            raise SettingError(
                f"{name} {value!r}: {dataset.place} is converted, with the splits "
                f"{', '.join(sorted(dataset.manifest.shards.split_names))} and its classes; leave it out, or "
                f"convert again with {flag_name(name)}"
            )


def _spelled(split: str, names: Sequence[str]) -> str:
    """The one of `names` that `split` is another spelling of; itself where there is none."""
    other = split_of(str(split))
    return split if split in names or other not in names else str(other)


def _converted(dataset: ConvertedDataset, split: str) -> SplitData:
    split = _spelled(split, dataset.manifest.shards.split_names)
    shards = dataset.manifest.split_shards(split)
    if dataset.manifest.split_samples[split] == 0:
        raise DatasetError(
            f"{dataset.place}: updates have removed all of split {split!r}; choose another split"
        )
    index = dataset.read_index(split, removed=True)
    all_statistics = dataset.manifest.statistics
    statistics = all_statistics.get("train", all_statistics.get(split))
    data = SplitData(
        path=dataset.place,
        kind=dataset.manifest.recipe.format,
        index=index,
        shard_samples=shards.samples,
        files=tuple(f"{dataset.path}/{shards.file_name(number)}" for number in range(len(shards))),
        shard_bytes=shards.bytes[:, 0],
        shards=shards,
        classes=dataset.manifest.classes,
        size=dataset.manifest.recipe.size,
        digest=dataset.digest,
        channels=CHANNELS[dataset.manifest.recipe.channels],
        dtype=np.dtype(dataset.manifest.recipe.dtype),
        statistics=None if statistics is None else (statistics.mean, statistics.std),
        rendering=dataset.manifest.recipe.rendering,
        boxes=str(dataset.manifest.source_options.get("boxes", "")),
        remote=None if dataset.mirror is None else RemoteShards(dataset.mirror, shards),
        folder=dataset.folder,
    )
    return data.select(np.flatnonzero(index.served)) if split in dataset.manifest.removed else data


def _raw(
    scan: Scan,
    split: str,
    splits: str | os.PathLike[str] | None,
    split_seed: int,
    class_depth: int,
    *,
    skip_rejected: bool,
) -> SplitData:
    """A split as `precache convert` makes it of the same tree."""
    recipe = Recipe(format="shards", splits=DEFAULT_SPLITS, seed=split_seed)
    if splits is not None and is_list_file(splits):
        scan, recipe = apply_list(scan, recipe, splits)
    elif splits is not None:
        recipe = replace(recipe, splits=splits)  # type: ignore[arg-type]  # raises for what is no text
    rows_of = dict(split_rows(scan.samples, recipe))
    split = _spelled(split, list(rows_of))
    check_choice("split", split, rows_of)
    samples, rows = scan.samples, rows_of[split]
    columns = {"ids": samples.ids, "labels": samples.labels}
    data = SplitData(
        path=scan.root,
        kind=RAW,
        index=SampleIndex({name: Column(values[rows]) for name, values in columns.items()}),
        shard_samples=np.array([len(rows)]),
        files=samples.list_paths(f"{scan.root}/", rows),
        shard_bytes=np.empty(0, np.int64),
        shards=None,
        classes=scan.classes,
        size=DEFAULT_SIZE,
        digest=hashlib.sha256(f"raw {scan.digest}".encode()).hexdigest(),
        class_depth=class_depth,
    )
    rejected = _find_rejected(scan, rows) if skip_rejected else ()
    if splits is None and not len(rejected):
        return data
    return data.select(
        np.delete(np.arange(len(rows)), rejected)
    )  # known by its samples, not by the tree alone


def _find_rejected(scan: Scan, rows: Positions) -> Positions:
    """Which of `rows` the list beside the tree names; SourceError if it is all of them."""
    path = default_list(scan.root)
    if not path.exists():
        return np.empty(0, np.int64)
    rejected = np.flatnonzero(np.isin(rows, rejected_rows(scan, read_list(path))))
    if len(rejected) == len(rows):
        raise SourceError(
            f"{path}: lists all {len(rows):,} pictures of the split; repair them and run again: "
            f"{shell_command('precache check', scan.root)}"
        )
    if len(rejected):
        _LOGGER.warning(
            "%s: %d of %d pictures are left out, see %s",
            *(printable(str(scan.root)), len(rejected), len(rows), printable(str(path))),
        )
    return rejected


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Some samples of a shard: where few of one are needed, these alone are fetched, each by its range.

    A part lies in the cache as a file of the shard's size, with holes where nothing was fetched; its name
    tells what was asked for. So later epochs, other ranks and runs find it there, and few readers need know.

    Attributes:
        prefix: of the name in the cache.
        whole: the split as it is stored.
        rows: int64 [n], of the shard, ascending.
    """

    prefix: str
    whole: SplitData
    number: int
    rows: Positions

    def ranges(self) -> list[tuple[int, int]]:
        """First byte and number of bytes of what is fetched: that of the samples first, in order."""
        places = self._places()
        ranges: list[tuple[int, int]] = places[self.rows].tolist()
        if self.whole.kind == "shards":
            end = int(places[-1].sum())
            ranges += [(0, DATA_START), (end, int(self.whole.shard_bytes[self.number]) - end)]
        return ranges

    def is_right(self, number: int, content: bytes) -> bool:
        """Whether what was fetched of range `number` is what was written; of all but samples not known."""
        if number >= len(self.rows):
            return True
        try:
            sample = FORMATS[self.whole.kind].read_sample(content)
        except ValueError:
            return False
        position = int(self.whole.shard_starts[self.number] + self.rows[number])
        return not sample.damage and checksum_of(sample.data) == self.whole.index["checksums"][position]

    def read(self, path: Path) -> dict[int, StoredSample]:
        """Row -> sample, of the part at `path`, of a format that holds JPEGs.

        Raises:
            DatasetError: something else lies where the index says.
        """
        samples, whole = {}, self.whole
        first = int(whole.shard_starts[self.number])
        for row, place in zip(self.rows.tolist(), self._places()[self.rows], strict=True):
            sample, at = whole.read_sample(first + row, path, place), first + row
            samples[row] = replace(sample, id=int(whole.ids[at]), label=int(whole.labels[at]))
        return samples

    def _places(self) -> Positions:
        """int64 [samples of the shard, 2], where they lie: first byte and bytes."""
        if self.whole.kind != "shards":
            return FORMATS[self.whole.kind].find_samples(Path(self.whole.files[self.number]))
        shapes = self.whole.shapes_at(self.whole.shard_positions(self.number))
        sizes = shapes.prod(axis=1) * self.whole.pixel_bytes
        return np.stack((picture_starts(shapes, self.whole.pixel_bytes), sizes), axis=1)


def with_parts(data: SplitData, wanted: npt.NDArray[np.bool_] | None) -> SplitData:
    """`data`, but at a URL the shards that hold few of its samples are fetched in part.

    Args:
        wanted: bool [n], the samples that an epoch may ask for; None: all of them.
    """
    remote = data.remote
    if remote is None or "mask_checksums" in data.index:
        return data
    if wanted is None and data.part_of is None:  # all of each shard
        return data
    positions = np.arange(len(data)) if wanted is None else np.flatnonzero(wanted)
    numbers, rows = data.locate(positions)
    counts = np.bincount(numbers, minlength=len(data.files))
    few = (counts > 0) & (counts * _FEW <= data.whole.shard_samples)
    key = hashlib.sha256(data.ids[positions].tobytes()).hexdigest()[:16]
    rows_of = np.split(rows, np.cumsum(counts)[:-1])  # positions ascend, and so do the shards
    files, parts = list(data.files), {}
    for number in np.flatnonzero(few).tolist():
        path = Path(files[number])
        if not path.exists():
            files[number] = str(path.with_name(f"{key}-{path.name}"))
            parts[number] = ShardPart(f"{key}-", data.whole, number, rows_of[number])
    return replace(data, files=tuple(files), remote=replace(remote, parts=parts))
