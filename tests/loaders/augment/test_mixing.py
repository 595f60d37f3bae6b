"""MixUp and CutMix: torchvision's values, and draws that depend on seed, epoch and batch alone."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from loaders.augment import mixing as module
from loaders.augment.mixing import (
    Mixing,
    check_mixable,
    draw_mixing,
    find_box,
    mix_images,
    mix_labels,
)
from precache.errors import SettingError

COUNT, CLASSES, HEIGHT, WIDTH = 6, 5, 40, 56
SHAPE = HEIGHT, WIDTH
IDS = np.arange(100, 100 + COUNT)
LABELS = torch.tensor([0, 3, 4, 1, 1, 2])
IMAGES = torch.randint(
    256, (COUNT, HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)
BOX = (3, 5, 20, 31)
MIXINGS = [
    Mixing(1 / math.pi, None, np.roll(np.arange(COUNT), 1)),
    Mixing(0.5, None, np.roll(np.arange(COUNT), 1)),
    Mixing(1 - 17 * 26 / (HEIGHT * WIDTH), BOX, np.roll(np.arange(COUNT), 1)),
]


def mix_by_torchvision(mixing: Mixing, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [n, height, width, channels], floats for MixUp, and labels, mixed by torchvision."""
    planes = IMAGES.permute(0, 3, 1, 2)
    params = {"labels": labels, "batch_size": COUNT, "lam": mixing.lam}
    transform = v2.MixUp(num_classes=CLASSES)
    if mixing.box is None:
        planes = planes.to(torch.float64)
    else:
        transform = v2.CutMix(num_classes=CLASSES)
        params.update(box=mixing.box, lam_adjusted=mixing.lam)
    return transform.transform(planes, params).permute(0, 2, 3, 1), transform.transform(labels, params)


@pytest.mark.parametrize("mixing", MIXINGS)
def test_a_mixed_batch_is_torchvisions(mixing: Mixing) -> None:
    original = IMAGES.clone()
    images, labels = mix_by_torchvision(mixing, LABELS)
    mixed = mix_images(IMAGES, mixing)
    assert mixed.dtype == torch.uint8
    assert (mixed - images).abs().max() <= (0.5001 if mixing.box is None else 0), "the nearest whole number"
    assert torch.equal(IMAGES, original)
    mixed_labels = mix_labels(LABELS, mixing, CLASSES)
    assert mixed_labels.dtype == torch.float32
    torch.testing.assert_close(mixed_labels, labels)
    torch.testing.assert_close(mixed_labels.sum(1), torch.ones(COUNT))
    several = torch.eye(CLASSES)[LABELS] + torch.eye(CLASSES)[(LABELS + 1) % CLASSES]
    torch.testing.assert_close(mix_labels(several, mixing, CLASSES), mix_by_torchvision(mixing, several)[1])


@pytest.mark.parametrize("mixing", MIXINGS)
def test_pictures_are_mixed_with_their_partners_in_any_memory(mixing: Mixing) -> None:
    expected = mix_images(IMAGES, mixing)
    memory = torch.empty(COUNT + 2, HEIGHT, WIDTH, 3, dtype=torch.uint8)[:COUNT]
    assert mix_images(IMAGES, mixing, out=memory) is memory
    assert torch.equal(memory, expected)
    in_place = IMAGES.clone()
    assert mix_images(in_place, mixing, out=in_place) is in_place
    assert torch.equal(in_place, expected)
    for slot, partner in enumerate(mixing.partners):
        pair = torch.stack([IMAGES[partner], IMAGES[slot]])  # the second is mixed with the first
        assert torch.equal(mix_images(pair, mixing)[1], expected[slot])


@pytest.mark.parametrize("mixing", MIXINGS)
def test_operations_of_a_device_mix_as_those_of_the_cpu(
    mixing: Mixing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 4)
    out, in_place = torch.empty_like(IMAGES), IMAGES.clone()
    module._mix_on_device(IMAGES, mixing, out)
    module._mix_on_device(in_place, mixing, in_place)
    assert torch.equal(in_place, out)
    differences = (out.int() - mix_images(IMAGES, mixing)).abs()
    assert differences.max() <= 1
    assert (differences > 0).float().mean() < 1e-4, "where float32 is nearly halfway between two numbers"


