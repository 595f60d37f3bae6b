"""The types of settings list the names of all backends and augmentations."""

from typing import get_args

from loaders.augment.policies import AUGMENTATIONS
from loaders.read import BACKENDS
from loaders.settings import AugmentName, Backend


def test_types_list_every_backend_and_augmentation() -> None:
    assert {*BACKENDS, "auto"} == set(get_args(Backend))
    assert AUGMENTATIONS.keys() == set(get_args(AugmentName))
