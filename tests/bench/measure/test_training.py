"""The recipe: its models, its schedule, what decays, and the pictures that models are tried on."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from bench.measure.training import Training, schedule, validation_pictures
from loaders.batch import Batch
from tests.bench.squares import TINY


def test_a_seed_gives_the_weights_norms_do_not_decay_and_the_learning_rate_rises_and_falls() -> None:
    rates = [schedule(done) for done in (0, 0.1, 0.55, 1)]
    assert rates == pytest.approx([0.01, 1, 0.5, 0], abs=1e-3)
    first, again, other = (Training(replace(TINY, model="resnet10"), 3, 10, seed) for seed in (0, 0, 1))
    weights = first.model.state_dict()
    torch.testing.assert_close(weights, again.model.state_dict(), rtol=0, atol=0)
    assert any(not torch.equal(weights[name], value) for name, value in other.model.state_dict().items())
    decaying, others = first.optimizer.param_groups
    assert {weight.ndim for weight in decaying["params"]} == {2, 4}
    assert {weight.ndim for weight in others["params"]} == {1}
    assert (decaying["weight_decay"], others["weight_decay"]) == (5e-4, 0)


def test_trying_a_model_changes_nothing_and_does_not_depend_on_what_lies_in_one_batch() -> None:
    training = Training(TINY, 3, 10, 0)
    pixels = np.random.default_rng(0).integers(0, 256, (300, 16, 16, 3), dtype=np.uint8)
    labels = np.arange(300) % 3
    training.train([Batch(torch.randn(8, 3, 16, 16), torch.arange(8) % 3)])
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    parts = [training.top1(pixels[at : at + 100], labels[at : at + 100]) for at in (0, 100, 200)]
    assert training.top1(pixels, labels) == pytest.approx(np.mean(parts))
    torch.testing.assert_close(training.model.state_dict(), before, rtol=0, atol=0)


def test_validation_is_what_torchvision_shows_decoded_once_unless_a_file_changes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    photos = [str(tmp_path / f"{number}.png") for number in range(3)]
    for photo, shape in zip(photos, ((60, 90, 3), (81, 40, 3), (33, 33, 3)), strict=True):
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(photo)
    out = tmp_path / "out"
    out.mkdir()
    first = np.array(validation_pictures(photos, 28, out, 2))
    recipe = transforms.Compose([transforms.Resize(32, antialias=True), transforms.CenterCrop(28)])
    for photo, ours in zip(photos, first, strict=True):
        assert np.array_equal(ours, np.asarray(recipe(Image.open(photo).convert("RGB"))))
    (kept,) = out.iterdir()
    written_ns = kept.stat().st_mtime_ns
    assert np.array_equal(validation_pictures(photos, 28, out, 1), first)
    assert kept.stat().st_mtime_ns == written_ns
    Image.new("RGB", (50, 50)).save(photos[0])
    os.utime(photos[0], ns=(1, 1))
    assert not np.array_equal(validation_pictures(photos, 28, out, 1)[0], first[0])