def test_boxes_are_those_of_torchvisions_cutmix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what torchvision draws is replaced, lam and the centre of the box."""
    transform = v2.CutMix(num_classes=CLASSES)
    for lam, x, y in itertools.product((0.0, 0.123, 0.5, 0.97, 1.0), (0, 20, 55), (0, 17, 39)):
        draws = iter((x, y))
        transform._dist = SimpleNamespace(sample=lambda shape, lam=lam: lam)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randint", lambda high, size, draws=draws: torch.tensor([next(draws)]))
            params = transform.make_params([torch.empty(2, 3, *SHAPE)])
        left, top, right, bottom = box = find_box(lam, x, y, SHAPE)
        assert box == params["box"]
        area = (right - left) * (bottom - top)
        assert params["lam_adjusted"] == 1 - area / (HEIGHT * WIDTH)


def draw_many(mixup: float, cutmix: float) -> list[Mixing]:
    mixings = [draw_mixing(mixup, cutmix, 1, 2, IDS + batch, SHAPE) for batch in range(3_000)]
    assert None not in mixings
    return mixings


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_lambda_is_distributed_as_beta(alpha: float) -> None:
    """3,000 numbers of a distribution lie within 0.036 of it in 999 of 1,000 cases (Kolmogorov, Smirnov)."""
    mixings = draw_many(alpha, 0)
    assert all(mixing.box is None for mixing in mixings)
    lams = np.sort([mixing.lam for mixing in mixings])
    torch.manual_seed(0)
    beta = torch.distributions.Beta(torch.tensor(alpha), torch.tensor(alpha)).sample((200_000,)).numpy()
    shares = np.searchsorted(np.sort(beta), lams) / len(beta)
    assert np.abs(shares - np.arange(len(lams)) / len(lams)).max() < 0.036
    boxes = [mixing.box for mixing in draw_many(0, alpha) if mixing.box is not None]
    assert len(boxes) == len(mixings)
    centres = [(left + right) / 2 for left, top, right, bottom in boxes if left and right < WIDTH]
    assert abs(np.mean(centres) - WIDTH / 2) < 1.5


def test_each_of_two_mixings_takes_half_of_the_batches() -> None:
    mixings = draw_many(0.8, 1.0)
    cutmixes = [mixing for mixing in mixings if mixing.box is not None]
    assert abs(len(cutmixes) / len(mixings) - 0.5) < 4 * math.sqrt(0.25 / len(mixings))
    for mixing in cutmixes:
        left, top, right, bottom = mixing.box or (0, 0, 0, 0)
        assert 0 <= left <= right <= WIDTH
        assert 0 <= top <= bottom <= HEIGHT
        assert mixing.lam == 1 - (right - left) * (bottom - top) / (HEIGHT * WIDTH)
    assert all(mixing.partners.tolist() == [5, 0, 1, 2, 3, 4] for mixing in mixings[:10])


def test_a_mixing_depends_on_seed_epoch_and_batch_alone() -> None:
    state = repr(np.random.get_state()), torch.get_rng_state()
    first = draw_mixing(0.8, 1.0, -3, 2, IDS, SHAPE)
    again = draw_mixing(0.8, 1.0, -3, 2, IDS.copy(), SHAPE)
    assert first is not None
    assert again is not None
    assert (first.lam, first.box) == (again.lam, again.box)
    for other in (
        draw_mixing(0.8, 1.0, -2, 2, IDS, SHAPE),
        draw_mixing(0.8, 1.0, -3, 3, IDS, SHAPE),
        draw_mixing(0.8, 1.0, -3, 2, IDS[::-1], SHAPE),
        draw_mixing(0.8, 1.0, -3, 2, IDS[:-1], SHAPE),
    ):
        assert other is not None
        assert other.lam != first.lam
    assert repr(np.random.get_state()) == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])


def test_nothing_is_mixed_where_there_is_nothing_to_mix() -> None:
    assert draw_mixing(0.8, 1.0, 0, 0, IDS[:1], SHAPE) is None
    assert draw_mixing(0.0, 0.0, 0, 0, IDS, SHAPE) is None


def test_mixing_needs_classes() -> None:
    for classes in (["cat", "dog"], []):
        check_mixable(0, 0, classes, "data/shards")
    check_mixable(0.2, 1, ["cat", "dog"], "data/shards")
    with pytest.raises(SettingError, match=r"mixup 0\.2 and cutmix 1, .*data/shards have none") as caught:
        check_mixable(0.2, 1, [], "data/shards")
    assert "mixup=0, cutmix=0" in caught.value.remedy
    with pytest.raises(SettingError, check=lambda error: "mixup" not in str(error)):
        check_mixable(0, 1.0, (), "data/shards")
