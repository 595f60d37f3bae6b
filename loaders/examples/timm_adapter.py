"""Run timm's own train.py, unchanged, on our loaders.

    pip install 'precache[loaders]' timm
    git clone https://github.com/huggingface/pytorch-image-models  # at the tag of the installed timm
    python -m loaders.examples.timm_adapter pytorch-image-models/train.py --data-dir data/shards \
        --val-split val --model resnet50 --num-classes 257 --mixup 0.2 --reprob 0.25

Several GPUs: `torchrun --nproc-per-node 8 -m loaders.examples.timm_adapter ...`. timm's validate.py runs in
the same way. This module replaces `create_dataset` and `create_loader` of `timm.data` by its own functions
before it runs the script. `--resume`, `--grad-accum-steps` and `--no-prefetcher` work as ever. Who does what:

    the loader  crops, flips, `--aa rand-...` and `--aa 3a`, `--color-jitter`, `--color-jitter-prob`,
                `--grayscale-prob`, `--gaussian-blur-prob`, `--crop-pct`; `--reprob` with `--remode const`,
                where nothing is mixed and the model's mean is ImageNet's. What it draws depends on seed,
                epoch and sample alone.
    timm        MixUp and CutMix, which the script turns off after some epochs; other random erasing
    refused     options for single pictures or batches of changing size, such as `--aug-repeats`,
                `--train-img-sizes` and `--naflex-loader`; other policies of `--aa`, and other lists of
                operations, as in `rand-tweights`

Pictures are resized, and moved by RandAugment, bilinearly, whatever `--interpolation` and
`--train-interpolation` say; RandAugment fills up with ImageNet's mean, and moves by whole pixels. A rectangle
that the loader erases covers at most 0.33 of the picture, not 1/3.
"""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import timm.data
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN
from timm.data.mixup import FastCollateMixup, Mixup
from timm.data.random_erasing import RandomErasing

import loaders
from loaders.examples import common
from precache import SettingError

UNSUPPORTED_OPTIONS = {
    "vflip": "--vflip",
    "num_aug_repeats": "--aug-repeats",
    "num_aug_splits": "--aug-splits",
    "re_split": "--resplit",
    "train_crop_mode": "--train-crop-mode",
    "input_size_choices": "--train-img-sizes",
    "num_batches": "--train-batches-per-epoch",
    "tf_preprocessing": "--tf-preprocessing",
    "crop_border_pixels": "--crop-border-pixels",
}
"""Arguments of `create_loader` without a counterpart here -> the script's options for them."""


class TimmLoader:
    """A loader as timm's script expects it: with `mixup_enabled`, and batches of images and targets.

    Other attributes are those of our loader, which has what a DataLoader has: `dataset`, `sampler`,
    `batch_sampler`.

    Args:
        loader: our loader.
        channels: channels of the pictures that the model takes.
        mixup: timm's MixUp and CutMix; None: labels are not mixed.
        erase: timm's random erasing; None: nothing is erased.
    """

    def __init__(
        self, loader: loaders.Loader, channels: int, mixup: Mixup | None, erase: RandomErasing | None
    ) -> None:
        self.loader, self.channels, self.mixup, self.erase = loader, channels, mixup, erase
        self.mixup_enabled = mixup is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self.loader:
            images, labels = batch
            if images.shape[1] != self.channels:
                raise SettingError(
                    f"the model takes pictures of {self.channels} channels, and these have {images.shape[1]}",
                    remedy=f"give --in-chans {images.shape[1]}, or convert with other --channels",
                )
            if self.mixup is not None:
                # Without mixing, it still turns each label into a share for each class.
                self.mixup.mixup_enabled = self.mixup_enabled
                # The method of the base class, since that of FastCollateMixup collates single pictures.
                images, labels = Mixup.__call__(self.mixup, images, labels)
            if self.erase is not None:
                images = self.erase(images)
            yield images, labels


def create_dataset(name: str, root: str, split: str, **others: Any) -> SimpleNamespace:
    """Replace `timm.data.create_dataset`; `create_loader` sets the dataset's `set_epoch` to the loader's."""
    for option, value in (("--dataset", name), ("--class-map", others.get("class_map"))):
        if value:
            raise SettingError(
                f"{option} {value}: is not there with these loaders",
                remedy="convert the data, and give --data-dir",
            )
    return SimpleNamespace(path=root, split=split, seed=others.get("seed", 0), set_epoch=lambda epoch: None)


def create_naflex_loader(*_: object, **others: Any) -> NoReturn:
    """Replace `timm.data.create_naflex_loader`: refuse batches of changing size."""
    raise SettingError("--naflex-loader: is not there with these loaders", remedy="leave it out")


