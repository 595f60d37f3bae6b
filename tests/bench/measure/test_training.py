"""The recipe: its models, its schedule, and what decays."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.measure.training import MODELS, Recipe, Training, schedule
from loaders.batch import Batch
from precache.errors import SettingError

CPU = torch.device("cpu")


def recipe(**settings: object) -> Recipe:
    usual = {"model": "tiny", "size": 16, "epochs": 2, "batch_size": 8, "lr": 0.2, "amp": "off"}
    return Recipe(**{**usual, **settings})  # type: ignore[arg-type]


def test_resnet10_is_as_small_as_it_says() -> None:
    model = MODELS["resnet10"](102)
    weights = sum(weight.numel() for weight in model.parameters())
    with FlopCounterMode(display=False) as counter:
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 102)
    assert weights == pytest.approx(1.25e6, rel=0.02)
    assert counter.get_total_flops() / 2 == pytest.approx(17e6, rel=0.05)


def test_the_learning_rate_rises_for_a_tenth_and_falls_to_nothing() -> None:
    rates = [schedule(step / 1000) for step in range(1001)]
    assert rates[0] == pytest.approx(0.01, abs=0.001)
    assert rates[100] == max(rates) == 1
    assert all(a < b for a, b in pairwise(rates[:101]))
    assert all(a > b for a, b in pairwise(rates[100:]))
    assert rates[550] == pytest.approx(0.5)
    assert rates[1000] == pytest.approx(0, abs=1e-12)


def test_a_seed_gives_the_weights_and_another_others() -> None:
    first, again, other = (Training(recipe(), 3, 10, seed, CPU).model.state_dict() for seed in (0, 0, 1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_norms_and_biases_do_not_decay() -> None:
    training = Training(recipe(model="resnet10"), 3, 10, 0, CPU)
    decaying, others = training.optimizer.param_groups
    assert {weight.ndim for weight in decaying["params"]} == {2, 4}
    assert {weight.ndim for weight in others["params"]} == {1}
    assert (decaying["weight_decay"], others["weight_decay"]) == (5e-4, 0)
    both = len(decaying["params"]) + len(others["params"])
    assert both == len(list(training.model.parameters()))


def test_the_model_is_tried_in_eval_mode_on_the_pixels_that_are_kept() -> None:
    training = Training(recipe(), 3, 10, 0, CPU)
    pixels = np.random.default_rng(0).integers(0, 256, (300, 16, 16, 3), dtype=np.uint8)
    labels = np.arange(300) % 3
    training.train([Batch(torch.randn(8, 3, 16, 16), torch.arange(8) % 3)])
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    right = training.right(pixels, labels)
    halves = training.right(pixels[:7], labels[:7]) + training.right(pixels[7:], labels[7:])
    assert right == halves  # whatever lies in one batch
    torch.testing.assert_close(training.model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": "vgg"}, "unknown model 'vgg'; choose from: resnet10"),
        ({"epochs": 0}, "epochs"),
        ({"lr": float("nan")}, "lr must be positive, got nan"),
        ({"amp": "int8"}, "unknown amp 'int8'"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, object], told: str) -> None:
    with pytest.raises(SettingError, match=told):
        recipe(**settings)
