"""Open a split of a raw tree, a converted folder or a URL as `SplitData`, which looks the same for all.

`loaders.batch` says what ids, positions, rows and slots of samples are.
"""

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import le
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.order import WINDOW_SHARDS, Weights
from loaders.settings import Backend
from loaders.threads import stop_check
from precache.dataset.columns import Column, Ints, nonnegative_positions
from precache.dataset.converted import ConvertedDataset, OpenedFolder, open_dataset
from precache.dataset.index import SampleIndex
from precache.dataset.manifest import MANIFEST_NAME, is_converted
from precache.dataset.shard_table import ShardTable
from precache.dataset.statistics import ChannelStatistics
from precache.dataset.unfinished import unfinished_error
from precache.engines.cpus import count_local_ranks
from precache.errors import (
    DatasetError,
    ImageError,
    NothingFoundError,
    SampleError,
    SettingError,
    SourceError,
    did_you_mean,
    printable,
    shell_command,
    similar_name,
)
from precache.formats import FORMATS, StoredSample
from precache.pictures.images import CHANNELS, Size, sides, size_text
from precache.pictures.kinds import IMAGE_FOLDER_EXTENSIONS
from precache.pictures.reading import read_with_retries
from precache.plan import split_rows
from precache.recipe import DEFAULT_SPLITS, Recipe, flag_name
from precache.reporting import abridge
from precache.sources.base import Scan
from precache.sources.rejected_list import default_list_path, read_list, rejected_rows
from precache.sources.splits import apply_list, is_list_file
from precache.sources.tree import list_tree, split_of
from precache.storage import checksum_of, read_regular_part
from precache.storage.shard_cache import Cache, CachedFiles
from precache.storage.urls import Location, Url, locate

RAW = "raw"
"""Kind of data that is a raw tree; the other kinds are formats."""
_ALSO_READS: dict[str, tuple[str, ...]] = {
    "dali": ("webdataset", RAW),
    "pytorch": (RAW,),
    "synthetic": (RAW, *FORMATS),
}
READS: dict[str, tuple[str, ...]] = {
    backend: (
        *(kind for kind, form in FORMATS.items() if form.backend == backend),
        *_ALSO_READS.get(backend, ()),
    )
    for backend in get_args(Backend)
    if backend != "auto"
}
"""Kinds of data that each backend reads; the first is the one it is made for."""
DEFAULT_SIZE = 224
"""Side in pixels of the served pictures, unless another size is given or less is stored."""
T = TypeVar("T")
_MAX_ROUNDING = 0.5  # a whole number becomes another one
_MAX_PART_SHARE = 1 / 4  # a shard at a URL is fetched in part if at most this share of its samples is needed
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFiles:
    """Files of a dataset: where they lie, and how its shards come onto this machine.

    Attributes:
        path: the folder, or the URL.
        digest: hex digest that identifies the dataset; for a raw tree that of the names of its pictures,
            since their sizes are not read.
        highest_id: highest id of its pictures, those of other splits and rejected ones included.
        shards: shards of the split, in stored order; None for a raw tree.
        folder: the opened folder of a converted dataset; None for a raw tree and at a URL.
        downloads: fetches the files of a dataset at a URL, and keeps them in a cache; else None.
        class_depth: how deep the class folders of a raw tree lie.
    """

    path: Location
    digest: str
    highest_id: int
    shards: ShardTable | None = None
    folder: OpenedFolder | None = None
    downloads: CachedFiles | None = None
    class_depth: int = 1

    def hold(
        self,
        number: int,
        part: "ShardPart | None",
        *,
        check: Callable[[], None] | None = None,
    ) -> ExitStack:
        """Fetch shard `number` unless it is here, and keep it until the returned stack is closed.

        Args:
            part: samples of it to fetch alone; None for the whole shard.
            check: called by several threads during the fetch, which ends with what it raises. Default: a
                function that raises Ending if the calling thread is to end.

        Raises:
            StorageError: it cannot be fetched.
        """
        with ExitStack() as stack:
            if self.downloads is not None:
                assert self.shards is not None
                check = check or stop_check()
                stack.enter_context(self.downloads.open_file(self.shards[number].files[0], check, part))
            return stack.pop_all()

    def forget(self, number: int, part: "ShardPart | None") -> str:
        """Remove shard `number` from the cache, so that it is fetched again.

        Returns:
            Reason of the error for the sample that was damaged.
        """
        assert self.downloads is not None
        assert self.shards is not None
        for file in self.shards[number].files:
            self.downloads.forget(file.name)
            if part is not None:
                self.downloads.forget(f"{part.prefix}{file.name}")
        return (
            f"its bytes changed since they were fetched (checksum), so its shard was removed from the cache; "
            f"run again, and it is fetched from {self.downloads.url}"
        )


