"""`loaders.build`: from what the caller asks for to a loader."""

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from loaders.augment import (
    Augment,
    BatchFunction,
    CheckedFunction,
    Crops,
    RandomAugmentation,
    augment_batch,
    choose,
    resized_side,
)
from loaders.converting import Conversion, Converting, reconcile
from loaders.dataset import RAW, SplitData, open_split, served_size, with_parts
from loaders.deliver import Lane, find_device
from loaders.loader import Loader
from loaders.mixture import Mixture, samples_of, unite_classes
from loaders.order import MixedEpochs, Order
from loaders.read import BACKENDS, choose_backend, ray_reader
from loaders.read.cache import open_cached
from loaders.read.host_memory import free_memory
from loaders.sampling import choose_samples, find_epochs, find_weights
from loaders.settings import (
    GROUPS,
    OF_BUILD,
    Backend,
    DType,
    LoaderSpec,
    Normalize,
    Ranks,
    Reading,
    Sampling,
    Serving,
    Shuffle,
    check_given,
    find_dtype,
    find_group,
    find_nodes,
    find_ranks,
    refuse_others,
)
from loaders.transfer import STORED, Pipeline, find_scales
from precache.errors import SettingError
from precache.pictures.sizes import Size, sides
from precache.recipe import Recipe
from precache.storage.shard_cache import Cache
from precache.storage.urls import Url, is_url

_BATCHES = 4  # served, two read ahead, and the one that is being filled
Path: TypeAlias = str | os.PathLike[str] | Url


