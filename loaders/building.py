"""`loaders.build`: check the settings, open the data and put the loader together."""

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from loaders.augment.crops import Crops, LateAugmentation, View, make_views
from loaders.augment.functions import Augment, CheckedFunction, PerPicture, find_augmentation
from loaders.augment.geometry import resized_side
from loaders.augment.mixing import check_mixable
from loaders.augment.policies import RandomAugmentation
from loaders.concatenation import concatenate
from loaders.dataset import RAW, SplitData, choose_backend, fetch_in_parts, open_split, served_size
from loaders.device import Lane, find_device
from loaders.first_use import convert_on_first_use
from loaders.loader import Loader
from loaders.order import EpochOrder, RankBatches, Weights
from loaders.read import BACKENDS, processes, ray_reader
from loaders.read.cache import open_cached
from loaders.read.main_memory import free_memory
from loaders.read.worker import CPU_BACKENDS, OpenReader
from loaders.sampling import choose_samples
from loaders.settings import (
    BUILD_HINTS,
    GROUPS,
    Backend,
    DType,
    LoaderSpec,
    Normalize,
    Ranks,
    Reading,
    Sampling,
    Serving,
    Shuffle,
    explain_unknown_settings,
    find_dtype,
    find_group,
    find_ranks,
    find_recipe,
)
from loaders.transfer import Pipeline, find_mean_and_std
from precache.errors import SettingError
from precache.pictures.images import Size, sides
from precache.recipe import Recipe
from precache.storage.shard_cache import Cache
from precache.storage.urls import Url, is_url

_BATCHES = 4  # in memory at a time: one served, two read ahead, one being filled
Path: TypeAlias = str | os.PathLike[str] | Url