@dataclass(frozen=True, slots=True)
class SplitData:
    """Samples of one split, in stored order; of several datasets one behind the other.

    The index of a converted folder is mapped, so that its used pages are in memory once for all processes. If
    classes or a subset leave samples out, each of the others takes 8 bytes.

    Attributes:
        datasets: files of each dataset, whose shards follow one another.
        kind: `raw`, or the format of a converted folder.
        split: name of the split, as it is stored.
        index: index of the samples, see `precache.dataset.index`; ids and labels alone for a raw tree.
        shard_samples: int64 [shards], samples of each shard in stored order; a raw tree is one shard.
        files: paths of the shards, see `local_shard`, or of the pictures of a raw tree.
        shard_bytes: int64 [shards], sizes of the shards' files; empty for a raw tree.
        classes: class names.
        size: size of the stored pictures; if each has its own size, the side that they were fitted to, of
            several datasets the smallest one; DEFAULT_SIZE for a raw tree.
        channels: channels of the stored pictures; pictures of a raw tree become RGB.
        statistics: mean and standard deviation of each channel, of split `train` if there is one, else of
            this split; None if they are not known of all pictures.
        digest: hex digest that identifies the datasets and what is left out of them.
        parent: the split as it is stored, if this is a part of it, or has other ids or labels; else None.
        chosen: int64 [n], positions in `parent` of the samples of a part, whose number in each shard
            `shard_samples` then counts; None if no sample is left out.
        shard_parts: samples to fetch of the shards at a URL that are not fetched whole, by shard number.
        shard_starts: int64 [shards + 1], the position of each shard's first sample, and behind the last one.
        first_shards: int64 [datasets], number of each dataset's first shard.
    """

    datasets: tuple[DatasetFiles, ...]
    kind: str
    split: str
    index: SampleIndex
    shard_samples: Ints
    files: Sequence[str]
    shard_bytes: Ints
    classes: tuple[str, ...]
    size: Size
    digest: str
    channels: int = 3
    statistics: ChannelStatistics | None = None
    parent: "SplitData | None" = field(default=None, repr=False, compare=False)
    chosen: Positions | None = field(default=None, repr=False, compare=False)
    shard_parts: "Mapping[int, ShardPart]" = field(default_factory=dict, repr=False, compare=False)
    shard_starts: Positions = field(init=False, repr=False, compare=False)
    first_shards: Ints = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = np.concatenate(([0], np.cumsum(self.shard_samples, dtype=np.int64)))
        object.__setattr__(self, "shard_starts", starts)
        counts = [1 if dataset.shards is None else len(dataset.shards) for dataset in self.datasets]
        object.__setattr__(self, "first_shards", np.cumsum([0, *counts[:-1]]))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def path(self) -> Location | str:
        """Folder or URL of the dataset, for messages; those of several with ' + ' between them."""
        if len(self.datasets) == 1:
            return self.datasets[0].path
        return " + ".join(str(dataset.path) for dataset in self.datasets)

    @property
    def download_cache(self) -> Cache | None:
        """Cache that shards at a URL are fetched into; None if all shards lie on this machine."""
        for dataset in self.datasets:
            if dataset.downloads is not None:
                return dataset.downloads.cache
        return None

    @property
    def ids(self) -> Column:
        """Column int64 [n], the samples' ids, by which they are known for good."""
        return self.index["ids"]

    @property
    def labels(self) -> Column:
        """Column int64 [n], the samples' classes; -1 for a sample that has not exactly one class."""
        return self.index["labels"]

    @property
    def shapes(self) -> Column | None:
        """Column int32 [n, 2], height and width of each stored picture; None if all have `size`."""
        return self.index.get("shapes")

    def find_shard(self, number: int) -> tuple[DatasetFiles, int]:
        """Return the dataset that shard `number` belongs to, and the shard's number in it."""
        dataset = int(np.searchsorted(self.first_shards, number, side="right")) - 1
        return self.datasets[dataset], number - int(self.first_shards[dataset])

    def hold(self, number: int, *, check: Callable[[], None] | None = None) -> ExitStack:
        """Fetch shard `number` unless it is here, see `DatasetFiles.hold`."""
        dataset, own_number = self.find_shard(number)
        return dataset.hold(own_number, self.shard_parts.get(number), check=check)

    def forget(self, number: int) -> str:
        """Remove shard `number`, one at a URL, from the cache; returns as `DatasetFiles.forget`."""
        dataset, own_number = self.find_shard(number)
        return dataset.forget(own_number, self.shard_parts.get(number))

    @contextmanager
    def local_shard(self, number: int) -> Iterator[Path]:
        """Yield the path of shard `number` on this machine, where it stays until the end of the block.

        A shard at a URL is fetched first, see `DatasetFiles.hold`.

        Raises:
            StorageError: it cannot be fetched.
            DatasetError: the dataset was replaced while its files were read.
        """
        folder = self.find_shard(number)[0].folder
        with (
            self.hold(number),
            nullcontext() if folder is None else folder.check_unchanged(),
        ):
            yield Path(self.files[number])

    def read(self, number: int, reader: Callable[[Path], T]) -> T:
        """Return `reader(path)` for shard `number`; at a URL, fetch it again once if it is damaged.

        Raises:
            DatasetError: `reader` raises it; for a shard at a URL, the second time.
        """
        try:
            with self.local_shard(number) as path:
                return reader(path)
        except DatasetError:
            if self.find_shard(number)[0].downloads is None:
                raise
        self.forget(number)
        with self.local_shard(number) as path:
            return reader(path)

    def verify_remedy(self, number: int) -> str:
        """Return the remedy for a damaged shard: the command that verifies its dataset."""
        return f"run: {shell_command('precache verify', self.find_shard(number)[0].path)}"

    def read_sample(self, position: int, path: Path) -> StoredSample:
        """Read the sample at `position` from its shard at `path`, without comparing its checksum.

        Raises:
            SampleError: something else lies where the index says.
        """
        start, count = self.index.byte_ranges[position].tolist()
        try:
            content = read_with_retries(lambda: read_regular_part(path, start, count), str(path))
            sample = FORMATS[self.kind].read_sample(content)
        except ValueError as error:
            problem = f"not where its index says ({error})"
        else:
            # -1: the format stores no id beside the sample
            if sample.id not in (-1, *self.stored_ids(np.array([position]))):
                problem = f"its index points to sample {sample.id}"
            elif isinstance(sample.data, bytes) or sample.data.size == self._pixels_bytes(position):
                return sample
            else:
                problem = f"its index points to {sample.data.size:,} bytes"
        misplaced = self.index.error(position, self.file_at(position), problem)
        remedy = self.verify_remedy(int(self.locate(np.array([position]))[0][0]))
        raise SampleError(misplaced.path, misplaced.reason, remedy=remedy)

    def _pixels_bytes(self, position: int) -> int:
        """Return the bytes of the pixels of the picture at `position`."""
        return int(self.shapes_at(np.array([position])).prod()) * self.channels

    def stored_ids(self, positions: Positions) -> Ints:
        """Return the ids that the shards hold of the samples at `positions`, int64 [n]."""
        return self.whole.ids[self.positions_in_whole(positions)]  # type: ignore[no-any-return]

    def locate(self, positions: Positions) -> tuple[Ints, Ints]:
        """Return the shards' numbers and the rows in them, int64 [n] each, of the samples at `positions`."""
        if self.parent is not None:
            return self.parent.locate(self.positions_in_whole(positions))
        shards = np.searchsorted(self.shard_starts, positions, side="right") - 1
        return shards, positions - self.shard_starts[shards]

    def shard_positions(self, number: int) -> slice:
        """Return the positions of the samples of shard `number`."""
        return slice(int(self.shard_starts[number]), int(self.shard_starts[number + 1]))

    @property
    def whole(self) -> "SplitData":
        """Split of all samples that the shards hold, of which this may be a part."""
        return self if self.parent is None else self.parent

    def positions_in_whole(self, positions: Positions | slice) -> Positions:
        """Return the positions in `whole` of the samples at `positions`."""
        if self.chosen is not None:
            return self.chosen[positions]
        if isinstance(positions, slice):
            return np.arange(*positions.indices(len(self)))
        return nonnegative_positions(positions, len(self))

    def select(self, positions: Positions) -> "SplitData":
        """Return the samples at `positions` alone, in this order.

        The positions must ascend for a backend that reads shard by shard.
        """
        files = self.files
        if self.kind == RAW:
            files = tuple(files[position] for position in positions.tolist())
        digest = hashlib.sha256(self.digest.encode() + self.ids[positions].tobytes()).hexdigest()
        return replace(
            self,
            index=self.index.view_rows(positions),
            shard_samples=np.bincount(self.locate(positions)[0], minlength=len(self.shard_samples)),
            files=files,
            digest=digest,
            parent=self.whole,
            chosen=self.positions_in_whole(positions),
        )

    def relabel(self, classes: tuple[str, ...], new_labels: Ints) -> "SplitData":
        """Return the same samples with other classes: label i becomes new_labels[i], int64 [old classes]."""
        index = self.index.with_columns({"labels": Column(new_labels[self.labels[:]])})
        return replace(self, classes=classes, index=index, parent=self.whole)

    def file_at(self, position: int) -> str:
        """Return the file that holds the sample at `position`: its shard, or the picture itself."""
        if self.kind == RAW:
            return self.files[position]
        return self.files[int(self.locate(np.array([position]))[0][0])]

    def path_at(self, position: int) -> str:
        """Return the path of the picture at `position`, relative to the source tree, with forward slashes."""
        if self.kind == RAW:
            dataset, _ = self.find_shard(int(self.locate(np.array([position]))[0][0]))
            return os.path.relpath(self.files[position], str(dataset.path)).replace(os.sep, "/")
        return self.index.path(position)

    def path_of(self, sample_id: object) -> str:
        """Return the path of the picture of the sample with this id, as `path_at` does.

        Raises:
            SettingError: the split has no such sample.
        """
        if len(positions := np.flatnonzero(self.ids == sample_id)):
            return self.path_at(int(positions[0]))
        raise SettingError(f"sample {sample_id!r}: {self.path} has none of this id in this split")

    def targets(self) -> list[Any]:
        """Return each sample's label: a class, a list of classes, a number, or a list of numbers."""
        if (targets := self.index.targets) is None:
            return list(self.labels.tolist())
        return [targets.row_value(position) for position in range(len(targets))]

    def shapes_at(self, positions: Positions | slice) -> Ints:
        """Return height and width of the stored pictures at `positions`, int64 [n, 2]."""
        if self.shapes is not None:
            return self.shapes[positions].astype(np.int64)  # type: ignore[no-any-return]
        return np.broadcast_to(np.array(sides(self.size), np.int64), (len(self), 2))[positions]

    @property
    def has_varying_sizes(self) -> bool:
        """Whether each picture has its own size."""
        return self.kind == RAW or self.shapes is not None

    def crop_ratio(self, wanted: float, served: Size) -> float:
        """Return `wanted`, raised where needed so that the crop is not enlarged to `served`.

        It is a share of the shorter side; at most 1, even where all of the picture is enlarged.
        """
        if self.kind == RAW:
            return wanted
        return min(1.0, max(wanted, min(sides(served)) / min(sides(self.size))))

    def warn_if_smaller(self, needed: Size, served: Size, *, enlarged: bool = True) -> None:
        """Warn if fewer pixels are stored than are `needed` to serve `served`.

        Args:
            enlarged: whether the stored pixels are enlarged then; False: they get a black border.
        """
        if self.kind == RAW or all(map(le, sides(needed), sides(self.size))):
            return
        cut = "" if needed == served else f" is cut from {size_text(needed)}, and"
        result = "is enlarged from them, so it is blurred" if enlarged else "has black around them"
        warnings.warn(
            f"{self.path} stores {size_text(self.size)} pixels: size {size_text(served)}{cut} {result}; "
            f"convert with --size {size_text(needed)}, or build with a smaller size",
            stacklevel=2,
        )

    def warn_if_rounded(self) -> None:
        """Warn if numbers to predict are too large for the float32 in which batches have them."""
        targets = self.index.targets
        if targets is None or self.classes:
            return
        values = targets.values
        with np.errstate(over="ignore"):  # a value beyond float32 becomes infinite
            rounded = values.astype(np.float32)
            wrong = np.flatnonzero(np.abs(values - rounded) >= _MAX_ROUNDING)
        if len(wrong):
            example = f"{values.flat[wrong[0]]:,.12g} becomes {rounded.flat[wrong[0]]:,.12g}"
            warnings.warn(
                f"{self.path}: labels are served as float32, which rounds {len(wrong):,} of these numbers: "
                f"{example}; subtract a constant from them, or scale them, and convert again "
                f"(loader.dataset.targets has them as they are)",
                stacklevel=4,
            )

    def window_shards(self, memory_bytes: int | None) -> int:
        """Return the number of shards in a window, two of which (served and next) fit into `memory_bytes`.

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
                    f"{memory_bytes:,}",
                    remedy="give at least that, or convert again with smaller --shard-bytes",
                )
            return memory_bytes // (2 * largest)
        if self.download_cache is not None:
            self._check_cache_size(self.download_cache, WINDOW_SHARDS)
        return WINDOW_SHARDS

    def max_shards_ahead(self, window_shards: int) -> int:
        """Return how many shards may be fetched beyond two windows, the one being served and the next.

        Args:
            window_shards: number of shards in a window.

        Raises:
            SettingError: the cache is too small for two windows.
        """
        cache = self.download_cache
        if cache is None or cache.bytes is None:
            return window_shards
        self._check_cache_size(cache, window_shards)
        free_bytes = max(0, cache.bytes // count_local_ranks() - self._windows_bytes(window_shards))
        return min(window_shards, free_bytes // int(self.shard_bytes.max()))

    def _check_cache_size(self, cache: Cache, window_shards: int) -> None:
        """Raise SettingError if the cache is too small for two windows."""
        windows_bytes = self._windows_bytes(window_shards)
        if cache.bytes is not None and cache.bytes < windows_bytes:
            raise SettingError(
                f"cache_bytes is too small: needs {windows_bytes:,} for two windows of shards of "
                f"{self.path}, got {cache.bytes:,}",
                remedy=f"raise it, or pass memory_bytes={cache.bytes} for smaller windows",
            )

    def _windows_bytes(self, window_shards: int) -> int:
        """Return the number of bytes that two windows take at most."""
        return 2 * min(window_shards, len(self.files)) * int(self.shard_bytes.max())


def depth_flags(class_depth: int) -> tuple[str, ...]:
    """Return the command-line flags for a tree whose class folders lie at this depth."""
    return () if class_depth == 1 else ("--class-depth", str(class_depth))


def picture_remedy(error: ImageError, root: Location | str, class_depth: int, advice: str) -> str:
    """Return the remedy for a picture of the raw tree at `root` that cannot be read.

    It is that of `error`, then `advice`, then the command that lists all such pictures.
    """
    command = shell_command("precache check", root, *depth_flags(class_depth))
    remedy = f"{advice}; to list all such pictures, run: {command}"
    return f"{error.remedy}; {remedy}" if error.remedy else remedy


def served_size(data: SplitData, size: Size | None) -> Size:
    """Return `size`; if it is None, the stored size, a single side as at most DEFAULT_SIZE."""
    if size is not None:
        return size
    return data.size if isinstance(data.size, tuple) else min(data.size, DEFAULT_SIZE)


def choose_backend(backend: str, kind: str, path: Location | str) -> str:
    """Return the name of the backend to read `path` with: `backend`, or for `auto` the default of its kind.

    Args:
        kind: the kind of data at `path`: `raw` or a format.

    Raises:
        DatasetError: the backend does not read this kind.
    """
    default = "pytorch" if kind == RAW else FORMATS[kind].backend
    if backend == "auto":
        backend = default
    if kind not in READS[backend]:
        readable = " or ".join(_kind_phrase(readable) for readable in READS[backend])
        raise DatasetError(
            f"holds {_kind_phrase(kind)}, backend {backend!r} reads {readable}",
            path=path,
            remedy=f"use backend {default!r} for it, or name another folder",
        )
    return backend


def _kind_phrase(kind: str) -> str:
    return "a raw image tree" if kind == RAW else f"format {kind!r}"


def open_split(
    path: str | os.PathLike[str] | Url,
    split: str,
    *,
    splits: str | os.PathLike[str] | None = None,
    split_seed: int = 0,
    class_depth: int | None = None,
    empty_classes: Literal["leave-out", "keep", "refuse"] = "leave-out",
    skip_rejected: bool = False,
    image_folder_only: bool = False,
    download_cache: Cache | None = None,
    may_lack: bool = False,
) -> SplitData:
    """Open `split` of the raw tree or converted folder at `path`, or of the converted dataset at a URL.

    Args:
        path: the tree, the folder or the URL.
        split: name of the split, or another spelling that `precache.sources.tree` knows: valid for val.
        splits: shares of a raw tree's splits, or a list file, as for `precache convert --splits`.
        split_seed: seed that draws the splits, `Recipe.seed` of such a conversion.
        class_depth: how deep the class folders of a raw tree lie, see `list_tree`; default 1.
        empty_classes: `leave-out`: class folders of a raw tree without a picture are no classes, and a
            warning names them; `keep`: they are classes; `refuse`: they raise.
        skip_rejected: whether to leave out the files that the tree's list of `precache check` names, if it
            has one and the files have not changed since; a converted folder holds none of them anyway.
        image_folder_only: whether to leave out the pictures of a tree that torchvision's ImageFolder does not
            list, because of their extensions; also of a tree that was converted.
        download_cache: cache for the files of a URL.
        may_lack: whether what was converted `--without` other datasets may lack the split, because none of
            its few pictures fell into it; it has no samples then.

    Raises:
        NothingFoundError: there is neither at `path`; or a class without a picture, see `empty_classes`.
        SourceError, DatasetError: the data cannot be read, or a list file is malformed.
        SettingError: there is no such split; or the data is converted, and a setting is for raw trees.
    """
    path = locate(path)
    if isinstance(path, Url) or is_converted(path):
        dataset = open_dataset(path, download_cache) if isinstance(path, Url) else open_dataset(path)
        _check_no_tree_setting("splits", splits, dataset)
        _check_no_tree_setting("class_depth", class_depth, dataset)
        data = _open_converted(dataset, split, may_lack)
        if image_folder_only and dataset.manifest.is_tree:
            data = _select_listed(data, data.index["paths"].ends_with(IMAGE_FOLDER_EXTENSIONS))
        return data
    if (unfinished := unfinished_error(path)) is not None:
        raise unfinished
    depth = 1 if class_depth is None else class_depth
    try:
        scan = list_tree(path, depth, allow_empty=empty_classes != "leave-out")
    except NothingFoundError as error:
        reason = f"{error.args[0]}; {error.remedy}" if error.remedy else error.args[0]
        raise NothingFoundError(
            f"{reason}; nor is it what 'precache convert' has finished (no {MANIFEST_NAME})", path=error.path
        ) from error
    except SourceError as error:
        # With an OSError as its cause, the path may exist and be unreadable.
        if isinstance(error.__cause__, OSError) or path.exists():
            raise
        raise _missing_error(path) from error
    for warning in scan.warnings:
        _LOGGER.warning("%s", printable(warning))
    is_listed = np.ones(len(scan.samples), np.bool_)
    if image_folder_only:
        is_listed = scan.samples.path_column.ends_with(IMAGE_FOLDER_EXTENSIONS)
    if empty_classes == "refuse":
        filled = set(np.unique(scan.samples.labels[is_listed]).tolist())
        empty = [repr(name) for label, name in enumerate(scan.classes) if label not in filled]
        if empty:
            listed = " that ImageFolder lists" if image_folder_only else ""
            raise NothingFoundError(
                f"class folders without a picture{listed}: {abridge(empty)}",
                path=path,
                remedy="remove them, or give allow_empty=True",
            )
    data = _open_raw(scan, split, splits, split_seed, depth, skip_rejected=skip_rejected)
    return _select_listed(data, is_listed[data.ids[:]])  # an id is the rank in the scan


def _select_listed(data: SplitData, is_listed: npt.NDArray[np.bool_]) -> SplitData:
    """Return the samples that ImageFolder lists.

    Args:
        is_listed: bool [n], whether it lists each sample.

    Raises:
        NothingFoundError: it lists none of them.
    """
    if is_listed.all():
        return data
    if not is_listed.any():
        raise NothingFoundError(
            f"has no picture that ImageFolder lists ({', '.join(IMAGE_FOLDER_EXTENSIONS)})",
            path=data.path,
            remedy="loaders.build serves the others, too",
        )
    return data.select(np.flatnonzero(is_listed))


def _missing_error(path: Path) -> NothingFoundError:
    """Return the error for a `path` that does not exist, which says what to give instead."""
    if is_converted(path.parent):
        return NothingFoundError(
            "does not exist",
            path=path,
            remedy=f"{path.parent} is a converted dataset: give that, and split={path.name!r}",
        )
    hint = did_you_mean(path)
    return NothingFoundError(
        "does not exist; expected a tree of class folders with pictures, or what 'precache convert' "
        f"made of one{hint}",
        path=path,
        remedy="" if hint else "check the path",
    )


def _check_no_tree_setting(name: str, value: object, dataset: ConvertedDataset) -> None:
    """Raise SettingError if a setting for raw trees is given for a converted dataset."""
    if value is not None:
        raise SettingError(
            f"{name} {value!r}: {dataset.location} is converted, with the splits "
            f"{', '.join(sorted(dataset.manifest.shards.split_names))} and its classes",
            remedy=f"leave it out, or convert again with {flag_name(name)}",
        )


def _split_name(split: str, names: Sequence[str]) -> str:
    """Return the one of `names` that `split` is another spelling of; `split` itself if there is none."""
    if split in names:
        return split
    spelling = split_of(str(split))
    return split if spelling not in names else str(spelling)


def _open_converted(dataset: ConvertedDataset, split: str, may_lack: bool) -> SplitData:
    names = dataset.manifest.shards.split_names
    split = _split_name(split, names)
    if may_lack and split not in names and dataset.manifest.source_options.get("without"):
        return _open_converted(dataset, names[0], may_lack).select(np.empty(0, np.int64))
    shards = dataset.manifest.split_shards(split)
    index, statistics = dataset.read_index(split), dataset.manifest.statistics
    rejected_ids = [picture.id for picture in dataset.manifest.rejected]
    files = DatasetFiles(
        path=dataset.location,
        digest=dataset.digest,
        highest_id=max([int(index.columns["ids"].values.max()), *rejected_ids]),
        shards=shards,
        folder=dataset.folder,
        downloads=dataset.mirror,
    )
    return SplitData(
        datasets=(files,),
        kind=dataset.manifest.recipe.format,
        split=split,
        index=index,
        shard_samples=shards.samples,
        files=tuple(f"{dataset.path}/{shards.file_name(number)}" for number in range(len(shards))),
        shard_bytes=shards.bytes[:, 0],
        classes=dataset.manifest.classes,
        size=dataset.manifest.recipe.size,
        digest=dataset.digest,
        channels=CHANNELS[dataset.manifest.recipe.channels],
        statistics=statistics.get("train", statistics.get(split)),
    )


def _open_raw(
    scan: Scan,
    split: str,
    splits: str | os.PathLike[str] | None,
    split_seed: int,
    class_depth: int,
    *,
    skip_rejected: bool,
) -> SplitData:
    """Return a split of a raw tree, with the same samples as `precache convert` puts there."""
    digest = hashlib.sha256(f"raw {scan.digest}".encode()).hexdigest()
    tree = DatasetFiles(
        path=scan.root, digest=digest, highest_id=len(scan.samples) - 1, class_depth=class_depth
    )
    recipe = Recipe(format="shards", splits=DEFAULT_SPLITS, seed=split_seed)
    if splits is not None and is_list_file(splits):
        scan, recipe = apply_list(scan, recipe, splits)
    elif splits is not None:
        recipe = replace(recipe, splits=splits)  # type: ignore[arg-type]  # it raises if this is no str
    rows_by_split = dict(split_rows(scan.samples, recipe))
    split = _split_name(split, list(rows_by_split))
    if split not in rows_by_split:
        choices, hint = ", ".join(sorted(rows_by_split)), similar_name(split, rows_by_split)
        raise SettingError(
            f"unknown split {split!r} of {scan.root}; choose from: {choices}{hint}",
            remedy="for folders with other names give splits=FILE, a list with lines such as 'FOLDER,train'",
        )
    samples, rows = scan.samples, rows_by_split[split]
    columns = {"ids": samples.ids, "labels": samples.labels}
    data = SplitData(
        datasets=(tree,),
        kind=RAW,
        split=split,
        index=SampleIndex({name: Column(values[rows]) for name, values in columns.items()}),
        shard_samples=np.array([len(rows)]),
        files=samples.list_paths(f"{scan.root}/", rows),
        shard_bytes=np.empty(0, np.int64),
        classes=scan.classes,
        size=DEFAULT_SIZE,
        digest=digest,
    )
    rejected = _find_rejected(scan, rows) if skip_rejected else ()
    if splits is None and not len(rejected):
        return data
    # `select` makes a digest of the samples, since that of the tree does not tell the splits apart
    return data.select(np.delete(np.arange(len(rows)), rejected))


def _find_rejected(scan: Scan, rows: Ints) -> Positions:
    """Return the positions of the samples that the list of rejected files beside the tree names.

    Args:
        rows: int64 [n], rows of the split's samples in the scan.

    Raises:
        SourceError: it names all of them.
    """
    path = default_list_path(scan.root)
    if not os.path.exists(path):  # a name that is too long is none
        return np.empty(0, np.int64)
    rejected = np.flatnonzero(np.isin(rows, rejected_rows(scan, read_list(path))))
    if len(rejected) == len(rows):
        raise SourceError(
            f"lists all {len(rows):,} pictures of the split",
            path=path,
            remedy=f"repair them and run again: {shell_command('precache check', scan.root)}",
        )
    if len(rejected):
        _LOGGER.warning(
            "%s: %d of %d pictures are left out, see %s",
            printable(str(scan.root)),
            len(rejected),
            len(rows),
            printable(str(path)),
        )
    return rejected


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Few samples of a shard at a URL, which are fetched alone, each by its byte range.

    The part lies in the cache as a sparse file of the shard's size, whose name tells which samples it has, so
    that later epochs, other ranks and other runs find it, and readers read it like a whole shard.

    Attributes:
        prefix: prefix of the file's name in the cache.
        whole: the split as it is stored.
        number: number of the shard.
        rows: int64 [n], rows of the samples in the shard, ascending.
    """

    prefix: str
    whole: SplitData
    number: int
    rows: Ints

    def ranges(self) -> list[tuple[int, int]]:
        """Return first byte and number of bytes of each range to fetch, those of the samples first."""
        whole = self.whole
        of_shard = whole.index.byte_ranges[whole.shard_positions(self.number)]
        ranges: list[tuple[int, int]] = of_shard[self.rows].tolist()
        if FORMATS[whole.kind].index_suffix is None:  # what a reader needs beside the samples is in the shard
            start, end = int(of_shard[0, 0]), int(of_shard[-1].sum())
            ranges += [(0, start), (end, int(whole.shard_bytes[self.number]) - end)]
        return ranges

    def is_right(self, number: int, content: bytes) -> bool:
        """Return whether `content`, fetched for range `number`, is as it was written."""
        if number >= len(self.rows):  # no sample: there is no checksum
            return True
        try:
            sample = FORMATS[self.whole.kind].read_sample(content)
        except ValueError:
            return False
        position = int(self.whole.shard_starts[self.number] + self.rows[number])
        return not sample.damage and checksum_of(sample.data) == self.whole.index["checksums"][position]

    def read(self, path: Path) -> dict[int, StoredSample]:
        """Read the samples of the part at `path`, of a format that holds JPEGs, by their rows.

        Raises:
            DatasetError: something else lies where the index says.
        """
        samples, whole = {}, self.whole
        first = int(whole.shard_starts[self.number])
        for row in self.rows.tolist():
            position = first + row
            sample = whole.read_sample(position, path)
            samples[row] = replace(sample, id=int(whole.ids[position]), label=int(whole.labels[position]))
        return samples