@refuse_others(OF_BUILD, GROUPS)
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
    """Build the loader for the raw tree or the converted folder at `path`, or what was converted at a URL.

    Args:
        path: a tree of class folders with pictures, or what `precache convert` made of one; or the URL of
            such, `s3://BUCKET/PREFIX`, whose shards are fetched before they are needed, and kept on this
            machine: see `Reading.cache_dir`. A list of such paths is served as one dataset, see
            `Sampling.shares`; `batch.fields["dataset"]`, int64 [n] on the CPU, is then each sample's number
            in the list. Classes of the same name are one; the first path's keep their labels.
        batch_size: samples per batch.
        split: of the dataset: `train`, `val`, `test`; a raw tree without folders called so, and without
            `splits`, is one split, `train`.
        shuffle: `"full"`, a permutation of all samples, for backends with random access;
            `"window"`, shards in random order and samples shuffled within a window of shards;
            True, the better of the two that the backend can do; at a URL `"window"`, since random access
            fetches nearly all shards for the first few batches; False, the stored order.
        seed: with the epoch it gives the order.
        size: of what is served, in pixels: the side of a square, or (height, width); by default 224, or all
            that is stored where that is less or no square.
        device: where `images` and `labels` are put: `"cpu"`, `"cuda"`, the GPU that is the current one when
            this is called, `"cuda:1"`; `"auto"`, a GPU where there is one.
        augment: `"train"`, random crops of the whole picture (a raw tree's: of the original), each resized
            once to `size`, antialiased, and mirrored every other time; `"crop"`, crops of `size` alone, with
            black around what is smaller; a `loaders.RandomAugmentation` with other settings, colour
            jitter among them; `"eval"` or None, the middle, see `Serving.crop_ratio`; or a function of
            yours, see `loaders.augment.BatchFunction`, which is called in the thread that reads ahead with
            all that is stored; the default `size` is then what it returns. Pictures that have each a size of
            their own, as with fit keep and of a raw tree, it gets as squares of `size / crop_ratio`.
        dtype: of the images: `"float32"`, `"float16"` or `"bfloat16"`, normalised on the device; or, for code
            that normalises itself, `"uint8"`, or `"uint16"` where that is stored.
        normalize: what floating point is normalised with; integers are not. `"imagenet"`, the mean and
            standard deviation that torchvision's models expect, of grey pictures the mean of the three
            channels', with alpha left from 0 to 1; `"dataset"`, those of split `train` of the converted
            folder, or of this split if there is none; (mean, std), a number each or one for each channel, of
            pixels from 0 to 1; None serves pixels from 0 to 1.
        backend: `pytorch`, `shards`, `webdataset`, `dali` or `synthetic`; `auto`
            picks the one that the folder is made for.
        serving: how pictures are shown: crop ratio, views; see `loaders.Serving`.
        sampling: which samples are served, and how often: classes, a subset, weights, shares of several
            datasets, what fills no batch; see `loaders.Sampling`. Default: each once.
        ranks: which processes share each epoch; see `loaders.Ranks`. `batch_size` is that of one of them.
        reading: how pictures are read: workers, checksums, cache, memory, errors; see `loaders.Reading`.
        precache: a folder: while the raw tree at `path` is trained on, a process of the lowest priority
            converts it into shards there, as `precache convert` would; from the start of the epoch after
            they are finished they are read in its place, in the order that the tree would have.
        recipe: of `precache`; default that of `precache convert --format shards`. Its seed draws `splits`.
        splits: of a raw tree that has none: shares such as `"train=0.9,val=0.1"`, or a file with lines
            `path,split`; the same pictures as `precache convert --splits` puts there. The loader's `seed`
            does not change them.
        class_depth: how deep the class folders of a raw tree lie; 2 for birds/heron/1.jpg of the class
            `birds/heron`, 0 for pictures without classes. By default 1: what lies deeper belongs to the
            outermost folder, as torchvision's ImageFolder has it.

    Returns:
        An iterable of `Batch`; one iteration is one epoch, a new one the next, see `Loader`. It raises
        DatasetError for a damaged shard, ImageError for a picture that cannot be decoded (see
        `Reading.on_error`).

    Raises:
        SettingError: a value is out of range or unknown, or the cache does not fit; or a setting is one of
            torch's DataLoader, with the name of the one here.
        TypeError: a setting that is known nowhere.
        DatasetError, SourceError: `path` does not hold what the backend reads.
        StorageError: the storage of a URL refuses, or does not answer for 120 s; later ones at their batch.
        MissingDependencyError: the backend's package is not installed.
        OpenFilesError: too many files are open; later ones at their batch.
    """
    check_given(path, precache, recipe, splits)
    recipe, splits = reconcile(recipe, splits)
    serving, sampling = find_group("serving", serving, Serving), find_group("sampling", sampling, Sampling)
    ranks, reading = find_group("ranks", ranks, Ranks), find_group("reading", reading, Reading)
    rank, world_size = find_ranks(ranks)
    nodes = find_nodes(ranks.per_node, world_size)
    spec = LoaderSpec(
        backend=backend,
        split=split,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        device=find_device(device),
        size=size,
        dtype=find_dtype(dtype),
        normalize=normalize,
        last=sampling.last,
        rank=rank,
        world_size=world_size,
        serving=serving,
        reading=reading,
    )
    lane = Lane(spec.device)
    mixed = isinstance(path, (list, tuple))
    paths: list[Any] = list(path) if isinstance(path, (list, tuple)) else [path]
    if not paths:
        raise SettingError("path is an empty list; give the paths of datasets")
    if mixed and not (sampling.classes is sampling.subset is sampling.weights is None):
        raise SettingError("classes, subset and weights are of one dataset; give one path, or shares alone")
    if not mixed and sampling.shares is not None:
        raise SettingError(f"shares {sampling.shares!r} of one dataset; give a list of paths: build([A, B])")
    of_tree = {"splits": splits, "split_seed": recipe.seed, "class_depth": class_depth}
    parts = [choose_samples(sampling, _open_split(spec, one, of_tree)) for one in paths]
    weights = find_weights(sampling, parts[0])
    if mixed:
        parts = unite_classes(parts)
        counts = samples_of(sampling.shares, [len(part) for part in parts])
    else:
        parts = [with_parts(parts[0], None if weights is None else weights > 0)]

    def open_source(spec: LoaderSpec) -> Pipeline | Converting | Mixture:
        served, ratio = served_size(parts, spec.size), spec.serving.crop_ratio
        if spec.size is None:
            ratio = max(part.crop_ratio(ratio, served) for part in parts)
        spec = replace(spec, served=served, serving=replace(spec.serving, crop_ratio=ratio))
        if mixed:
            with ExitStack() as opened:
                pipelines = [
                    opened.enter_context(closing(_open_pipeline(augment, spec, part, lane))) for part in parts
                ]
                opened.pop_all()
            return Mixture(pipelines)
        if spec.last != "pad":  # more than there are samples are in no batch
            spec = replace(spec, batch_size=min(spec.batch_size, max(1, len(parts[0]))))
        if precache is None:
            return _open_pipeline(augment, spec, parts[0], lane)
        conversion = Conversion(parts[0], spec.split, precache, recipe, spec.rank)
        return _open_converting(augment, spec, parts[0], lane, conversion)

    source = open_source(spec)
    try:
        access = [part.random_access for part in (source.parts if isinstance(source, Mixture) else [source])]
        epochs = [find_epochs(spec, *each, weights) for each in zip(parts, access, strict=True)]
    except SettingError:
        source.close()
        raise
    by_shard = not mixed and parts[0].kind != RAW and epochs[0].kind != "full" and weights is None
    together = MixedEpochs(parts=tuple(epochs), counts=counts) if mixed else epochs[0]
    order = Order(together, spec.batch_size, sampling.last, rank, world_size, nodes if by_shard else 1)
    return Loader(spec, parts, order, source, open_source)