def create_loader(
    dataset: SimpleNamespace,
    input_size: tuple[int, int, int],
    batch_size: int,
    is_training: bool = False,
    **others: Any,
) -> TimmLoader:
    """Replace `timm.data.create_loader`; takes its arguments."""
    for name, option in UNSUPPORTED_OPTIONS.items():
        if others.get(name):
            raise SettingError(
                f"{option} {others[name]!r}: is not there with these loaders", remedy="leave it out"
            )
    if others.get("crop_mode") not in (None, "center"):
        raise SettingError(
            f"--crop-mode {others['crop_mode']}: is not there with these loaders", remedy="leave it out"
        )
    augments = is_training and not others.get("no_aug")
    mixup = others.get("collate_fn")
    if not isinstance(mixup, FastCollateMixup | None):
        raise SettingError(
            f"collate_fn {mixup!r}: batches come whole", remedy="give timm's FastCollateMixup or none"
        )
    if mixup is not None and batch_size % 2:
        raise SettingError(
            f"--batch-size {batch_size} with MixUp or CutMix, which mix pairs", remedy="give an even one"
        )
    crop_pct = others.get("crop_pct") or loaders.Serving().crop_ratio
    if is_training and not augments:
        crop_pct = 1.0
    device = others.get("device", torch.device("cuda"))
    re_prob = (others.get("re_prob") or 0.0) if augments else 0.0
    is_constant = others.get("re_mode", "const") == "const" and others.get("re_count", 1) == 1
    # timm mixes before it erases, and erases to the mean that pictures are normalised by
    erases_in_loader = is_constant and mixup is None and tuple(others["mean"]) == IMAGENET_DEFAULT_MEAN
    loader = loaders.build(
        dataset.path,
        split=dataset.split,
        batch_size=batch_size,
        size=input_size[-2:],
        device=device,
        augment=make_augmentation(erase=re_prob if erases_in_loader else 0.0, **others) if augments else None,
        shuffle=is_training,
        seed=dataset.seed,
        dtype=others.get("img_dtype") or torch.float32,
        normalize=(others["mean"], others["std"]),
        serving=loaders.Serving(crop_ratio=crop_pct),
        sampling=loaders.Sampling(last="drop" if is_training else "partial"),
        reading=loaders.Reading(workers=others.get("num_workers", "auto")),
    )
    dataset.set_epoch = loader.set_epoch
    erase = None
    if re_prob and not erases_in_loader:
        erase = RandomErasing(
            re_prob,
            mode=others.get("re_mode", "const"),
            max_count=others.get("re_count", 1),
            device=device,
        )
    return TimmLoader(loader, input_size[0], mixup, erase)


def make_augmentation(
    *,
    scale: Any = None,
    ratio: Any = None,
    hflip: float = 0.5,
    auto_augment: str | None = None,
    color_jitter: Any = 0.4,
    color_jitter_prob: float | None = None,
    grayscale_prob: float | None = None,
    gaussian_blur_prob: float | None = None,
    erase: float = 0.0,
    **_: object,
) -> loaders.RandomAugmentation:
    """Make our augmentation of timm's arguments; one number of `color_jitter` does not change the hue.

    Args:
        erase: share of the pictures in which a rectangle is erased.

    Raises:
        SettingError: `auto_augment` is a policy that is not there.
    """
    policy = None
    if auto_augment == "3a":
        policy = "three"
    elif auto_augment and auto_augment.startswith("rand"):
        policy, color_jitter = auto_augment, 0.0  # timm leaves colours to RandAugment
    elif auto_augment:
        raise SettingError(
            f"--aa {auto_augment!r}: is not there with these loaders",
            remedy="give RandAugment, as rand-m7-mstd0.5-inc1, or 3a",
        )
    if not isinstance(color_jitter, (tuple, list)):
        color_jitter = [color_jitter or 0.0] * 3  # brightness, contrast, saturation
    colors = dict(zip(("brightness", "contrast", "saturation", "hue"), color_jitter, strict=False))
    return loaders.RandomAugmentation(
        scale=tuple(scale or (0.08, 1.0)),
        ratio=tuple(ratio or (3 / 4, 4 / 3)),
        flip=hflip,
        policy=policy,
        jitter=1.0 if color_jitter_prob is None or not any(color_jitter) else color_jitter_prob,
        **colors,
        grey=grayscale_prob or 0.0,
        blur=gaussian_blur_prob or 0.0,
        erase=erase,
    )


def main() -> int:
    """Run the script that the first argument names, with the other arguments; return the exit code."""
    timm.data.create_dataset, timm.data.create_loader = create_dataset, create_loader
    timm.data.create_naflex_loader = create_naflex_loader

    def run_script() -> int:
        script = Path(sys.argv[1] if len(sys.argv) > 1 else "train.py")
        if not script.is_file():
            raise SettingError("no such file", path=script, remedy="give the path of timm's train.py")
        del sys.argv[0]
        runpy.run_path(str(script), run_name="__main__")
        return 0

    return common.run("timm_adapter", run_script)


if __name__ == "__main__":
    sys.exit(main())