def fetch_in_parts(data: SplitData, weights: Weights | None) -> SplitData:
    """Return `data` so that shards at a URL of which it needs few samples are fetched in part.

    Args:
        weights: float64 [n], relative probability of each sample in an epoch; None: each comes once.
    """
    if data.download_cache is None or not FORMATS[data.kind].has_byte_ranges:
        return data
    if weights is None and data.chosen is None:  # every shard is needed whole
        return data
    positions = np.arange(len(data)) if weights is None else np.flatnonzero(weights)
    numbers, rows = data.locate(positions)
    counts = np.bincount(numbers, minlength=len(data.files))
    is_part = (counts > 0) & (counts <= _MAX_PART_SHARE * data.whole.shard_samples)
    shard_rows = np.split(rows, np.cumsum(counts)[:-1])  # positions ascend, and so do the shards
    files, parts = list(data.files), {}
    for number in np.flatnonzero(is_part).tolist():
        path = Path(files[number])
        is_remote = data.find_shard(number)[0].downloads is not None
        if is_remote and not path.exists():  # else the whole shard is cached already
            key = hashlib.sha256(shard_rows[number].tobytes()).hexdigest()[:16]
            files[number] = str(path.with_name(f"{key}-{path.name}"))
            parts[number] = ShardPart(f"{key}-", data.whole, number, shard_rows[number])
    return replace(data, files=tuple(files), shard_parts=parts)
