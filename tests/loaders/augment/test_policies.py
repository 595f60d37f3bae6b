"""What policies and settings draw: the operations of torchvision and timm, as often and as strong."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from math import cos, radians, sin
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode, autoaugment, functional

from loaders.augment.draws import uniforms
from loaders.augment.geometry import random_boxes
from loaders.augment.operations import Operation, Operations
from loaders.augment.policies import (
    AUGMENTATIONS,
    RandAugment,
    RandomAugmentation,
    draw_augmentation,
    parse_rand_augment,
)
from precache.errors import SettingError
from tests.loaders.test_augment import largest_gap

COUNT = 20_000
SIZE = (40, 60)
EVERYTHING = RandomAugmentation(
    policy="rand-m7-mstd0.5-inc1-p1.0", brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grey=1, blur=1,
    solarize=1, erase=1,
)  # fmt: skip
Step = tuple[Operation, float]
"""An operation and the first of its values."""

_OPERATIONS = {
    "Identity": Operation.IDENTITY,
    "ShearX": Operation.SHEAR_X,
    "ShearY": Operation.SHEAR_Y,
    "TranslateX": Operation.TRANSLATE_X,
    "TranslateY": Operation.TRANSLATE_Y,
    "TranslateXRel": Operation.TRANSLATE_X,
    "TranslateYRel": Operation.TRANSLATE_Y,
    "Rotate": Operation.ROTATE,
    "Brightness": Operation.BRIGHTNESS,
    "Color": Operation.SATURATION,
    "Contrast": Operation.CONTRAST,
    "Sharpness": Operation.SHARPNESS,
    "Posterize": Operation.POSTERIZE,
    "Solarize": Operation.SOLARIZE,
    "SolarizeAdd": Operation.SOLARIZE_ADD,
    "AutoContrast": Operation.AUTOCONTRAST,
    "Equalize": Operation.EQUALIZE,
    "Invert": Operation.INVERT,
}
"""Operation by its name in torchvision and timm."""


def torchvision_step(name: str, magnitude: float) -> Step:
    """Return the step that torchvision's `_apply_op` makes."""
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        magnitude = 1 + magnitude
    elif name in ("TranslateX", "TranslateY", "Posterize"):
        magnitude = int(magnitude)
    return _OPERATIONS[name], magnitude


def timm_step(name: str, *values: float) -> Step:
    """Return the step that a function of timm's `NAME_TO_OP` makes."""
    (value,) = values or (0.0,)
    if name == "TranslateXRel":
        value = -np.round(value * SIZE[1])
    elif name == "TranslateYRel":
        value = -np.round(value * SIZE[0])
    return _OPERATIONS[name.removesuffix("Increasing")], value


def drawn_operations(settings: RandomAugmentation, count: int = COUNT, seed: int = 0) -> Operations:
    return draw_augmentation(settings, 256, SIZE, seed, 0, np.arange(count)).operations


def drawn_steps(operations: Operations) -> list[Step]:
    codes, values = operations.codes.ravel().tolist(), operations.values[..., 0].ravel().tolist()
    return [(Operation(code), value) for code, value in zip(codes, values, strict=True)]


def assert_same_frequencies(drawn: Iterable[Any], recorded: Iterable[Any]) -> None:
    """Compare two samples by chi-square, which lies within 4 standard deviations of its mean."""
    counts, others = Counter(drawn), Counter(recorded)
    assert counts.keys() == others.keys()
    ratio = counts.total() / others.total()
    distance = sum(
        (counts[key] - ratio * others[key]) ** 2 / (ratio * (counts[key] + others[key])) for key in counts
    )
    freedom = len(counts) - 1
    assert distance <= freedom + 4 * (2 * freedom) ** 0.5


def assert_same_distribution(drawn: Any, recorded: Any) -> None:
    """Compare two samples of numbers, which lie within this bound in 9,999 of 10,000 cases."""
    a, b = np.asarray(drawn, float), np.asarray(recorded, float)
    assert largest_gap(a, b) < 2.23 * (1 / len(a) + 1 / len(b)) ** 0.5


def rounded(steps: Iterable[Step]) -> list[Step]:
    return [(operation, round(value, 4) + 0.0) for operation, value in steps]  # no -0.0


