"""The training with Ray Train goes on where it was when a worker of it is killed."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.loaders.examples import served
from tests.loaders.examples.conftest import SIZE, TRAINED

pytest.importorskip("ray.train", exc_type=ImportError, reason="pip install 'ray[train]'")
train_ray = pytest.importorskip("loaders.examples.train_ray")
SMALL = ("--size", str(SIZE), "--batch-size", "12", "--epochs", "2", "--model", "resnet10", "--device", "cpu")
KILLED_AT = (1, 2)
"""Epoch and batch of rank 1, in its first life."""


def train_killed(settings: dict[str, Any]) -> None:
    """What a worker of Ray does; it writes down what it serves as LIFE-RANK."""
    from ray import train

    rank, folder = train.get_context().get_world_rank(), Path(settings["out"]).parent
    life = int((folder / f"0-{rank}").exists())
    killed = signal.SIGKILL if (life, rank) == (0, 1) else 0
    with served.writing_down(folder / f"{life}-{rank}", killed, "train", KILLED_AT):
        train_ray.train_worker(settings)


def run(data: Path, out: Path, *more: str) -> int:
    code: int = train_ray.main([str(data), "--out", str(out), *SMALL, *more])
    return code


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_that_loses_a_worker_goes_on_from_its_last_checkpoint(
    data: Path, tmp_path: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_ray, "train_worker", train_killed)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    out = tmp_path / "run"
    assert run(data, out, "--save-every", "2") == 0
    whole = []
    for rank in range(2):
        first, second = (served.read(tmp_path / f"{life}-{rank}") for life in range(2))
        begun = (second[0][1], second[0][2])
        assert (0, 0) < begun <= KILLED_AT
        whole += [row for row in first if (row[1], row[2]) < begun] + second
    for epoch in range(2):
        ids = served.ids_of(whole, epoch)
        assert len(ids) == len(set(ids)) == TRAINED


def test_a_run_that_is_there_is_not_gone_on_with_unasked(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, tmp_path) == 2
    assert re.search(r": is there already; add --resume to go on", capsys.readouterr().err)


def test_what_is_wrong_is_said_before_workers_start(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, tmp_path / "run", "--batch-size", "13") == 2
    assert "--batch-size 13 cannot be shared by 2 ranks" in capsys.readouterr().err
    assert run(tmp_path / "none", tmp_path / "run") == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert run(data, tmp_path / "run", "--workers", "0") == 2
    assert "--workers must be an integer of at least 1, got 0" in capsys.readouterr().err