@explain_unknown_settings(BUILD_HINTS, GROUPS)
def build(  # noqa: PLR0913 (each one a choice of the caller, by keyword)
    path: Path | Sequence[Path],
    *,
    batch_size: int = 64,
    split: str = "train",
    shuffle: Shuffle = True,
    seed: int = 0,
    size: Size | None = None,
    device: str | torch.device = "cpu",
    augment: Augment = None,
    dtype: DType = "float32",
    normalize: Normalize = "imagenet",
    backend: Backend = "auto",
    serving: Serving | None = None,
    sampling: Sampling | None = None,
    ranks: Ranks | None = None,
    reading: Reading | None = None,
    precache: str | os.PathLike[str] | None = None,
    recipe: Recipe | None = None,
    splits: str | os.PathLike[str] | None = None,
    class_depth: int | None = None,
) -> Loader:
    """Build a loader for a raw tree, a converted folder, or a converted dataset at a URL.

    Args:
        path: a tree of class folders with pictures, or a folder that `precache convert` made of one; or the
            URL of a converted dataset, `s3://BUCKET/PREFIX`, whose shards are fetched ahead and cached on
            this machine, see `Reading.cache_dir`. Several paths of one format in a list are served as one
            dataset: classes of the same name are one, those of the first path keep their labels, and ids of
            each dataset begin after the highest one of the dataset before.
        batch_size: samples per batch.
        split: split to serve: `train`, `val`, `test`. A raw tree without folders of these names, and without
            `splits`, is one split, `train`.
        shuffle: order of the samples. `"full"`: a permutation of all samples, for backends with random
            access. `"window"`: shards in random order, samples shuffled within a window of shards. True: the
            better of the two that the backend can do; at a URL `"window"`, since random access fetches nearly
            all shards for the first few batches. False: the stored order.
        seed: seed of the order, together with the epoch.
        size: size of the served pictures in pixels, the side of a square or (height, width). Default: 224, or
            the stored size if that is smaller or no square.
        device: device of `images` and `labels`: `"cpu"`; `"cuda"`, the GPU that is current when this is
            called; `"cuda:1"`; `"auto"`, a GPU if there is one.
        augment: augmentation. `"train"`: random crops of the whole picture (in a raw tree, of the original),
            each resized once to `size`, antialiased, and mirrored every other time. `"torchvision"`,
            `"timm-a1"`, `"timm-a2"`, `"timm-a3"`, `"deit3"`, `"simclr"`, `"dino"`: recipes of these names.
            `"crop"`: crops of `size` that are not resized, with black around smaller pictures. A
            `loaders.RandomAugmentation`: other settings, of which all of these are made. `"eval"` or None:
            the middle, see `Serving.crop_ratio`. `loaders.per_picture(transform)`: a function of yours for
            each picture. Any other function, see `loaders.augment.functions`: it is called for a batch in the
            thread that reads ahead, with stored pictures whole, and the default `size` is what it returns. If
            each picture has its own size (fit keep, or a raw tree), it gets squares of `size / crop_ratio`.
        dtype: dtype of the images. `"float32"`, `"float16"` or `"bfloat16"`: normalised on the device.
            `"uint8"`: for code that normalises itself.
        normalize: mean and standard deviation for floating-point images; uint8 is not normalised.
            `"imagenet"`: those that torchvision's models expect; for grey pictures the mean of the three
            channels. `"dataset"`: those of split `train` of the converted folder, or of this split if there
            is no such one. (mean, std): of pixels from 0 to 1, one number each or one per channel. None:
            serve pixels from 0 to 1.
        backend: `pytorch`, `shards`, `webdataset`, `dali` or `synthetic`; `auto`: the one that the folder is
            made for.
        serving: crop ratio, see `loaders.Serving`.
        sampling: classes, a subset, weights, and what to do with samples that fill no batch, see
            `loaders.Sampling`. Default: each sample once.
        ranks: processes that share each epoch, see `loaders.Ranks`; `batch_size` is that of one of them.
        reading: workers, checksums, caches, memory and errors, see `loaders.Reading`.
        precache: folder for what `precache convert` makes of the raw tree at `path`, with `recipe`, `splits`
            and `class_depth`. The first call converts, while all other processes that name the folder wait;
            each call serves what is in it.
        recipe: recipe for `precache`; default that of `precache convert --format shards`. Its seed draws
            `splits`.
        splits: splits of a raw tree that has none: shares such as `"train=0.9,val=0.1"`, or a file with lines
            `path,split`. They hold the same pictures as those of `precache convert --splits`, whatever the
            loader's `seed`.
        class_depth: depth of the class folders of a raw tree: 2 if birds/heron/1.jpg is of the class
            `birds/heron`, 0 for pictures without classes. Default 1: pictures in deeper folders belong to the
            outermost one, as in torchvision's ImageFolder.

    Returns:
        An iterable of `Batch`. Each iteration serves one epoch, the next iteration the next epoch, see
        `Loader`. Iterating raises DatasetError for a damaged shard, ImageError for a picture that cannot be
        decoded, see `Reading.on_error`, and TransformError for an exception in a transform of `per_picture`.

    Raises:
        SettingError: a value is out of range or unknown, or the cache does not fit; or a setting belongs to
            torch's DataLoader, and the message names the one to give here.
        TypeError: a setting is unknown.
        DatasetError, SourceError: `path` does not hold what the backend reads; or the tree changed since it
            was converted into `precache`.
        StorageError: the storage of a URL refuses, or does not answer for 120 s; also raised while iterating.
        MissingDependencyError: the backend's package is not installed.
        OpenFilesError: too many files are open; also raised while iterating.
    """
    recipe, splits = find_recipe(path, precache, recipe, splits)
    rank, world_size, nodes = find_ranks(find_group("ranks", ranks, Ranks))
    spec = LoaderSpec(
        path=path,
        batch_size=batch_size,
        split=split,
        shuffle=shuffle,
        seed=seed,
        size=size,
        device=find_device(device),
        augment=find_augmentation(augment),
        dtype=find_dtype(dtype),
        normalize=normalize,
        backend=backend,
        serving=find_group("serving", serving, Serving),
        sampling=find_group("sampling", sampling, Sampling),
        rank=rank,
        world_size=world_size,
        nodes=nodes,
        reading=find_group("reading", reading, Reading),
        precache=precache,
        recipe=recipe,
        splits=splits,
        class_depth=class_depth,
    )
    data, weights, chosen = _open_data(spec), None, spec.sampling
    if any(choice is not None for choice in (chosen.classes, chosen.subset, chosen.weights)):
        data, weights = choose_samples(chosen, data)
    data.warn_if_rounded()
    data = fetch_in_parts(data, weights)
    open_pipeline = partial(_open_pipeline, data, Lane(spec.device))
    pipeline = open_pipeline(spec)
    try:
        order = _choose_order(spec, data, pipeline.random_access, weights)
    except SettingError:
        pipeline.close()
        raise
    if data.kind == RAW or order.kind == "full" or weights is not None:
        nodes = 1  # samples are not read shard by shard, so no node needs shards of its own
    batches = RankBatches(order, spec.batch_size, spec.sampling.last, rank, world_size, nodes)
    return Loader(spec, data, batches, pipeline, open_pipeline)