def test_trivial_draws_as_torchvisions_trivial_augment_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Step] = []

    def record(image: Any, name: str, magnitude: float, **others: Any) -> Any:
        recorded.append(torchvision_step(name, magnitude))
        return image

    torch.manual_seed(0)
    augment = transforms.TrivialAugmentWide()
    space = augment._augmentation_space(31)
    monkeypatch.setattr(augment, "_augmentation_space", lambda bins: space)  # it takes most of the time
    monkeypatch.setattr(autoaugment, "_apply_op", record)
    picture = Image.new("RGB", (8, 8))
    for _ in range(COUNT):
        augment(picture)
    operations = drawn_operations(RandomAugmentation(policy="trivial"))
    assert operations.codes.shape == (COUNT, 1)
    assert operations.fill == (0, 0, 0)
    assert_same_frequencies(rounded(drawn_steps(operations)), rounded(recorded))


@pytest.mark.parametrize(
    "policy",
    [
        "rand-m7-mstd0.5-inc1",
        "rand-m9-n3-mstd1.5-p0.7",
        "rand-m10-mstd101-n1-inc1",
        "rand-m12-mmax15-inc1",
        "rand",
    ],
)
def test_rand_augment_draws_as_timms(policy: str) -> None:
    auto_augment = pytest.importorskip("timm.data.auto_augment", reason="pip install 'precache[frameworks]'")
    pictures: list[list[Step]] = []
    augment = auto_augment.rand_augment_transform(policy, {"img_mean": (124, 116, 104)})
    for operation in augment.ops:
        operation.aug_fn = partial(
            lambda name, picture, *values, **others: pictures[-1].append(timm_step(name, *values)),
            operation.name,
        )
    auto_augment.random.seed(0)
    np.random.seed(0)  # timm draws by it
    for _ in range(COUNT):
        pictures.append([])
        augment(None)
    recorded = [step for steps in pictures for step in steps]

    operations = drawn_operations(RandomAugmentation(policy=policy))
    assert operations.fill == (124, 116, 104)
    applied = (operations.codes != Operation.IDENTITY).sum(axis=1).tolist()
    assert_same_frequencies(applied, map(len, pictures))
    drawn = [step for step in drawn_steps(operations) if step[0] != Operation.IDENTITY]
    assert_same_frequencies([code for code, _ in drawn], [code for code, _ in recorded])
    for code in {code for code, _ in drawn}:
        # a shift may round up or down by a last bit
        values = [[value for step, value in steps if step == code] for steps in (drawn, recorded)]
        assert_same_distribution(*(np.round(samples, 9) for samples in values))


def test_three_draws_grey_solarize_and_blur_as_often() -> None:
    operations = drawn_operations(RandomAugmentation(policy="three"))
    codes, values = operations.codes[:, 0], operations.values[:, 0, 0]
    expected = np.repeat([Operation.GREY, Operation.SOLARIZE, Operation.BLUR], COUNT)
    assert_same_frequencies(codes.tolist(), expected.tolist())
    assert set(values[codes == Operation.SOLARIZE]) == {128}
    assert_same_distribution(values[codes == Operation.BLUR], np.linspace(0.1, 2, COUNT))


@pytest.mark.parametrize("changed", [(0, 1, 2, 3), (1, 3), (2,)])
def test_jitter_draws_order_and_factors_as_torchvision(changed: tuple[int, ...]) -> None:
    names = ("brightness", "contrast", "saturation", "hue")
    ranges = {names[number]: (0.8, 1.4, 0.2, 0.1)[number] for number in changed}
    numbers = {Operation.BRIGHTNESS: 0, Operation.CONTRAST: 1, Operation.SATURATION: 2, Operation.HUE: 3}
    jitter = transforms.ColorJitter(**ranges)
    torch.manual_seed(0)
    recorded = [
        jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        for _ in range(COUNT)
    ]
    operations = drawn_operations(RandomAugmentation(**ranges))
    assert operations.codes.shape == (COUNT, len(changed))
    orders = [tuple(numbers[Operation(code)] for code in row) for row in operations.codes.tolist()]
    expected = [tuple(number for number in order.tolist() if number in changed) for order, *_ in recorded]
    assert_same_frequencies(orders, expected)
    for code, number in numbers.items():
        values = operations.values[operations.codes == code][:, 0]
        assert len(values) == (COUNT if number in changed else 0)
        if number in changed:
            assert_same_distribution(values, [factors[number] for _, *factors in recorded])


