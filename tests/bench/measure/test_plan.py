import json
import os
from pathlib import Path

import pytest

from bench.measure import plan
from precache.errors import SettingError
from precache.sources.tree import scan_tree


def test_a_tree_has_as_many_names_as_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MOST_LINKS", 30)
    tree = plan.make_tree(tmp_path / "made", 100, 7)
    scan = scan_tree(tree)
    assert (len(scan.samples), len(scan.classes)) == (100, 7)
    assert max(os.stat(tree / ref.path).st_nlink for ref in scan.samples) == 30 + 1  # and the original
    assert plan.make_tree(tmp_path / "made", 100, 7) == tree
    with pytest.raises(SettingError, match="remove it"):
        plan.make_tree(tmp_path / "made", 101, 7)


def test_it_prints_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--names", "200", "--classes", "4", "--workers", "0", "--whole")
    plan.main([str(tmp_path / "made"), *options], standalone_mode=False)
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if "MiB" in line]
    stages = ("start", "scan", "digest, one by one", "plan", "100 tasks", "first shard begins")
    for line, stage in zip(lines, (*stages, "whole conversion"), strict=True):
        assert f" {stage} " in line
    assert "200 names in 4 folders" in shown
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["names.json", "originals", "tree"]
    assert json.loads((tmp_path / "made/names.json").read_text()) == {"names": 200, "classes": 4}
