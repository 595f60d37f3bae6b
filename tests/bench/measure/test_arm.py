"""What is measured is told apart by its folder, where the kind of data does not tell."""

import shutil
from pathlib import Path

from bench.measure.arm import Arm, open_arms


def test_folders_of_one_kind_are_called_by_their_names(converted: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(converted["shards"], tmp_path / "keep")
    arms = [Arm("shards", converted["shards"]), Arm("shards", tmp_path / "keep")]
    opened, failed = open_arms([*arms, Arm("webdataset", converted["webdataset"])])
    assert failed == {}
    assert [arm.described for arm in opened] == ["shards shards", "shards keep", "webdataset"]
    alone, _ = open_arms(arms[:1])
    assert [arm.described for arm in alone] == ["shards"]
