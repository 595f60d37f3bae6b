"""The one dataclass of a trial: what it refuses, what it becomes, and that it pickles."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from precache.errors import SettingError
from precache.storage.urls import Location, locate
from tests.bench.settings import quick


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"warmup": -1}, "warmup must be an integer of at least 0, got -1"),
        ({"workers": -1}, "workers must be an integer of at least 0, got -1"),
        ({"size": 8193}, "size must be an integer from 1 to 8,192, got 8193"),
        ({"augment": "flip"}, "unknown augment 'flip'; choose from: "),
        ({"cache": "disk"}, "unknown cache 'disk'; choose from: device, none, ram"),
        ({"cache": "ram", "cold": True}, "cache 'ram' is full before anything is timed.*--cold"),
        ({"trainer": "resnet51"}, "unknown trainer 'resnet51'; choose from: auto, none, resnet18"),
        ({"trainer": "none", "compiled": True}, "compile is for trainers that compute, got 'none'"),
        ({"trainer": "vit_s_16", "size": 64}, "takes pictures of 224 pixels a side, got size 64"),
    ],
)
def test_a_bad_value_is_named_with_what_would_do(bad: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        quick(**bad)


def test_a_trial_has_its_own_loader_and_all_else_of_its_command() -> None:
    common = quick(trainer="emulated:100", augment="train", cold=True)
    trial = common.of("shards", Path("data/shards"), 5, workers=3)
    assert (trial.backend, trial.path, trial.classes, trial.workers) == ("shards", Path("data/shards"), 5, 3)
    assert trial.of("", Path(), 1, workers=1) == common


@pytest.mark.parametrize("path", [Path("data/raw"), locate("s3://bucket/set")])
def test_settings_survive_pickling(path: Location) -> None:
    settings = quick(trainer="emulated:h100x8", backend="shards", path=path, classes=7, rank=1, world_size=2)
    assert pickle.loads(pickle.dumps(settings)) == settings