def _open_split(spec: LoaderSpec, path: Path, of_tree: dict[str, Any]) -> SplitData:
    reading, cache = spec.reading, None
    if is_url(path):
        folder = {} if reading.cache_dir is None else {"folder": reading.cache_dir}
        cache = Cache(bytes=reading.cache_bytes, **folder)
    return open_split(path, spec.split, **of_tree, skip_rejected=reading.on_error == "skip", cache=cache)


def _open_pipeline(augment: Augment, spec: LoaderSpec, data: SplitData, lane: Lane) -> Pipeline:
    backend = choose_backend(spec.backend, data.kind, data.path)
    _check_fits(spec, data)
    scales = find_scales(spec.normalize, data) if spec.dtype.is_floating_point else None
    crops, late, followed = _augmentation(augment, spec, data)
    on_ray = spec.reading.engine == "ray"
    open_reader = partial(ray_reader.RayReader, backend) if on_ray else BACKENDS[backend]
    with lane.active():
        reader = open_cached(partial(open_reader, spec, data), backend, spec, data, crops)
    return Pipeline(spec, data, lane, reader, late, scales, followed)


def _open_converting(
    augment: Augment, spec: LoaderSpec, data: SplitData, lane: Lane, conversion: Conversion
) -> Converting:
    """The raw tree, and its shards in the same order, size and part."""
    of_shards = replace(spec, backend="auto", shuffle="full")

    def open_pipeline(part: SplitData) -> Pipeline:
        return _open_pipeline(augment, spec if part is data else of_shards, part, lane)

    try:
        return Converting(conversion, data, open_pipeline)
    except BaseException:
        conversion.close()
        raise


def _check_fits(spec: LoaderSpec, data: SplitData) -> None:
    """SettingError for integers of another dtype than is stored, or more than this machine can hold."""
    if not spec.dtype.is_floating_point and spec.dtype != STORED[data.dtype.itemsize]:
        raise SettingError(
            f"dtype {str(spec.dtype).removeprefix('torch.')}: {data.path} holds pictures of {data.dtype}; "
            f"give dtype='{data.dtype}', or a float as 'float32'"
        )
    pixel_bytes = data.pixel_bytes
    if spec.device.type == "cpu":  # a device makes its floats itself
        pixel_bytes = data.channels * spec.dtype.itemsize
    picture_bytes = math.prod(sides(spec.served)) * pixel_bytes * spec.serving.views
    memory_bytes = free_memory()[1]
    most = memory_bytes // (_BATCHES * picture_bytes)
    if spec.batch_size > most:
        raise SettingError(
            f"batch_size {spec.batch_size:,}: {_BATCHES} batches of {picture_bytes:,} bytes a picture are "
            f"more than the {memory_bytes:,} bytes of memory of this machine; give at most {most:,}"
        )


def _augmentation(
    augment: Augment, spec: LoaderSpec, data: SplitData
) -> tuple[Crops, BatchFunction | CheckedFunction | None, Crops]:
    """What the backend serves of each picture, and what is left to do with the batch; what masks follow.

    These follow a picture through all but what a function of the caller's does.
    """
    served, ratio = spec.served, spec.serving.crop_ratio
    stored = None if data.has_varying_sizes else data.size
    augmentation = choose(augment)
    if augmentation is None:
        if (views := spec.serving.views) > 1:
            raise SettingError(
                f"views {views} of the centre would be the same picture {views} times; give "
                f"augment: 'train', 'crop', a loaders.RandomAugmentation or a function"
            )
        data.warn_if_smaller(resized_side(served, ratio), served)
        crops = Crops(stored, served, crop_ratio=ratio)
        return crops, None, crops
    if not isinstance(augmentation, RandomAugmentation):
        function = CheckedFunction(augmentation, spec.size)
        if function.takes_labels and spec.serving.views > 1:
            raise SettingError(
                f"views {spec.serving.views}: an augment function that returns labels makes one view; "
                f"give views 1, or mix the views in the training step"
            )
        # it is given all that is stored; where sizes vary, the middle of each
        crops = Crops(None, resized_side(served, ratio)) if data.has_varying_sizes else Crops(data.size, data.size)
        return crops, function, crops
    data.warn_if_smaller(served, served, enlarged=augmentation.scale is not None)
    if augmentation.jitters and (data.channels != 3 or data.dtype != np.uint8):
        raise SettingError(
            f"augment: brightness, contrast, saturation and hue are for RGB, not for {data.channels}-channel "
            f"pictures as of {data.path}; leave them at 0, or convert with channels rgb"
        )
    crops = Crops(stored, served, augmentation, spec.seed, spec.serving.views)
    if spec.device.type == "cuda" and stored is not None:
        return Crops(stored, stored), partial(augment_batch, augmentation, spec.seed, served), crops
    jitter = partial(augment_batch, augmentation, spec.seed, None) if augmentation.jitters else None
    return crops, jitter, crops
