"""The trainings on two ranks, as torchrun starts them, with gloo: each sample once, also after SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import ROOT
from tests.loaders.examples import served, test_same_training
from tests.loaders.examples.conftest import TRAINED
from tests.loaders.examples.test_train import EPOCHS, SMALL, run

LIBRARIES = {f"train_{name}": package for name, package in test_same_training.LIBRARIES.items()}


@contextmanager
def torchrun(data: Path, out: Path, *more: object, module: str = "train", sent: int = 0) -> Iterator[Any]:
    """Two ranks; rank 1 sends itself the signal `sent` at the second batch of the second epoch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m"]
    command += ["tests.loaders.examples.served", out / "served.{}", sent, 1, "train", 1, 1]
    command += [f"loaders.examples.{module}", data, "--out", out / "run", *SMALL, "--epochs", EPOCHS, *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*map(str, command)],
        env=environment,
        cwd=out,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)  # torchrun ends its ranks
            process.wait(60)


def finish(data: Path, out: Path, *more: object, **how: Any) -> tuple[int, str]:
    """Exit code of torchrun, and what was said."""
    with torchrun(data, out, *more, **how) as process:
        said, _ = process.communicate(timeout=200)
        return process.returncode, said


def check_each_sample_once(out: Path) -> None:
    """In each epoch over all that the ranks have written down; as many batches each."""
    ranks = [served.read(file) for file in sorted(out.glob("served.?"))]
    for epoch in range(2):
        ids = [i for rows in ranks for i in served.ids_of(rows, epoch)]
        assert len(ids) == len(set(ids)) == TRAINED
    assert len({len(rows) for rows in ranks[:2]}) == 1


@pytest.mark.timeout(300)
def test_an_epoch_that_sigterm_ended_on_two_ranks_is_ended_by_one(data: Path, tmp_path: Path) -> None:
    """One rank got it; both stopped after the same batch."""
    code, said = finish(data, tmp_path, sent=signal.SIGTERM)
    assert code != 0
    assert "exitcode  : 143" in said
    assert said.count("epoch 1:") == 1
    with served.writing_down(tmp_path / "served.2"):
        assert run(data, tmp_path / "run", "--resume") == 0
    check_each_sample_once(tmp_path)


@pytest.mark.slow
def test_sigterm_to_torchrun_is_one_to_the_ranks(data: Path, tmp_path: Path) -> None:
    with torchrun(data, tmp_path, "--epochs", 50) as process:
        while not (tmp_path / "run/checkpoint.pt").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=100)
    state = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["loader"]
    rows = [served.read(tmp_path / f"served.{rank}") for rank in range(2)]
    assert len(rows[0]) == len(rows[1]) == state["epoch"] * 4 + state["served_batches"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("module", LIBRARIES)
def test_two_ranks_of_each_library_serve_each_sample_once(module: str, data: Path, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[module], reason=f"pip install {LIBRARIES[module]}")
    code, said = finish(data, tmp_path, module=module, sent=signal.SIGTERM)
    assert code != 0
    assert "exitcode  : 143" in said
    code, said = finish(data, tmp_path, "--resume", module=module)
    assert code == 0, said
    assert said.count("epoch 2:") == 1
    check_each_sample_once(tmp_path)
