"""The settings of a loader, each checked once."""

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, get_args, get_origin

import numpy as np
import numpy.typing as npt
import torch

from precache.engines import available_cpus
from precache.errors import SettingError, check_choice, check_range, is_number
from precache.pictures.images import MAX_SIZE
from precache.pictures.sizes import Size, check_size
from precache.sources.splits import is_list_file

# What a setting may be called is said here alone, for type checkers and at runtime.
Backend: TypeAlias = Literal["auto", "dali", "pytorch", "shards", "synthetic", "webdataset"]
AugmentName: TypeAlias = Literal["crop", "eval", "train"]
DTypeName: TypeAlias = Literal["bfloat16", "float16", "float32", "uint16", "uint8"]
NormalizeName: TypeAlias = Literal["dataset", "imagenet"]
ShuffleName: TypeAlias = Literal["full", "window"]
Check: TypeAlias = Literal["always", "first-read", "never"]
CacheName: TypeAlias = Literal["auto", "device", "none", "ram"]
Last: TypeAlias = Literal["drop", "pad", "partial"]

DType: TypeAlias = DTypeName | torch.dtype
Shuffle: TypeAlias = bool | ShuffleName
Count: TypeAlias = int | Literal["auto"]
Numbers: TypeAlias = float | Sequence[float] | npt.NDArray[Any] | torch.Tensor
Normalize: TypeAlias = NormalizeName | tuple[Numbers, Numbers] | None
Group = TypeVar("Group", "Serving", "Sampling", "Ranks", "Reading")
Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
CROP_RATIO = 0.875  # 224 of 256, as ImageNet is validated
_LEAST = {"workers": 0, "threads": 1, "memory_bytes": 1, "cache_bytes": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How pictures are read; which ones, and what becomes of them, are settings of `loaders.build` itself.

    Attributes:
        workers: processes that decode (`pytorch`; 0: none, see `threads`), threads that decode or
            copy (others); `"auto"`, one per CPU that this process may use, shared out among the
            ranks that torchrun started on this machine.
        threads: that decode where `pytorch` has no worker processes; `"auto"` as above.
        check: `"first-read"` compares every sample of a converted folder with its checksum until it was
            right once, and `"always"` whenever it is read; a crop is then cut out of the whole sample.
            `"never"` does not. One that is damaged raises SampleError, which names file, id and source,
            at its batch; see `on_error`.
        cache: `"ram"` keeps decoded pictures in main memory, one copy for all processes of this user on
            this host that read the same split, and `"device"` in the memory of the loader's device: from
            the second epoch on they are not decoded again. `shards` that fit into main memory are kept by the
            system, as files: `"ram"` makes no copy of them. Of a split that does not fit the first samples
            in stored order are kept, and the rest is read each time. `"ram"` leaves a tenth of the memory
            free, `"device"` a tenth of what is free; `"auto"` is `"ram"` with at most half of the free
            memory, and nothing where that holds less than a tenth of the split. Order and pixels stay the
            same; random crops of `dali` are resized by the CPU where they are kept, and by DALI where not:
            50 dB apart or more.
        memory_bytes: bounds what sequential reading (`shuffle="window"` or False) holds of a converted
            folder at a time: the window is as many shards as fit twice, for the next one is read while
            one is served. `shards` also keeps the system's cache of the files within it. Default:
            windows of 8 shards, and the system decides.
        on_error: what to do with a picture that cannot be decoded: `"raise"` its ImageError, or `"skip"`
            it: of a raw tree, what the list of `precache check` names is left out from the start; what
            it does not name is left out of its batch, which is shorter then, with one warning a file.
            A batch of which nothing is left raises. So is a sample of a converted folder that is not what
            was written; a shard that is missing or truncated raises.
        cache_dir: folder of this machine that keeps the shards of datasets at URLs, for all its processes;
            default PRECACHE_CACHE_DIR, or ~/.cache/precache.
        cache_bytes: that may lie in it: what was used least recently goes first; of the set that is read,
            what was read last, so that one that does not fit keeps a part for the next epoch. What is in use
            stays, even where it is more. Default: what leaves a twentieth of the disk free, at most 10 GiB.
        engine: `"local"`, or `"ray"`: the nodes of a Ray cluster that runs already read, decode and crop, at
            `path` on storage that all of them see; `workers` is then how many of their CPUs work for this
            rank. What is kept, and done on a device, is done here.

    Raises:
        SettingError: a value is out of range or unknown.
    """

    workers: Count = "auto"
    threads: Count = "auto"
    check: Check = "first-read"
    cache: CacheName = "none"
    memory_bytes: int | None = None
    on_error: Literal["raise", "skip"] = "raise"
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    engine: Literal["local", "ray"] = "local"

    def __post_init__(self) -> None:
        check_names(self)
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            if name in _LEAST and value != setting.default:
                object.__setattr__(self, name, check_range(name, value, _LEAST[name]))
        if self.engine == "ray" and self.workers in ("auto", 0):
            raise SettingError(
                f"workers {self.workers!r} with engine 'ray': give how many CPUs of the cluster decode for "
                f"this rank, as Reading(engine='ray', workers=16)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """How pictures are shown to the model.

    Attributes:
        crop_ratio: without augmentation, and for a function, the shorter side becomes `size / crop_ratio` and
            the middle is served, as by torchvision's `Resize(256)` and `CenterCrop(224)`, whatever size is
            stored; timm calls it crop_pct. Where `size` is left out, of squares that are stored with fewer
            than 256 pixels more is served, up to all, in the place of enlarging them.
        views: how many times `augment` draws each picture, for self-supervised training: `batch.views` is a
            tuple of so many batches of images, the first of which is `batch.images`, and what 1 gives. Each
            picture is decoded once.

    Raises:
        SettingError: a value is out of range or unknown.
    """

    crop_ratio: float = CROP_RATIO
    views: int = 1

    def __post_init__(self) -> None:
        if not is_number(self.crop_ratio) or not 0.01 <= self.crop_ratio <= 1:
            raise SettingError(f"crop_ratio must be from 0.01 to 1, got {self.crop_ratio!r}")
        object.__setattr__(self, "crop_ratio", float(self.crop_ratio))
        object.__setattr__(self, "views", check_range("views", self.views, 1, 64))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampling:
    """Which samples are served, and how often. They are compared with the data when a loader is built.

    Attributes:
        classes: names of those whose samples are served; labels stay those of the whole dataset.
        subset: ids of the samples to serve, of `batch.ids`.
        weights: how likely each sample is drawn, one number for each in stored order, as
            `loader.dataset.targets` are; or `"balanced"`, each class as likely as another. An epoch draws as
            many samples as it would have, with replacement: a sample may come several times, also in one
            batch, and is augmented anew each time.
        shares: of the datasets in each batch, relative to their sum: (0.7, 0.3). An epoch serves each sample
            of the first once, and of the others as many as that makes, each going through its own epochs one
            after the other; a sample that comes again in one epoch is augmented anew. Default: all of all.
        last: of the samples that fill no batch at the end of an epoch: `"partial"` shares them and the
            last whole batch out over two, as evenly as can be, also over the ranks; `"pad"` fills a last
            batch up with samples served before, `"drop"` leaves them out. Every rank serves as many
            batches. Where a rank would have none (more ranks than samples, batches of one), `"partial"`
            fills up, too; `batch.padding` says which samples are such repeats.

    Raises:
        SettingError: `last` is unknown.
    """

    classes: Iterable[str] | None = None
    subset: npt.ArrayLike | None = None
    weights: str | npt.ArrayLike | None = None
    shares: Sequence[float] | None = None
    last: Last = "partial"

    def __post_init__(self) -> None:
        check_names(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Which processes share each epoch, every sample served by one of them.

    Attributes:
        rank, world_size: which of how many; default those of `torch.distributed` where it is initialised, or
            of Ray Train, else 0 and 1.
        per_node: of a converted dataset read shard by shard (shuffle "window" or False) each node reads
            shards of its own, which its ranks share: those whose numbers follow one another. Default: as many
            as torchrun runs, if on each node alike; else all ranks are of one node.

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
"""Setting -> how `loaders.build` takes it, of those that have a dataclass of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSpec:
    """What `loaders.build` was told, with all that was left to it decided.

    Attributes:
        last: as of `Sampling`.
        served: the size that is served if no function says otherwise; 0 before the data has been opened.
        workers, threads: as of `reading`, as numbers; of engine `"ray"` those of this machine.
        The others are described by `loaders.build`.
    """

    backend: Backend
    split: str
    batch_size: int
    shuffle: Shuffle
    seed: int
    device: torch.device
    size: Size | None
    dtype: torch.dtype
    normalize: Normalize
    last: Last
    rank: int
    world_size: int
    serving: Serving
    reading: Reading
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
        workers = self.reading.workers if self.reading.engine == "local" else "auto"
        for name, asked in (("workers", workers), ("threads", self.reading.threads)):
            object.__setattr__(self, name, _own_cpus() if asked == "auto" else asked)


def check_names(settings: Any) -> None:
    """SettingError where a field of a dataclass that may have one of several names has another."""
    for setting in fields(settings):
        if get_origin(setting.type) is Literal:
            check_choice(setting.name, getattr(settings, setting.name), get_args(setting.type))


def numbers_of(part: Numbers) -> tuple[float, ...]:
    """The numbers of `part`, of one alone that one; TypeError or ValueError where it is something else."""
    return tuple(map(float, np.asarray(part, object).ravel()))


def read_launcher(name: str, default: int, least: int = 1) -> int:
    """The integer that torchrun, or another launcher, has put into the environment as `name`.

    The `default` where there is none, where it is empty, and below `least`: 0 processes, or rank -1, are how
    scripts say that nothing was launched.

    Raises:
        SettingError: it is no integer.
    """
    text = os.environ.get(name, "").strip()
    try:
        number = int(text) if text else default
    except ValueError:
        raise SettingError(
            f"{name} in the environment must be an integer, got {text!r}; unset it, or start with torchrun"
        ) from None
    return number if number >= least else default


def count_local_ranks() -> int:
    """How many processes were launched on this machine, this one among them."""
    return read_launcher("LOCAL_WORLD_SIZE", 1)


def _own_cpus() -> int:
    return max(1, available_cpus() // count_local_ranks())


def find_ranks(asked: Ranks) -> tuple[int, int]:
    """Rank and world size as asked, or those of `torch.distributed` or of Ray Train, or 0 and 1."""
    if asked.rank is not None and asked.world_size is not None:
        return asked.rank, asked.world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    # a worker of Ray Train has imported that; else there is none, or it is still being imported
    with suppress(KeyError, RuntimeError, AttributeError):
        context = sys.modules["ray.train"].get_context()
        ranks = context.get_world_rank(), context.get_world_size()
        if None not in ranks:
            return ranks
    return 0, 1


def find_nodes(per_node: int | None, world_size: int) -> int:
    """How many machines the ranks run on, by what torchrun says if `per_node` does not; 1: not known.

    Raises:
        SettingError: not all would have as many ranks.
    """
    if per_node is not None:
        if world_size % per_node:
            raise SettingError(
                f"per_node {per_node} does not divide world_size {world_size}; give as many as each node "
                f"runs, or {world_size}: then all share each shard"
            )
        return world_size // per_node
    nodes = read_launcher("GROUP_WORLD_SIZE", 1)
    # else the nodes run different numbers of ranks, or this world is not torchrun's
    return nodes if count_local_ranks() * nodes == world_size else 1


def find_dtype(dtype: DType) -> torch.dtype:
    """The dtype of this name; SettingError if images cannot have it."""
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, get_args(DTypeName))
    found: torch.dtype = getattr(torch, name)
    return found


def check_normalize(normalize: Normalize, dtype: torch.dtype) -> None:
    """SettingError where images of `dtype` cannot be normalised so."""
    if normalize is None:
        return
    if isinstance(normalize, str):
        check_choice("normalize", normalize, get_args(NormalizeName))
        if normalize == "imagenet":  # the default, so that it need not be left out for integers
            return
    else:
        try:
            mean, std = map(numbers_of, normalize)
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
            f"normalize {normalize!r} with dtype {name!r}: integers are not normalised; leave out one of them"
        )


