"""The training with fastai learns, and goes on with the epoch and the weights where it was ended."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loaders.examples import served

pytest.importorskip("fastai.basics", reason="pip install 'precache[frameworks]'")
train_fastai = pytest.importorskip("loaders.examples.train_fastai")
SMALL = ("--size", "32", "--batch-size", "15", "--lr", "0.003", "--device", "cpu", "--model", "resnet10")
pytestmark = pytest.mark.filterwarnings("ignore")


def run(data: Path, out: Path, *more: str) -> int:
    code: int = train_fastai.main([str(data), "--out", str(out), *SMALL, *more])
    return code


def test_it_learns_and_says_how_well_at_each_epoch(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, tmp_path, "--epochs", "5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch {n}" for n in range(1, 6)]
    (share,) = re.findall(r"validation accuracy ([0-9.]+)%", lines[-1])
    assert float(share) > 60  # of three classes


@pytest.mark.slow
def test_what_goes_on_ends_as_what_was_never_ended(data: Path, tmp_path: Path) -> None:
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    with served.writing_down(tmp_path / "whole.jsonl"):
        assert run(data, whole, "--epochs", "3") == 0
    with served.writing_down(tmp_path / "ended.jsonl"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_fastai.EachEpoch, "before_train", ends_in_epoch_2)
        with pytest.raises(KeyboardInterrupt):
            run(data, ended, "--epochs", "3")
    with served.writing_down(tmp_path / "ended.jsonl"):
        assert run(data, ended, "--epochs", "3", "--resume") == 0
    assert served.read(tmp_path / "ended.jsonl") == served.read(tmp_path / "whole.jsonl")
    ours, theirs = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, ended))
    assert ours["loader"] == theirs["loader"]
    for name, value in ours["model"].items():
        torch.testing.assert_close(value, theirs["model"][name])


def ends_in_epoch_2(self: Any) -> None:
    self.images, self.started_s = 0, 0.0
    if self.epoch == 2:
        raise KeyboardInterrupt


def test_without_pictures_to_validate_on_it_says_what_would_do(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tree, tmp_path) == 2
    assert "fastai validates each epoch; give --val, or convert with --splits" in capsys.readouterr().err