@pytest.mark.parametrize("size", [SIZE, 224])
def test_erase_draws_as_torchvisions_random_erasing(size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[int, ...]] = []

    def record(image: Any, top: int, left: int, height: int, width: int, *others: Any) -> Any:
        if height < image.shape[1]:  # else no rectangle fitted, and the picture replaces itself
            recorded.append((left, top, width, height))
        return image

    monkeypatch.setattr(functional, "erase", record)
    torch.manual_seed(0)
    erase = transforms.RandomErasing(p=0.5)
    rows, columns = (size, size) if isinstance(size, int) else size
    picture = torch.empty(1, 1, 1).expand(3, rows, columns)
    for _ in range(COUNT):
        erase(picture)
    operations = draw_augmentation(
        RandomAugmentation(erase=0.5), 256, size, 0, 0, np.arange(COUNT)
    ).operations
    boxes = operations.values[operations.codes == Operation.ERASE]
    assert abs(len(boxes) - len(recorded)) < 4 * (COUNT / 2) ** 0.5
    for drawn, expected in zip(boxes.T, np.array(recorded).T, strict=True):
        assert_same_distribution(drawn, expected)
    shapes = boxes[:, 2] / boxes[:, 3]
    assert_same_distribution(shapes, [width / height for _, _, width, height in recorded])
    left, top, width, height = boxes.T
    assert min(left.min(), top.min()) == 0
    assert (left + width).max() == columns
    assert (top + height).max() == rows


def test_no_rectangle_is_erased_where_none_fits() -> None:
    erase = RandomAugmentation(erase=1.0)
    operations = draw_augmentation(erase, 256, (1, 300), 0, 0, np.arange(100)).operations
    assert operations.codes.shape == (100, 1)
    assert not operations.codes.any()
    assert not operations.values.any()


@pytest.mark.parametrize("setting", ["jitter", "grey", "blur", "solarize"])
def test_probabilities_are_those_of_the_settings(setting: str) -> None:
    settings = {"jitter": 0.0, setting: 0.3}
    operations = drawn_operations(RandomAugmentation(hue=0.1, **settings))
    assert operations.codes.shape == (COUNT, 1)
    applied = operations.codes[:, 0] != Operation.IDENTITY
    assert abs(applied.mean() - 0.3) < 4 * (0.3 * 0.7 / COUNT) ** 0.5
    assert not operations.values[~applied].any()


def test_steps_come_in_the_order_of_the_recipes() -> None:
    codes = drawn_operations(EVERYTHING, 100).codes
    assert codes.shape == (100, 2 + 4 + 4)
    jittered = {Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION, Operation.HUE}
    assert all(set(row) == jittered for row in codes[:, 2:6].tolist())
    last = [Operation.GREY, Operation.BLUR, Operation.SOLARIZE, Operation.ERASE]
    assert (codes[:, 6:] == last).all()


def test_crops_and_flips_do_not_depend_on_the_operations() -> None:
    ids = np.arange(500)
    uniform = uniforms(3, 2, ids, 41)
    boxes = random_boxes(256, uniform[:, :40], (0.08, 1.0), (3 / 4, 4 / 3))
    for settings in (RandomAugmentation(), EVERYTHING, RandomAugmentation(policy="trivial", grey=0.1)):
        draws = draw_augmentation(settings, 256, SIZE, 3, 2, ids)
        assert np.array_equal(draws.boxes, boxes)
        assert np.array_equal(draws.mirrored, uniform[:, 40] < 0.5)
    assert draw_augmentation(RandomAugmentation(), 256, SIZE, 3, 2, ids).operations.values.shape == (
        500,
        0,
        4,
    )


def test_a_setting_changes_no_draw_of_another() -> None:
    everything = drawn_operations(EVERYTHING, 100)
    without = drawn_operations(RandomAugmentation(hue=0.1, erase=1), 100)
    rows, steps = np.nonzero(everything.codes == Operation.HUE)
    assert np.array_equal(everything.values[rows, steps], without.values[:, 0])
    assert np.array_equal(everything.values[:, -1], without.values[:, 1])


