"""A transform of one picture draws by seed, epoch and sample alone, in any thread."""

import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms, tv_tensors
from torchvision.transforms import v2

import loaders
from precache.errors import SettingError

PICTURE = np.random.default_rng(0).integers(0, 256, (40, 48, 3), np.uint8)
GREY = PICTURE[..., :1]
KEYS = range(12)


def v1_pipeline() -> Any:
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(24),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            transforms.RandAugment(),
            transforms.ToTensor(),
            transforms.RandomErasing(value="random"),
        ]
    )


def v2_pipeline() -> Any:
    return v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(24),
            v2.RandomChoice([v2.TrivialAugmentWide(), v2.AutoAugment()]),
            v2.ToDtype(torch.float32, scale=True),
            v2.GaussianNoise(),
        ]
    )


def albumentations_pipeline() -> Any:
    albumentations = pytest.importorskip("albumentations", reason="pip install albumentations")
    return albumentations.Compose(
        [
            albumentations.RandomResizedCrop(size=(24, 24)),
            albumentations.HorizontalFlip(p=0.5),
            albumentations.SomeOf([albumentations.ColorJitter(p=1), albumentations.GaussNoise(p=1)], n=1),
        ]
    )


def own_function() -> Any:
    def transform(image: Image.Image) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(image)).float().permute(2, 0, 1)
        values = [
            torch.normal(0.0, 1.0, (1,)),
            torch.bernoulli(torch.full((1,), 0.5)),
            torch.binomial(torch.tensor([9.0]), torch.tensor([0.5])),
            torch.multinomial(torch.ones(9), 1).float(),
            torch.rand_like(pixels[0, 0, :1]),
            torch.distributions.Beta(torch.tensor([1.0]), torch.tensor([1.0])).sample(),
            torch.empty(1).exponential_(),
            torch.rand(1, generator=torch.Generator().manual_seed(7)),
        ]
        return pixels + torch.cat(values)[:, None, None].sum()

    return transform


@pytest.mark.parametrize("pipeline", [v1_pipeline, v2_pipeline, albumentations_pipeline, own_function])
def test_draws_depend_on_seed_epoch_and_key_alone(pipeline: Callable[[], Any]) -> None:
    transform = loaders.per_picture(pipeline())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    others = repr(np.random.get_state()), random.getstate()
    served = {key: transform.apply(PICTURE, 1, 2, key) for key in KEYS}
    assert len({picture.numpy().tobytes() for picture in served.values()}) == len(KEYS)
    assert not torch.equal(transform.apply(PICTURE, 1, 3, 0), served[0])
    assert not torch.equal(transform.apply(PICTURE, 2, 2, 0), served[0])
    copy = pickle.loads(pickle.dumps(transform)) if pipeline is not own_function else transform
    keys = [*reversed(KEYS)] * 4
    with ThreadPoolExecutor(4) as pool:
        pictures = list(pool.map(partial(copy.apply, PICTURE, 1, 2), keys))
    assert all(torch.equal(picture, served[key]) for key, picture in zip(keys, pictures, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert (repr(np.random.get_state()), random.getstate()) == others


def test_transforms_of_albumentations_draw_independently() -> None:
    albumentations = pytest.importorskip("albumentations", reason="pip install albumentations")
    flips = albumentations.Compose([albumentations.HorizontalFlip(p=0.5), albumentations.VerticalFlip(p=0.5)])
    transform = loaders.per_picture(flips)
    served = {transform.apply(PICTURE, 0, 0, key).numpy().tobytes() for key in range(40)}
    assert len(served) == 4


def test_draws_outside_of_the_transform_stay_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    random_numbers = [torch.rand(2)]
    loaders.per_picture(v1_pipeline()).apply(PICTURE, 0, 0, 0)
    random_numbers.append(torch.rand(2))
    assert torch.equal(torch.cat(random_numbers), expected)


@pytest.mark.parametrize("picture", [PICTURE, GREY], ids=["RGB", "grey"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda image: image,
        np.asarray,
        lambda image: np.array(image)[:, ::-1][:, ::-1],
        v2.functional.pil_to_tensor,
        v2.ToImage(),
    ],
    ids=["PIL image", "array", "view", "tensor", "image of torchvision"],
)
def test_a_transform_may_return_any_kind_of_picture(transform: Any, picture: np.ndarray) -> None:
    source = picture.copy()
    source.flags.writeable = False
    returned = loaders.per_picture(transform).apply(source, 0, 0, 0)
    assert type(returned) is torch.Tensor
    assert returned.dtype == torch.uint8
    assert np.array_equal(returned.permute(1, 2, 0), picture)
    returned.zero_()
    assert np.array_equal(source, picture), "it has memory of its own"


def test_floats_and_palettes_are_pictures() -> None:
    def scale(image: Image.Image) -> np.ndarray:
        return np.asarray(image, np.float32) / 255

    served = loaders.per_picture(scale).apply(PICTURE, 0, 0, 0)
    assert (served.dtype, served.shape) == (torch.float32, (3, 40, 48))
    quantized = loaders.per_picture(lambda image: image.quantize(256)).apply(PICTURE, 0, 0, 0)
    assert quantized.shape == (3, 40, 48)
    subclass = loaders.per_picture(v2.Compose([v2.ToImage(), v2.CenterCrop(8)])).apply(PICTURE, 0, 0, 0)
    assert not isinstance(subclass, tv_tensors.Image)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "got NoneType"),
        ([PICTURE, PICTURE], "got list; return the picture alone"),
        ({"image": PICTURE}, "got dict; return the picture alone"),
        (torch.zeros(2, 3, 4, 4), r"got float32 \[2, 3, 4, 4\]"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"got int64 \[3, 4, 4\]"),
        (PICTURE.transpose(2, 0, 1), r"got uint8 \[3, 40, 48\]; return torch.from_numpy"),
        (PICTURE[:0], r"got uint8 \[0, 48, 3\]"),
        (torch.zeros(3, 4, 4, device="meta"), r"got float32 \[3, 4, 4\] on meta"),
        (PICTURE > 3, r"got bool \[40, 48, 3\]"),
        (Image.new("1", (4, 4)), "got a PIL image of mode 1"),
    ],
)
def test_what_is_no_picture_is_refused(returned: Any, got: str) -> None:
    with pytest.raises(SettingError, match=got):
        loaders.per_picture(lambda image: returned).apply(PICTURE, 0, 0, 0)


@pytest.mark.parametrize(
    ("transform", "remedy"),
    [
        ("train", ""),
        (v2.RandAugment, "an instance"),
        (v2.functional.resize, "functools.partial"),
        (lambda images, ids, epoch: images, "augment= itself"),
    ],
)
def test_what_is_no_transform_of_one_picture_is_refused_at_once(transform: Any, remedy: str) -> None:
    with pytest.raises(SettingError, match="per_picture takes a transform of one picture") as caught:
        loaders.per_picture(transform)
    assert remedy in caught.value.remedy


def test_an_albumentations_that_cannot_be_seeded_is_refused() -> None:
    class Old:
        __module__ = "albumentations.core.composition"

        def __call__(self, *args: Any, **data: Any) -> Any:
            return data

    with pytest.raises(SettingError) as caught:
        loaders.per_picture(Old())
    assert "albumentations>=" in caught.value.remedy


def test_an_error_of_the_transform_is_raised_as_it_is() -> None:
    def fail(image: Image.Image) -> None:
        raise KeyError("mine")

    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        loaders.per_picture(fail).apply(PICTURE, 0, 0, 0)
    torch.rand(1)  # with the program's generator again
    assert not torch.equal(torch.get_rng_state(), state)
