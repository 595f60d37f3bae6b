"""What floats are normalised with: ImageNet's figures, the dataset's own, the caller's, or nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from precache import convert, open_dataset
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import small_recipe

MEAN, STD = (0.5, 0.25, 0.125), (0.5, 2.0, 0.25)


def served(path: Path, **settings: Any) -> torch.Tensor:
    with build_loader(path, shuffle=False, workers=1, batch_size=70, **settings) as loader:
        return torch.cat([batch.images for batch in loader])


@pytest.mark.parametrize(("splits", "of", "by"), [("train,val", "val", "train"), ("one,two", "two", "two")])
def test_every_split_is_normalised_as_the_training_split(
    splits: str, of: str, by: str, raw_tree: Path, tmp_path: Path
) -> None:
    shares = f"{splits.replace(',', '=0.7,')}=0.3"
    convert(raw_tree, tmp_path / "a", small_recipe("shards", splits=shares), workers=0)
    found = open_dataset(tmp_path / "a").manifest.statistics[by]
    pixels = served(tmp_path / "a", split=of)
    for normalize, mean, std in (
        ("dataset", found.mean, found.std),
        (None, [0.0], [1.0]),
        ((np.array(MEAN), list(STD)), MEAN, STD),
        ((0.5, 0.25), [0.5], [0.25]),
    ):
        floats = served(tmp_path / "a", dtype="float32", normalize=normalize, split=of)
        shift, scale = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 1) for part in (mean, std))
        assert torch.allclose(floats, (pixels / 255 - shift) / scale, atol=1e-4)
        assert torch.equal(served(tmp_path / "a", normalize=normalize, split=of), pixels), "integers are not"


@pytest.mark.parametrize("normalize", ["imagnet", (MEAN,), (MEAN, (0.0, 1.0, 1.0)), (("a", "b", "c"), STD)])
def test_a_wrong_setting_says_what_would_do(converted: dict[str, Path], normalize: Any) -> None:
    with pytest.raises(SettingError, match=r"normalize.*('imagenet', 'dataset'|dataset, imagenet)"):
        build_loader(converted["shards"], normalize=normalize)
