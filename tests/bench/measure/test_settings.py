"""The one dataclass of a trial: what it refuses, what it becomes, and that it pickles."""

import pickle
from pathlib import Path

import pytest

from precache.storage.urls import Location, locate
from tests.bench.settings import quick


def test_a_trial_has_its_own_loader_and_all_else_of_its_command() -> None:
    common = quick(trainer="emulated:100", augment="train", cold=True)
    trial = common.of("shards", Path("data/shards"), 5, workers=3)
    assert (trial.backend, trial.path, trial.classes, trial.workers) == ("shards", Path("data/shards"), 5, 3)
    assert trial.of("", Path(), 1, workers=1) == common


@pytest.mark.parametrize("path", [Path("data/raw"), locate("s3://bucket/set")])
def test_settings_survive_pickling(path: Location) -> None:
    settings = quick(trainer="emulated:h100x8", backend="shards", path=path, classes=7, rank=1, world_size=2)
    assert pickle.loads(pickle.dumps(settings)) == settings
