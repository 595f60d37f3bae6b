"""Models, learning rates and training steps of the examples."""

import numpy as np
import pytest
import torch

from loaders.batch import Batch
from loaders.examples.models import MODELS, build_model, build_optimizer, learning_rate_factor
from loaders.examples.train import Learner
from precache.errors import SettingError

SIDE, CLASSES = 32, 3


def make_learner(name: str = "resnet10", seed: int = 0) -> Learner:
    model = build_model(name, CLASSES, seed)
    return Learner(model, *build_optimizer(name, model, steps=10))


def make_batches(count: int, samples: int = 8, side: int = SIDE) -> list[Batch]:
    torch.manual_seed(5)
    ids = torch.arange(samples)
    return [Batch(torch.randn(samples, 3, side, side), ids % CLASSES, ids) for _ in range(count)]


def test_learning_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    factors = [learning_rate_factor(progress) for progress in (0, 0.1, 0.55, 1)]
    assert factors == pytest.approx([0.01, 1, 0.5, 0], abs=1e-3)
    learner = make_learner()
    highest, rates = MODELS["resnet10"].lr, []
    for batch in make_batches(10):
        rates += [group["lr"] for group in learner.optimizer.param_groups][:1]
        learner.step(batch)
    assert rates == [highest * learning_rate_factor(step / 10) for step in range(10)]


def test_first_weights_depend_on_the_seed() -> None:
    first, again, other = (make_learner(seed=seed).model.state_dict() for seed in (0, 0, 1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert any(not torch.equal(first[name], value) for name, value in other.items())


@pytest.mark.parametrize("name", ["resnet10", "resnet18", "vit_s_16"])
def test_step_changes_the_weights(name: str) -> None:
    learner = make_learner(name)
    (batch,) = make_batches(1, samples=2, side=MODELS[name].size or SIDE)
    before = [weight.clone() for weight in learner.model.parameters()]
    loss, scores = learner.step(batch)
    assert (loss.shape, scores.shape) == ((), (2, CLASSES))
    after = learner.model.parameters()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["resnet10", "resnet18", "vit_s_16"])
def test_norms_and_biases_do_not_decay(name: str) -> None:
    decaying, others = make_learner(name).optimizer.param_groups
    assert {weight.ndim for weight in decaying["params"]} >= {2, 4}
    assert {weight.ndim for weight in others["params"]} == {1}
    assert decaying["weight_decay"] > 0
    assert others["weight_decay"] == 0


@pytest.mark.parametrize("lr", [0.0, -0.1, float("nan"), float("inf")])
def test_build_optimizer_refuses_a_learning_rate_that_is_not_positive(lr: float) -> None:
    with pytest.raises(SettingError, match="lr "):
        build_optimizer("resnet10", build_model("resnet10", CLASSES, 0), 10, lr)


def test_validation_does_not_change_the_model() -> None:
    learner = make_learner()
    learner.train(make_batches(2))
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    learner.validate(make_batches(6))
    torch.testing.assert_close(learner.model.state_dict(), before, rtol=0, atol=0)


def test_validation_figures_are_means_over_all_samples() -> None:
    learner, batches = make_learner(), make_batches(6)
    learner.train(make_batches(2))
    parts = [learner.validate([batch]) for batch in batches]
    whole = learner.validate(batches)
    for name in ("validation_accuracy", "validation_loss"):
        assert whole[name] == pytest.approx(np.mean([part[name] for part in parts]))


def test_padding_does_not_count_in_the_accuracy() -> None:
    learner, (batch,) = make_learner(), make_batches(1)
    padding = torch.arange(8) >= 6
    padded = Batch(batch.images, batch.labels, batch.ids, padding)
    alone = Batch(batch.images[:6], batch.labels[:6], batch.ids[:6])
    first, second = (learner.validate([batch])["validation_accuracy"] for batch in (padded, alone))
    assert first == second


def test_resumed_learner_ends_with_the_same_weights() -> None:
    batches = make_batches(6)
    whole, first, second = make_learner(), make_learner(), make_learner(seed=1)
    whole.train(batches)
    steps = 0

    def should_stop() -> bool:
        nonlocal steps
        steps += 1
        return steps == 2

    first.train(batches, should_stop)
    second.load_state_dict(first.state_dict())
    second.train(batches[2:])
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)
