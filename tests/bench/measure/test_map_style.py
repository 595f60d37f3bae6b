"""ImageFolder beside ImageDataset: what is printed, and what is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.measure import map_style


def test_each_arm_is_measured_in_turns_and_printed(
    converted: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "class").mkdir()
    for number in range(6):
        Image.fromarray(np.full((32, 32, 3), number, np.uint8)).save(tmp_path / f"class/{number}.jpg")
    small = ["--batch-size=2", "--workers=0", "--batches=2", "--repeats=2", "--size=16"]
    monkeypatch.setattr(sys, "argv", ["map_style", str(tmp_path), str(converted["shards"]), *small])
    map_style.main()
    lines = capsys.readouterr().out.splitlines()
    for line, name in zip(
        lines, ("ImageFolder", f"ImageDataset {tmp_path}", converted["shards"]), strict=False
    ):
        assert str(name) in line
        assert "images/s (" in line
        assert "of 2)" in line
    assert lines[-1].startswith("batch 2, 0 workers, train 16, up to 2 batches, page cache warm, torch ")


def test_what_is_no_dataset_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["map_style", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as caught:
        map_style.main()
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