# A setting of torch's DataLoader, its samplers or torchvision's datasets -> what to write instead.
OF_BUILD = {
    "batch_sampler": "give batch_size, shuffle, seed and sampling=loaders.Sampling(...)",
    "collate_fn": "leave it out, batches come whole; augment= takes a function over a batch",
    "download": "run 'precache fetch' before",
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
    "transform": "give augment: 'train', 'eval' or a function over a batch",
    "transforms": "give augment: 'train', 'eval' or a function over a batch",
    "worker_init_fn": "leave it out; what is random depends on seed, epoch and sample alone",
}


# As above, for `ImageDataset`.
OF_IMAGES = {
    "download": OF_BUILD["download"],
    "extensions": "give is_valid_file",
    "path": "give root",
    "train": OF_BUILD["train"],
    "transforms": "give transform and target_transform",
}


def refuse_others(
    ours: Mapping[str, str], groups: Mapping[str, str]
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Decorate a function so that it says of a keyword that it does not have what to give instead.

    It raises SettingError for one of another library, and TypeError for one that nobody has. The function
    needs no `**other` for that, with which type checkers would let such keywords pass.

    Args:
        ours: keyword of another library -> what to give instead.
        groups: settings that the function takes in a dataclass, see `GROUPS`.
    """

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        known = inspect.signature(function).parameters
        called = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*args: Parameters.args, **given: Parameters.kwargs) -> Returned:
            for name in given:
                if name in known:
                    continue
                if name in ours:
                    raise SettingError(f"{name} is not a setting of {called}; {ours[name]}")
                similar = get_close_matches(name, [*(known.keys() - {"self"}), *groups], 1)
                hint = f"; did you mean {groups.get(similar[0], similar[0])}?" if similar else ""
                raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{hint}")
            return function(*args, **given)

        return checked

    return decorate


def find_group(name: str, given: Group | None, group: type[Group]) -> Group:
    """`given`, or what `group` has by default; SettingError where it is something else."""
    if given is None:
        return group()
    if not isinstance(given, group):
        raise SettingError(f"{name} must be a loaders.{group.__name__}(...), got {given!r}")
    return given


def check_given(path: object, precache: object, recipe: object, splits: object = None) -> None:
    """SettingError for a `recipe` of nothing, `precache` of several paths or a list file, or no `path`."""
    if recipe is not None and precache is None and splits is None:
        raise SettingError("a recipe is of what is converted while training; give precache=FOLDER, too")
    if precache is not None and is_list_file(splits):
        raise SettingError(
            f"precache converts a tree by shares, and splits {str(splits)!r} is a list file; run 'precache "
            f"convert --splits' with it, and build on what it writes"
        )
    if precache is not None and isinstance(path, (list, tuple)):
        raise SettingError("precache converts one tree, path names several; run 'precache convert' on each")
    if path is None:
        raise SettingError("no path is given; give a tree of pictures or what precache convert made of one")
