"""The models, the recipe that all trainings share, and its step."""

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
    assert [learning_rate_factor(progress) for progress in (0, 0.1, 0.55, 1)] == pytest.approx(
        [0.01, 1, 0.5, 0], abs=1e-3
    )
    learner = make_learner()
    highest, rates = MODELS["resnet10"].lr, []
    for batch in make_batches(10):
        rates += [group["lr"] for group in learner.optimizer.param_groups][:1]
        learner.step(batch)
    assert rates == [highest * learning_rate_factor(step / 10) for step in range(10)]


def test_a_seed_gives_the_weights() -> None:
    first, again, other = (make_learner(seed=seed).model.state_dict() for seed in (0, 0, 1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert any(not torch.equal(first[name], value) for name, value in other.items())


@pytest.mark.parametrize("name", ["resnet10", "resnet18", "vit_s_16"])
def test_a_model_learns_and_norms_and_biases_do_not_decay(name: str) -> None:
    model = MODELS[name]
    learner = make_learner(name)
    decaying, others = learner.optimizer.param_groups
    assert {weight.ndim for weight in decaying["params"]} >= {2, 4}
    assert {weight.ndim for weight in others["params"]} == {1}
    assert decaying["weight_decay"] > others["weight_decay"] == 0
    (batch,) = make_batches(1, samples=2, side=model.size or SIDE)
    before = [weight.clone() for weight in decaying["params"]]
    loss, scores = learner.step(batch)
    assert (loss.shape, scores.shape) == ((), (2, CLASSES))
    assert any(not torch.equal(*pair) for pair in zip(before, decaying["params"], strict=True))


@pytest.mark.parametrize("lr", [0.0, -0.1, float("nan"), float("inf")])
def test_a_learning_rate_that_is_not_positive_is_refused(lr: float) -> None:
    with pytest.raises(SettingError, match="lr must be positive"):
        build_optimizer("resnet10", build_model("resnet10", CLASSES, 0), 10, lr)


def test_validating_changes_nothing_and_does_not_depend_on_the_batches() -> None:
    learner = make_learner()
    learner.train(make_batches(2))
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    batches = make_batches(6)
    parts = [learner.validate([batch]) for batch in batches]
    whole = learner.validate(batches)
    for name in ("validation_accuracy", "validation_loss"):
        assert whole[name] == pytest.approx(np.mean([part[name] for part in parts]))
    torch.testing.assert_close(learner.model.state_dict(), before, rtol=0, atol=0)


def test_padding_does_not_count() -> None:
    learner, (batch,) = make_learner(), make_batches(1)
    padding = torch.arange(8) >= 6
    padded = Batch(batch.images, batch.labels, batch.ids, padding)
    alone = Batch(batch.images[:6], batch.labels[:6], batch.ids[:6])
    assert (
        learner.validate([padded])["validation_accuracy"] == learner.validate([alone])["validation_accuracy"]
    )


def test_a_learner_that_goes_on_ends_with_the_same_weights() -> None:
    batches = make_batches(6)
    whole, first, second = make_learner(), make_learner(), make_learner(seed=1)
    whole.train(batches)
    served: list[int] = []
    first.train(batches, lambda: served.append(1) or len(served) == 2)
    second.load_state_dict(first.state_dict())
    second.train(batches[2:])
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)