@pytest.mark.parametrize("name", [name for name, settings in AUGMENTATIONS.items() if settings])
def test_a_picture_alone_draws_as_in_a_batch(name: Any) -> None:
    augmentation = AUGMENTATIONS[name]
    assert augmentation is not None
    ids = np.array([5, 2**40, -7, 0, 11])
    for view in {*augmentation.view_settings, EVERYTHING}:
        batch = draw_augmentation(view, 256, SIZE, 1, 4, ids)
        for number in range(len(ids)):
            alone = draw_augmentation(view, 256, SIZE, 1, 4, ids[number : number + 1])
            assert np.array_equal(alone.boxes[0], batch.boxes[number])
            assert alone.mirrored[0] == batch.mirrored[number]
            assert np.array_equal(alone.operations.codes[0], batch.operations.codes[number])
            assert np.array_equal(alone.operations.values[0], batch.operations.values[number])
        assert alone.operations.codes.dtype == np.int8
        assert alone.operations.values.dtype == np.float64
        assert bool(batch.operations.codes.shape[1]) == view.has_operations


def moved(picture: np.ndarray, operation: Operation, value: float) -> np.ndarray:
    """Move pixels of a picture [side, side, 3] as the value of a geometric operation means it; 0 outside.

    Coordinates are those of the centres of pixels. A positive shear moves a row to the left, or a column up;
    a positive shift moves right or down; a positive angle turns counter-clockwise.
    """
    side = len(picture)
    y, x = np.mgrid[:side, :side] + 0.5
    turned_x, turned_y = x - side / 2, side / 2 - y
    cosine, sine = cos(radians(value)), sin(radians(value))
    source_x, source_y = {
        Operation.SHEAR_X: (x + value * y, y),
        Operation.SHEAR_Y: (x, y + value * x),
        Operation.TRANSLATE_X: (x - value, y),
        Operation.TRANSLATE_Y: (x, y - value),
        Operation.ROTATE: (
            side / 2 + turned_x * cosine + turned_y * sine,
            side / 2 - (turned_y * cosine - turned_x * sine),
        ),
    }[operation]
    columns, rows = np.floor(source_x).astype(int), np.floor(source_y).astype(int)
    is_inside = (columns >= 0) & (columns < side) & (rows >= 0) & (rows < side)
    pixels = picture[rows.clip(0, side - 1), columns.clip(0, side - 1)]
    return np.where(is_inside[..., None], pixels, 0)


DIRECTIONS = ("ShearX", 0.5), ("ShearY", 0.5), ("TranslateX", 3.0), ("TranslateY", -2.0), ("Rotate", 90.0)
NOISE = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)


@pytest.mark.parametrize(("name", "magnitude"), DIRECTIONS)
def test_values_have_the_directions_of_torchvision(name: str, magnitude: float) -> None:
    served = autoaugment._apply_op(Image.fromarray(NOISE), name, magnitude, InterpolationMode.NEAREST, None)
    assert np.array_equal(np.asarray(served), moved(NOISE, *torchvision_step(name, magnitude)))


