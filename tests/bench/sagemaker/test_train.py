"""The entry point, with a service's variables set and folders in the place of its channels."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.sagemaker.train import Place, main, run_ranks
from precache import Recipe, convert
from tests.bench.sagemaker.test_place import SLURM, write_job
from tests.command import ROOT, run

SRUN = """#!/bin/bash
# two nodes that are both this machine: options go, the command runs once for each
while [[ "$1" == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
SCONTROL = '#!/bin/bash\n[[ "$1 $2" == "show hostnames" ]] && tr , "\\n" <<< "$3"\n'


@pytest.fixture(scope="module")
def data(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("channel") / "train"
    recipe = Recipe(format="shards", size=16, fit="crop", splits="train=0.8,val=0.2")
    convert(raw_tree, path, recipe, workers=0)
    return path


def test_a_job_of_sagemaker_trains_on_its_channel_and_leaves_its_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path, channels=("train",))
    (tmp_path / "input/data").mkdir()
    (tmp_path / "input/data/train").symlink_to(data)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    options = ("--size", 16, "--batch-size", 16, "--epochs", 2, "--tensorboard")
    ended = run("bench.sagemaker.train", "--checkpoints", "checkpoints", *options, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [line.split(":")[0] for line in ended.stdout.splitlines()] == ["epoch 1", "epoch 2"]
    assert "validation accuracy" in ended.stdout
    model = torch.load(tmp_path / "model/model.pt", weights_only=True)
    assert (model["name"], len(model["classes"])) == ("resnet18", 5)
    assert "fc.weight" in model["model"]
    assert (tmp_path / "checkpoints/checkpoint.pt").exists()
    assert list((tmp_path / "output/data").glob("events.*"))
    (tmp_path / "model/model.pt").unlink()
    write_job(tmp_path, channels=("train",), hosts=["algo-1", "algo-2"], current_host="algo-2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bench.sagemaker.train.run_ranks", lambda *_: 0)  # they ended well, on both hosts
    assert main(["--checkpoints", "checkpoints"]) == 0
    assert not (tmp_path / "model/model.pt").exists(), "the first host alone leaves the model"


@pytest.mark.slow
def test_the_slurm_script_trains_on_all_nodes_and_goes_on_when_sent_again(
    raw_tree: Path, tmp_path: Path
) -> None:
    data = tmp_path / "a folder" / "shards"
    convert(raw_tree, data, Recipe(format="shards", size=16, fit="crop"), workers=0)
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": python}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost,other",
        "SLURM_NNODES": "2",
    }
    options = ("--size", "16", "--batch-size", "16", "--epochs")
    command = ["bash", SLURM, data, tmp_path / "runs of one", *options]
    for epochs in ("1", "2"):
        ended = subprocess.run(
            [*command, epochs], env=environment, capture_output=True, text=True, timeout=110, check=False
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines()[-1].startswith(f"epoch {epochs}: loss")
    assert "epoch 1: loss" not in ended.stdout  # it was not trained again
    assert (tmp_path / "runs of one" / "checkpoint.pt").exists()


def test_input_that_is_wrong_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    for options, said in (
        ([], "there is no --data, and no channel"),
        (["--data", "here"], "--checkpoints"),
        (["--data", "here", "--checkpoints", "there", "--processes", "0"], "--processes must be positive"),
    ):
        assert main(options) == 2
        assert said in capsys.readouterr().err
    write_job(tmp_path, channels=("train",), current_host="algo-7")
    assert main(["train"]) == 2
    assert "current_host 'algo-7'" in capsys.readouterr().err


def rank(text: str) -> list[str]:
    """A rank that runs `text`."""
    return [sys.executable, "-c", f"import os, pathlib, signal, sys, time\n{text}"]


def test_each_rank_is_told_what_torchrun_would_tell_it(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    names += ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    command = rank(
        f"told = [os.environ[name] for name in {names}]\n"
        f"pathlib.Path({str(tmp_path)!r}, told[0]).write_text(' '.join(told))"
    )
    place = Place(hosts=3, number=1, master="algo-1", port=29500, interface="eth0")
    assert run_ranks(command, place, 2, os.environ) == 0
    told = sorted(path.read_text() for path in tmp_path.iterdir())
    assert told == [f"{rank} {rank - 2} 6 2 1 3 algo-1 29500 eth0" for rank in (2, 3)]


def test_a_rank_that_fails_ends_the_others_and_its_exit_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.sagemaker.train._PATIENCE_S", 0.2)
    command = rank("sys.exit(2) if os.environ['RANK'] == '1' else time.sleep(600)")
    assert run_ranks(command, Place(), 2, os.environ) == 2
    assert run_ranks(rank("os.kill(os.getpid(), 9)"), Place(), 1, os.environ) == 137


def test_a_signal_reaches_every_rank_once_and_waits_until_they_have_saved(tmp_path: Path) -> None:
    text = (
        "came = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: came.append(1))\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / ('ready' + os.environ['RANK'])).touch()\n"
        "while not came: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "(folder / ('saved' + os.environ['RANK'])).write_text(str(len(came)))\n"
        "sys.exit(143)"
    )
    starting = (
        "import os, sys; from bench.sagemaker import train\n"
        f"sys.exit(train.run_ranks({rank(text)!r}, train.Place(), 2, os.environ))"
    )
    process = subprocess.Popen([sys.executable, "-c", starting], env={**os.environ, "PYTHONPATH": str(ROOT)})
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