def _open_data(spec: LoaderSpec) -> SplitData:
    """Open the split at the path, which is converted first if it is to be, or those at several paths as one.

    Raises:
        SettingError: see `open_split` and `concatenate`; or there is no path.
    """
    path, splits, class_depth = spec.path, spec.splits, spec.class_depth
    if spec.precache is not None:
        choose_backend(spec.backend, spec.recipe.format, os.fspath(spec.precache))  # to fail before the work
        path = convert_on_first_use(path, spec.precache, spec.recipe, splits, class_depth)
        splits = class_depth = None  # the folder has them
    paths = path if isinstance(path, (list, tuple)) else [path]
    if not paths:
        raise SettingError("path is an empty list", remedy="give the paths of datasets")
    parts: list[SplitData] = []
    for part_path in paths:
        try:
            part = open_split(
                part_path,
                spec.split,
                splits=splits,
                split_seed=spec.recipe.seed,
                class_depth=class_depth,
                skip_rejected=spec.reading.on_error == "skip",
                download_cache=_download_cache(spec.reading) if is_url(part_path) else None,
                may_lack=bool(parts),
            )
        except SettingError as error:
            if len(paths) > 1 and error.path is None:
                error.path = part_path
            raise
        parts.append(part)
    return concatenate(parts) if len(parts) > 1 else parts[0]


def _download_cache(reading: Reading) -> Cache:
    if reading.cache_dir is None:
        return Cache(bytes=reading.cache_bytes)
    return Cache(bytes=reading.cache_bytes, folder=reading.cache_dir)


def _open_pipeline(data: SplitData, lane: Lane, spec: LoaderSpec) -> Pipeline:
    """Open the pipeline of a loader, with the size and crop ratio that the settings leave open decided.

    Called at first, and each time that `Loader.set_size` changes the size.
    """
    served, ratio = served_size(data, spec.size), spec.serving.crop_ratio
    if spec.size is None:
        ratio = data.crop_ratio(ratio, served)
    spec = replace(spec, served=served, serving=replace(spec.serving, crop_ratio=ratio))
    if spec.sampling.last != "pad":  # then no batch has more samples than the split
        spec = replace(spec, batch_size=min(spec.batch_size, max(1, len(data))))
    backend = choose_backend(spec.backend, data.kind, data.path)
    _check_fits(spec, data)
    mean_and_std = find_mean_and_std(spec.normalize, data) if spec.dtype.is_floating_point else None
    crops, late = _divide_augmentation(spec, data, backend)
    open_reader = _choose_reader(spec, data, backend, crops)
    with lane.active():
        if spec.reading.cache is None:
            reader = open_reader(spec, data, crops)
        else:
            reader = open_cached(partial(open_reader, spec, data), spec, data, crops)
    return Pipeline(spec, data, lane, reader, late, crops, mean_and_std)


def _choose_reader(spec: LoaderSpec, data: SplitData, backend: str, crops: Crops) -> OpenReader:
    """Return the function that opens the reader of a backend with the engine of the settings.

    Raises:
        SettingError: worker processes are asked for, and the data is at a URL, or its memory is bounded.
    """
    engine, open_reader = spec.reading.engine, BACKENDS[backend]
    reads_urls = data.download_cache is not None  # which a forked process cannot
    is_bounded = spec.reading.memory_bytes is not None
    holds_lock = spec.device.type == "cuda" or crops.operates or crops.per_picture is not None
    if engine == "auto" and backend in ("shards", "webdataset") and holds_lock:
        # processes read sample by sample: they keep within no bound, and gain nothing by windows
        is_local = reads_urls or is_bounded or spec.shuffle == "window" or not spec.workers
        engine = "local" if is_local else "processes"
    if engine == "processes" and reads_urls:
        raise SettingError(
            f"engine 'processes' reads folders of this machine, and {data.path} is a URL",
            remedy="choose engine 'local', or 'ray'",
        )
    if engine == "processes" and is_bounded:
        raise SettingError(
            f"memory_bytes {spec.reading.memory_bytes:,} with engine 'processes', which reads single samples",
            remedy="leave one of the two out",
        )
    if engine == "ray":
        return partial(ray_reader.RayReader, backend)
    if engine == "processes":
        return partial(processes.ProcessesReader, backend, open_reader)
    return open_reader


def _choose_order(
    spec: LoaderSpec, data: SplitData, random_access: bool, weights: Weights | None
) -> EpochOrder:
    """Return the order in which all ranks together serve `data`.

    Args:
        random_access: whether the backend reads samples in any order as fast as in the stored one.

    Raises:
        SettingError: the backend cannot serve this order, or not within `memory_bytes`.
    """
    if spec.shuffle == "full" and not random_access:
        raise SettingError(
            f"shuffle 'full' needs random access, which {data.path} does not give",
            remedy="use 'window' or True",
        )
    kind = "none"
    if spec.shuffle is True:
        kind = "full" if random_access else "window"
    elif spec.shuffle is not False:
        kind = spec.shuffle
    return EpochOrder(
        shard_starts=data.shard_starts,
        kind=kind,
        seed=spec.seed,
        window_shards=data.window_shards(spec.reading.memory_bytes),
        chosen=None if data.chosen is None else (data.chosen, len(data.whole)),
        weights=weights,
    )