@pytest.mark.parametrize(("name", "magnitude"), DIRECTIONS)
def test_values_have_the_directions_of_timm(
    name: str, magnitude: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto_augment = pytest.importorskip("timm.data.auto_augment", reason="pip install 'precache[frameworks]'")
    if name.startswith("Translate"):
        name, magnitude = f"{name}Rel", magnitude / len(NOISE)
        monkeypatch.setattr("tests.loaders.augment.test_policies.SIZE", NOISE.shape[:2])
    served = auto_augment.NAME_TO_OP[name](
        Image.fromarray(NOISE), magnitude, resample=Image.Resampling.NEAREST, fillcolor=(0, 0, 0)
    )
    assert np.array_equal(np.asarray(served), moved(NOISE, *timm_step(name, magnitude)))


def test_rand_augment_is_parsed() -> None:
    assert parse_rand_augment("rand") == RandAugment()
    policy = parse_rand_augment("rand-n3-m12-mstd0.5-mmax20-inc1-p0.25")
    assert policy == RandAugment(
        magnitude=12, steps=3, probability=0.25, deviation=0.5, max_magnitude=20, increasing=True
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "rand-m11"}, r"policy 'rand-m11': magnitudes are 0 to 10"),
        ({"scale": ()}, "scale must be two numbers"),
        ({"scale": 0}, "scale must be two numbers"),
        ({"ratio": np.array([1.0, 2.0])}, "ratio must be two numbers"),
        ({"policy": "rand-m7.5"}, "policy 'rand-m7.5': m must be a whole number"),
        ({"policy": "rand-n0"}, "n is from 1 to 16"),
        ({"policy": "rand-p1.5"}, "p is a probability"),
        ({"policy": "rand-inc2"}, "inc is 0 or 1"),
        ({"policy": "rand-mmax31"}, "mmax is from 10 to 30"),
        ({"policy": "rand-m7-m8"}, "m is given twice"),
        ({"policy": "rand-m7-tweights"}, "'tweights' is not one of m, n, p, mstd, mmax, inc"),
        ({"policy": "rand-m7-w0"}, "'w0' is not one of"),
        ({"policy": "rand-"}, "'' is not one of"),
        ({"policy": "randm7"}, "unknown policy 'randm7'; choose 'trivial', 'three' or RandAugment"),
        ({"policy": 3}, "unknown policy 3"),
        ({"policy": ["trivial"]}, r"unknown policy \['trivial'\]"),
        ({"jitter": 1.1}, "jitter must be a share from 0 to 1, got 1.1"),
        ({"jitter": 0.4}, "jitter 0.4 is the probability .* by how much; give brightness"),
        ({"grey": -1}, "grey must be a share"),
        ({"blur": "often"}, "blur must be a share"),
        ({"solarize": 2}, "solarize must be a share"),
        ({"erase": True}, "erase must be a share"),
        ({"mixup": -0.2}, "mixup must be a number from 0 to 1,000, got -0.2"),
        ({"cutmix": float("inf")}, "cutmix must be a number from 0"),
        ({"brightness": float("nan")}, "brightness must be"),
        ({"hue": 0.6}, "hue must be from 0 to 0.5"),
        ({"views": 0}, "views must be an integer from 1 to 64"),
        ({"views": 65}, "views must be an integer from 1 to 64"),
        ({"views": "2"}, "views must be an integer from 1 to 64"),
        ({"views": ()}, "number of views must be an integer from 1 to 64, got 0"),
        ({"views": [RandomAugmentation(), 2]}, r"views\[1\] must be a loaders.RandomAugmentation"),
        ({"views": [RandomAugmentation(views=2)]}, r"views\[0\] has views of its own"),
        ({"views": [RandomAugmentation(mixup=0.1)]}, r"views\[0\] has mixup or cutmix"),
        ({"views": [RandomAugmentation()], "grey": 0.1}, "grey is given beside settings of each view"),
        ({"size": 0}, "size must be an integer from 1"),
        ({"size": (8, 8, 3)}, "size must be an integer, or height and width"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        RandomAugmentation(**settings)


def test_properties_name_what_a_recipe_needs() -> None:
    mixing = {name for name, settings in AUGMENTATIONS.items() if settings and settings.mixes}
    assert mixing == {"torchvision", "timm-a1", "timm-a2", "timm-a3", "deit3"}
    plain = {name for name, settings in AUGMENTATIONS.items() if settings and not settings.has_operations}
    assert plain == {"crop", "train"}
    assert not RandomAugmentation(brightness=0.4, jitter=0).has_operations
    dino, simclr = AUGMENTATIONS["dino"], AUGMENTATIONS["simclr"]
    assert dino is not None
    assert simclr is not None
    assert dino.needs_colour == simclr.needs_colour == ("saturation", "hue", "grey")
    assert RandomAugmentation(brightness=0.1, solarize=0.5).needs_colour == ()
    three = RandomAugmentation(policy="three", saturation=0.1)
    assert three.needs_colour == ("grey of policy 'three'", "saturation")
    assert [view.size for view in dino.view_settings] == [None] * 2 + [96] * 8
    assert [view.views for view in simclr.view_settings] == [1, 1]
    view = {"size": [8, 8], "scale": [0.2, 1], "ratio": [1, 2]}  # lists, as argparse makes them
    tuples = {name: tuple(pair) for name, pair in view.items()}
    assert len({RandomAugmentation(views=[RandomAugmentation(**pairs)]) for pairs in (view, tuples)}) == 1
