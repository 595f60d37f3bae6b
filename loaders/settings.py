"""Settings of a loader, each checked once, and what `loaders.build` says to the names of other libraries."""

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, get_args, get_origin

import numpy as np
import numpy.typing as npt
import torch

from precache.engines.cpus import available_cpus, count_local_ranks, read_launcher
from precache.errors import SettingError, check_choice, check_range, is_number
from precache.pictures.images import MAX_SIZE, Size, check_size
from precache.recipe import DEFAULT_SPLITS, Recipe
from precache.sources.splits import is_list_file

# The names that settings take stand here alone, for type checkers and at runtime.
Backend: TypeAlias = Literal["auto", "dali", "pytorch", "shards", "synthetic", "webdataset"]
AugmentName: TypeAlias = Literal[
    "crop", "deit3", "dino", "eval", "simclr", "timm-a1", "timm-a2", "timm-a3", "torchvision", "train"
]
DTypeName: TypeAlias = Literal["bfloat16", "float16", "float32", "uint8"]
NormalizeName: TypeAlias = Literal["dataset", "imagenet"]
ShuffleName: TypeAlias = Literal["full", "window"]
Check: TypeAlias = Literal["always", "first-read", "never"]
CacheName: TypeAlias = Literal["device"]
Last: TypeAlias = Literal["drop", "pad", "partial"]