def _check_fits(spec: LoaderSpec, data: SplitData) -> None:
    """Raise SettingError if the batches do not fit into memory."""
    pixel_bytes = data.channels
    if spec.device.type == "cpu":  # elsewhere floats are made on the device
        pixel_bytes *= spec.dtype.itemsize
    views: tuple[View, ...] = (View(spec.served),)
    if isinstance(spec.augment, RandomAugmentation):
        views = make_views(spec.augment, spec.served)
    picture_bytes = sum(math.prod(sides(view.size)) for view in views) * pixel_bytes
    memory_bytes = free_memory()[1]
    max_batch_size = memory_bytes // (_BATCHES * picture_bytes)
    if spec.batch_size > max_batch_size:
        raise SettingError(
            f"batch_size {spec.batch_size:,}: {_BATCHES} batches of {picture_bytes:,} bytes a picture are "
            f"more than the {memory_bytes:,} bytes of memory of this machine",
            remedy=f"give at most {max_batch_size:,}",
        )


def _divide_augmentation(
    spec: LoaderSpec, data: SplitData, backend: str
) -> tuple[Crops, LateAugmentation | CheckedFunction | None]:
    """Decide which part of the augmentation the backend does, and which is done on the device.

    Returns:
        What the backend serves of each picture; and what is done with a batch on the device, None if nothing
        is left to do there.

    Raises:
        SettingError: the augmentation does not go with the targets or the backend.
    """
    served, ratio, seed = spec.served, spec.serving.crop_ratio, spec.seed
    stored = None if data.has_varying_sizes else data.size
    augmentation = spec.augment
    if augmentation is None:
        data.warn_if_smaller(resized_side(served, ratio), served)
        return Crops(stored, (View(served),), crop_ratio=ratio), None
    if isinstance(augmentation, PerPicture):
        if backend not in CPU_BACKENDS:
            raise SettingError(
                f"augment=loaders.per_picture(...) is for backends that decode on the CPU, got {backend!r}",
                remedy=f"choose one of {', '.join(CPU_BACKENDS)}",
            )
        return Crops(stored, (View(served),), seed, per_picture=augmentation), None
    if not isinstance(augmentation, RandomAugmentation):
        function = CheckedFunction(augmentation, spec.size)
        if data.has_varying_sizes:  # one array cannot hold the pictures whole: the middle of each
            return Crops(None, (View(resized_side(served, ratio)),)), function
        return Crops(data.size, (View(data.size),)), function
    return _divide_random(augmentation, spec, data, backend)


def _divide_random(
    augmentation: RandomAugmentation, spec: LoaderSpec, data: SplitData, backend: str
) -> tuple[Crops, LateAugmentation | None]:
    """Decide as `_divide_augmentation`, for random augmentation.

    On a GPU, crops of pictures of one size and all operations are made there; DALI makes crops alone. In all
    other cases the backend does everything.
    """
    seed, stored = spec.seed, None if data.has_varying_sizes else data.size
    check_mixable(augmentation.mixup, augmentation.cutmix, data.classes, data.path)
    views = make_views(augmentation, spec.served)
    if spec.size is not None and all(view.size is not None for view in augmentation.view_settings):
        raise SettingError(
            f"size {spec.size} is for views without a size of their own, and augment gives each view one",
            remedy="leave one of the two out",
        )
    for view in dict.fromkeys(views):
        assert view.random is not None
        data.warn_if_smaller(view.size, view.size, enlarged=view.random.scale is not None)
    if data.channels != 3 and augmentation.needs_colour:
        warnings.warn(
            f"the pictures of {data.path} are grey: {', '.join(augmentation.needs_colour)} of augment do "
            f"nothing to them",
            stacklevel=2,
        )
    operates = augmentation.has_operations
    if spec.device.type == "cuda" and stored is not None:
        return Crops(stored, (View(stored),)), LateAugmentation(views, seed, crops_here=True)
    if spec.device.type == "cuda" or backend == "dali":
        late = LateAugmentation(views, seed, crops_here=False) if operates else None
        return Crops(stored, views, seed), late
    return Crops(stored, views, seed, operates=operates), None
