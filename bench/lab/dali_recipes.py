"""Augmentation recipes by DALI's own operators, on the CPU: what its users would write over a raw tree.

Policies are those of `nvidia.dali.auto_aug`; RandAugment's magnitudes are 0 to 30 there, and each of its
operations is applied. Nothing is mixed: DALI has no operator that does it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.auto_aug.rand_augment import rand_augment
from nvidia.dali.auto_aug.trivial_augment import trivial_augment_wide

from loaders.augment.operations import ERASED
from loaders.augment.policies import RandomAugmentation, parse_rand_augment
from precache.pictures.images import sides

_MAGNITUDES = 3  # of DALI's for one of timm's


def serve(
    tree: Path, settings: RandomAugmentation, size: int, batch_size: int, threads: int
) -> Iterator[int]:
    """Serve shuffled batches without end, uint8 [n, height, width, 3] in main memory; yield their lengths."""
    pipeline = _define(
        tree, settings, size, batch_size=batch_size, num_threads=max(1, threads), device_id=None, seed=0
    )
    pipeline.build()
    while True:
        yield len(pipeline.run()[0])


@pipeline_def(enable_conditionals=True)  # type: ignore[untyped-decorator]
def _define(tree: Path, settings: RandomAugmentation, size: int) -> tuple[Any, ...]:
    """Define labels and views; DALI reads these functions, to find where they ask for each picture."""
    files, labels = fn.readers.file(file_root=str(tree), random_shuffle=True)
    views = settings.view_settings
    whole = fn.decoders.image(files) if len(views) > 1 else None
    served = []
    for view in views:
        side = sides(view.size or size)
        crop: dict[str, Any] = {"random_area": view.scale, "random_aspect_ratio": view.ratio}
        if whole is None:
            image = fn.decoders.image_random_crop(files, **crop)
            image = fn.resize(image, size=side, interp_type=types.INTERP_LINEAR, antialias=True)
        else:
            image = fn.random_resized_crop(whole, size=side, antialias=True, **crop)
        image = fn.flip(image, horizontal=fn.random.coin_flip(probability=view.flip))
        served.append(_augment(image, view, side))
    return (labels, *served)


def _augment(image: Any, view: RandomAugmentation, side: tuple[int, int]) -> Any:
    """Return an image with the operations of a view."""
    if view.policy == "trivial":
        image = trivial_augment_wide(image, shape=side)
    elif view.policy == "three":
        choice = fn.random.uniform(values=[0.0, 1.0, 2.0])
        if choice == 0:
            image = _grey(image)
        elif choice == 1:
            image = _solarize(image)
        else:
            image = _blur(image)
    elif view.policy is not None:
        policy = parse_rand_augment(view.policy)
        image = rand_augment(image, policy.steps, _MAGNITUDES * policy.magnitude, shape=side)
    changes: dict[Callable[[Any], Any], float] = {
        partial(_jitter, view=view): view.jitter * view.jitters,
        _grey: view.grey,
        _blur: view.blur,
        _solarize: view.solarize,
        _erase: view.erase,
    }
    for change in [change for change, probability in changes.items() if probability > 0]:
        if fn.random.coin_flip(probability=changes[change], dtype=types.BOOL):
            image = change(image)
    return image


def _jitter(image: Any, *, view: RandomAugmentation) -> Any:
    values = {name: getattr(view, name) for name in ("brightness", "contrast", "saturation")}
    ranges = {name: (max(0, 1 - value), 1 + value) for name, value in values.items() if value}
    if view.hue:
        ranges["hue"] = (-360 * view.hue, 360 * view.hue)  # degrees
    return fn.color_twist(image, **{name: fn.random.uniform(range=pair) for name, pair in ranges.items()})


def _grey(image: Any) -> Any:
    return fn.hsv(image, saturation=0.0)


def _blur(image: Any) -> Any:
    return fn.gaussian_blur(image, sigma=fn.random.uniform(range=(0.1, 2.0)))


def _solarize(image: Any) -> Any:
    return fn.cast(image * (image < 128) + (255 - image) * (image >= 128), dtype=types.UINT8)


def _erase(image: Any) -> Any:
    return fn.erase(
        image,
        anchor=fn.random.uniform(range=(0.0, 0.7), shape=2),
        shape=fn.random.uniform(range=(0.15, 0.5), shape=2),
        normalized=True,
        fill_value=ERASED,
    )