DType: TypeAlias = DTypeName | torch.dtype
Shuffle: TypeAlias = bool | ShuffleName
Count: TypeAlias = int | Literal["auto"]
Numbers: TypeAlias = float | Sequence[float] | npt.NDArray[Any] | torch.Tensor
Normalize: TypeAlias = NormalizeName | tuple[Numbers, Numbers] | None
Group = TypeVar("Group", "Serving", "Sampling", "Ranks", "Reading")
Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
CROP_RATIO = 0.875
"""Share of the shorter side that is served of the middle: 224 of 256, as ImageNet is validated."""
_MIN_VALUES = {"workers": 0, "threads": 1, "memory_bytes": 1, "cache_bytes": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Settings for reading pictures: workers, checksums, caches, memory, errors.

    Attributes:
        workers: number of processes that decode (backend `pytorch`; 0: none, see `threads`), or of threads
            that decode or copy (other backends). `"auto"`: one per CPU that this process may use, as
            `precache.engines.cpus` counts them: ranks of torchrun or srun share those of their machine.
        threads: number of threads that decode if `pytorch` has no worker processes; `"auto"` as above.
        check: when to compare samples of a converted folder with their checksums. `"first-read"`: until a
            sample was right once; `"always"`: whenever it is read, so that a crop is cut out of the whole
            sample; `"never"`. A damaged sample raises SampleError, which names file, id and source, at its
            batch; see `on_error`.
        cache: `"device"` keeps decoded pictures of one size in the memory of the GPU, so that from the second
            epoch on nothing is read or decoded; it leaves a tenth of what is free. If a split does not fit,
            its first samples in stored order are kept and the others are read each time. Order and pixels do
            not change. None: no cache; the system caches the files of backend `shards`, which are decoded
            already.
        memory_bytes: bound on the bytes of a converted folder that sequential reading (`shuffle="window"` or
            False) holds at a time. A window is as many shards as fit twice, since the next window is read
            while one is served. Backend `shards` also keeps the system's cache of the files within the
            bound. Default: windows of 8 shards, and no bound on the system's cache.
        on_error: what to do with a picture that cannot be decoded, or a sample of a converted folder that is
            not as it was written. `"raise"`: raise its ImageError. `"skip"`: leave it out. Pictures of a raw
            tree that the list of `precache check` names are then left out from the start; any other is left
            out of its batch, which gets shorter, with one warning per file. A batch of which nothing is left
            raises, and so does a shard that is missing or truncated.
        cache_dir: folder on this machine that keeps shards fetched from URLs, shared by all its processes;
            default PRECACHE_CACHE_DIR, or ~/.cache/precache.
        cache_bytes: bound on the bytes in `cache_dir`. The least recently used shards are removed first; of
            the dataset that is being read, those read last, so that a dataset that does not fit keeps a part
            for the next epoch. Shards in use stay even beyond the bound. Default: what leaves a twentieth of
            the disk free, at most 10 GiB.
        engine: who reads, decodes and crops. `"local"`: this process; `pytorch` has worker processes, the
            others threads. `"processes"`: worker processes for backends `shards` and `webdataset`, too:
            a training that launches its operations from Python then takes no turns with threads at the
            interpreter's lock, and each batch is copied once more; not at a URL or with `memory_bytes`.
            `"ray"`: the nodes of a running Ray cluster; `path` must then be on storage that all of them see,
            and `workers` is how many of their CPUs work for this rank. Work on a device stays in this
            process. `"auto"`: `"processes"` for these two backends where `device` is a GPU, or `augment` does
            more on the CPU than crop and mirror, unless `workers` is 0, `path` a URL, or whole shards are to
            be read (`memory_bytes`, `shuffle="window"`); else `"local"`.

    Raises:
        SettingError: a value is out of range or unknown.
    """

    workers: Count = "auto"
    threads: Count = "auto"
    check: Check = "first-read"
    cache: CacheName | None = None
    memory_bytes: int | None = None
    on_error: Literal["raise", "skip"] = "raise"
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    engine: Literal["auto", "local", "processes", "ray"] = "auto"

    def __post_init__(self) -> None:
        check_names(self)
        if self.cache is not None:
            check_choice("cache", self.cache, get_args(CacheName))
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            if name in _MIN_VALUES and value != setting.default:
                object.__setattr__(self, name, check_range(name, value, _MIN_VALUES[name]))
        if self.engine == "ray" and self.workers in ("auto", 0):
            raise SettingError(
                f"workers {self.workers!r} with engine 'ray': give how many CPUs of the cluster decode for "
                f"this rank, as Reading(engine='ray', workers=16)"
            )
        if self.engine == "processes" and self.workers == 0:
            raise SettingError("workers 0 with engine 'processes'", remedy="leave one of the two out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Settings for showing pictures to the model.

    Attributes:
        crop_ratio: `size` divided by what the shorter side is resized to before the middle is cut out,
            without augmentation or for an `augment` function. 0.875 is torchvision's `Resize(256)` and
            `CenterCrop(224)`, whatever size is stored; timm calls it crop_pct, and rounds the larger
            side down, too. If `size` is not given and squares of fewer than 256 pixels are stored, a larger
            share is served, up to all, instead of enlarging them.

    Raises:
        SettingError: a value is out of range or unknown.
    """

    crop_ratio: float = CROP_RATIO

    def __post_init__(self) -> None:
        if not is_number(self.crop_ratio) or not 0.01 <= self.crop_ratio <= 1:
            raise SettingError(f"crop_ratio must be from 0.01 to 1, got {self.crop_ratio!r}")
        object.__setattr__(self, "crop_ratio", float(self.crop_ratio))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampling:
    """Settings for choosing samples: which are served, and how often.

    `loaders.build` compares all but `last` with the data.

    Attributes:
        classes: names of the classes to serve; labels stay those of the whole dataset.
        subset: positions of the samples to serve, in `loader.dataset` of a loader without `sampling`, as
            torch's Subset takes them; their order does not matter. From ids:
            `np.flatnonzero(np.isin(loader.dataset.ids, ids))`.
        weights: relative probability of each sample, in the order of `loader.dataset.targets` and `.ids`; or
            `"balanced"`, every class equally likely. An epoch draws as many samples as it would have without
            weights, with replacement: a sample may come several times, even in one batch, and is augmented
            anew each time.
        last: what to do with the samples that do not fill a batch at the end of an epoch. `"partial"`: divide
            them and the last whole batch into two batches of equal size, give or take a sample, on all ranks;
            `"pad"`: fill the last batch up with samples served before; `"drop"`: leave them out. Every rank
            serves as many batches. If a rank would get no sample (more ranks than samples, batches of one),
            `"partial"` fills up, too; `batch.padding` says which samples are such repeats.

    Raises:
        SettingError: `last` is unknown.
    """

    classes: Iterable[str] | None = None
    subset: npt.ArrayLike | None = None
    weights: str | npt.ArrayLike | None = None
    last: Last = "partial"

    def __post_init__(self) -> None:
        check_names(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Settings for dividing each epoch among processes: each sample is served by one of them.

    Attributes:
        rank: number of this process, from 0; give it with `world_size`, or neither of them. Default: that of
            `torch.distributed` if it is initialised, else of Ray Train, else 0.
        world_size: number of processes; default as for `rank`, else 1.
        per_node: number of processes on each node; their ranks follow one another. If a converted dataset is
            read shard by shard (shuffle "window" or False), each node reads its own shards. Default: as many
            as torchrun runs, if that is the same number on each node; else all ranks count as one node.

    Raises:
        SettingError: `rank` or `world_size` is given alone, or a value is out of range.
    """

    rank: int | None = None
    world_size: int | None = None
    per_node: int | None = None

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise SettingError("rank and world_size belong together; give both or neither")
        if self.rank is not None and self.world_size is not None:
            world_size = check_range("world_size", self.world_size, 1)
            object.__setattr__(self, "world_size", world_size)
            object.__setattr__(self, "rank", check_range("rank", self.rank, 0, world_size - 1))
        if self.per_node is not None:
            object.__setattr__(self, "per_node", check_range("per_node", self.per_node, 1))


GROUPS = {
    setting.name: f"{name}=loaders.{group.__name__}({setting.name}=...)"
    for name, group in (("reading", Reading), ("serving", Serving), ("sampling", Sampling), ("ranks", Ranks))
    for setting in fields(group)
}
"""Setting of one of the dataclasses above -> how it is given to `loaders.build`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSpec:
    """Settings of a loader, checked; those not listed are the arguments of `loaders.build`.

    Attributes:
        rank, world_size, nodes: number of this process, of all, and of machines, see `Ranks`.
        served: size that is served unless `augment` has or returns another; 0 before the data is opened.
        workers: `reading.workers` as a number; that of this machine if the engine is `"ray"`.
        threads: `reading.threads` as a number.
    """

    path: Any
    batch_size: int
    split: str
    shuffle: Shuffle
    seed: int
    size: Size | None
    device: torch.device
    augment: Any = field(compare=False)
    dtype: torch.dtype
    normalize: Normalize
    backend: Backend
    serving: Serving
    sampling: Sampling = field(compare=False)
    rank: int
    world_size: int
    nodes: int
    reading: Reading
    precache: str | os.PathLike[str] | None
    recipe: Recipe
    splits: str | os.PathLike[str] | None
    class_depth: int | None
    served: Size = 0
    workers: int = field(init=False)
    threads: int = field(init=False)

    def __post_init__(self) -> None:
        check_names(self)
        object.__setattr__(self, "batch_size", check_range("batch_size", self.batch_size, 1))
        object.__setattr__(self, "seed", check_range("seed", self.seed, 0, 2**63 - 1))
        if self.size is not None:
            object.__setattr__(self, "size", check_size("size", self.size, MAX_SIZE))
        if isinstance(self.shuffle, np.bool_):
            object.__setattr__(self, "shuffle", bool(self.shuffle))
        if not isinstance(self.shuffle, bool):
            check_choice("shuffle", self.shuffle, get_args(ShuffleName))
        check_normalize(self.normalize, self.dtype)
        if self.reading.cache is not None and self.device.type != "cuda":
            raise SettingError(
                f"cache 'device' is the memory of a GPU, and device is {str(self.device)!r}",
                remedy="leave it out: main memory keeps the files of 'precache convert --format shards'",
            )
        workers = "auto" if self.reading.engine == "ray" else self.reading.workers
        for name, count in (("workers", workers), ("threads", self.reading.threads)):
            object.__setattr__(self, name, available_cpus() if count == "auto" else count)


def check_names(settings: Any) -> None:
    """Raise SettingError if a field of the dataclass `settings` is none of the names that its type lists."""
    for setting in fields(settings):
        if get_origin(setting.type) is Literal:
            check_choice(setting.name, getattr(settings, setting.name), get_args(setting.type))


def as_floats(numbers: Numbers) -> tuple[float, ...]:
    """Return a number, or a sequence or array of numbers, as a tuple of floats.

    Raises:
        TypeError, ValueError: it is something else.
    """
    return tuple(map(float, np.asarray(numbers, object).ravel()))


def find_ranks(ranks: Ranks) -> tuple[int, int, int]:
    """Return the rank, the world size and the number of nodes.

    Rank and world size are those of `ranks`, else of `torch.distributed` or Ray Train, else 0 and 1. The
    number of nodes follows from `ranks.per_node`, else from torchrun's environment, else it is 1.

    Raises:
        SettingError: `per_node` does not divide the world size.
    """
    rank, world_size = _find_rank(ranks)
    if ranks.per_node is not None:
        if world_size % ranks.per_node:
            raise SettingError(
                f"per_node {ranks.per_node} does not divide world_size {world_size}",
                remedy=f"give as many as each node runs, or {world_size}: then all share each shard",
            )
        return rank, world_size, world_size // ranks.per_node
    nodes = read_launcher("GROUP_WORLD_SIZE", 1)
    if count_local_ranks() * nodes != world_size:
        nodes = 1  # the nodes run different numbers of ranks, or torchrun did not launch this world
    return rank, world_size, nodes


def _find_rank(ranks: Ranks) -> tuple[int, int]:
    if ranks.rank is not None and ranks.world_size is not None:
        return ranks.rank, ranks.world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    # a worker of Ray Train has imported ray.train; the errors say that this is none, or still importing it
    with suppress(KeyError, RuntimeError, AttributeError):
        context = sys.modules["ray.train"].get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
        if rank is not None and world_size is not None:
            return rank, world_size
    return 0, 1


def find_dtype(dtype: DType) -> torch.dtype:
    """Return the torch dtype called `dtype`; raise SettingError if images cannot have it."""
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, get_args(DTypeName))
    torch_dtype: torch.dtype = getattr(torch, name)
    return torch_dtype


def check_normalize(normalize: Normalize, dtype: torch.dtype) -> None:
    """Raise SettingError if images of `dtype` cannot be normalised by `normalize`."""
    if normalize is None:
        return
    if isinstance(normalize, str):
        check_choice("normalize", normalize, get_args(NormalizeName))
        if normalize == "imagenet":  # the default, which integers may leave as it is
            return
    else:
        try:
            mean, std = map(as_floats, normalize)
        except (TypeError, ValueError):
            mean, std = (), ()
        finite = all(map(math.isfinite, (*mean, *std)))
        if not (mean and len(mean) == len(std) and finite and min(std) > 0):
            raise SettingError(
                f"normalize must be 'imagenet', 'dataset', None or (mean, std), a number for each "
                f"channel, of pixels from 0 to 1, std above 0; got {normalize!r}"
            )
    if not dtype.is_floating_point:
        name = str(dtype).removeprefix("torch.")
        raise SettingError(
            f"normalize {normalize!r} with dtype {name!r}: integers are not normalised",
            remedy="leave out one of them",
        )


_TRANSFORM_HINT = (
    "give augment: 'train', 'eval', a function (images, ids, epoch) over a batch, or "
    "loaders.per_picture(transform) with a transform of one picture"
)
BUILD_HINTS = {
    "batch_sampler": "give batch_size, shuffle, seed and sampling=loaders.Sampling(...)",
    "collate_fn": "leave it out, batches come whole; MixUp and CutMix are "
    "augment=loaders.RandomAugmentation(mixup=0.2, cutmix=1.0), and augment= takes a function over a batch",
    "download": "let torchvision's dataset download the pictures, and give its folder as path",
    "drop_last": "give sampling=loaders.Sampling(last='drop') for True, leave it out for False",
    "generator": "give seed",
    "in_order": "leave it out, batches always come in order",
    "multiprocessing_context": "leave it out; reading=loaders.Reading(workers=0) decodes in threads",
    "num_replicas": "give ranks=loaders.Ranks(rank=..., world_size=...)",
    "num_workers": "give reading=loaders.Reading(workers=...)",
    "persistent_workers": "leave it out, workers stay until the loader is closed",
    "pin_memory": "leave it out, batches for a GPU are copied from pinned memory; give device='cuda'",
    "pin_memory_device": "give device",
    "prefetch_factor": "leave it out, batches are always read ahead",
    "root": "give path",
    "sampler": (
        "give shuffle and seed; sampling=loaders.Sampling(subset=...) or (weights=...) chooses samples, and "
        "ranks=loaders.Ranks(rank=..., world_size=...) shares them out"
    ),
    "target_transform": "leave it out, and map the labels of a batch in the training loop",
    "timeout": "leave it out, a worker that dies raises at once",
    "train": "give split='train' or the name of another split",
    "transform": _TRANSFORM_HINT,
    "transforms": _TRANSFORM_HINT,
    "worker_init_fn": "leave it out; what is random depends on seed, epoch and sample alone",
}
"""Setting of torch's DataLoader, its samplers or torchvision's datasets -> what to give `build` instead."""

DATASET_HINTS = {
    "download": BUILD_HINTS["download"],
    "extensions": "give is_valid_file",
    "path": "give root",
    "train": BUILD_HINTS["train"],
    "transforms": "give transform and target_transform",
}
"""Setting of another dataset of torchvision -> what to give `ImageDataset` instead."""


def explain_unknown_settings(
    hints: Mapping[str, str], groups: Mapping[str, str]
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Decorate a function to say what to give instead of a keyword that it does not have.

    The function raises SettingError for a keyword of another library and TypeError for any other. It needs no
    `**other` for that, with which type checkers would let such keywords pass.

    Args:
        hints: keyword of another library -> what to give instead.
        groups: settings that the function takes in a dataclass, see `GROUPS`.
    """

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        parameters = inspect.signature(function).parameters
        function_name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def check_and_call(*args: Parameters.args, **keywords: Parameters.kwargs) -> Returned:
            for name in keywords:
                if name in parameters:
                    continue
                if name in hints:
                    raise SettingError(f"{name} is not a setting of {function_name}", remedy=hints[name])
                similar = get_close_matches(name, [*(parameters.keys() - {"self"}), *groups], 1)
                hint = f"; did you mean {groups.get(similar[0], similar[0])}?" if similar else ""
                raise TypeError(f"{function_name}() got an unexpected keyword argument {name!r}{hint}")
            return function(*args, **keywords)

        return check_and_call

    return decorate


def find_group(name: str, settings: Group | None, group: type[Group]) -> Group:
    """Return `settings`, or a `group` of defaults for None; raise SettingError if it is of another type."""
    if settings is None:
        return group()
    if not isinstance(settings, group):
        raise SettingError(f"{name} must be a loaders.{group.__name__}(...), got {settings!r}")
    return settings


def find_recipe(
    path: object,
    precache: object,
    recipe: Recipe | None,
    splits: str | os.PathLike[str] | None,
) -> tuple[Recipe, str | os.PathLike[str] | None]:
    """Return the recipe and the splits of a raw tree at `path`, of which either, both or none may be given.

    Raises:
        SettingError: there is no path, or nothing that the recipe would be for; recipe and splits name
            different splits; or the splits are neither shares nor a list file.
    """
    if recipe is not None and precache is None and splits is None:
        raise SettingError("a recipe is for converting on first use", remedy="give precache=FOLDER, too")
    if path is None:
        raise SettingError(
            "no path is given", remedy="give a tree of pictures or what precache convert made of one"
        )
    recipe = recipe or Recipe(format="shards")
    if splits is None:
        return recipe, None if recipe.splits == DEFAULT_SPLITS else recipe.splits
    if is_list_file(splits):
        return recipe, splits
    split_recipe = replace(recipe, splits=splits)  # type: ignore[arg-type]  # it raises if this is no str
    if recipe.splits not in (DEFAULT_SPLITS, splits):
        raise SettingError(
            f"splits {splits!r}, but the recipe has {recipe.splits!r}", remedy="give one of the two"
        )
    return split_recipe, splits
