"""Training where a service starts a process on each host: its place, channels, ranks, signals and files."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.sagemaker.train import Job, Place, find_place, main, parse, run_ranks
from loaders.examples import common
from precache import Recipe, convert
from precache.errors import SettingError
from tests.command import ROOT, run

SLURM = ROOT / "bench" / "sagemaker" / "slurm.sh"
TWO = {"NNODES": "2", "MASTER_ADDR": "head"}
SRUN = """#!/bin/bash
# two nodes that are both this machine: options go, the command runs once for each
while [[ "$1" == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
SCONTROL = '#!/bin/bash\n[[ "$1 $2" == "show hostnames" ]] && tr , "\\n" <<< "$3"\n'


def write_job(
    ml: Path, channels: Iterable[str] = (), hyperparameters: Mapping[str, str] | None = None, **resources: Any
) -> Job:
    """Write SageMaker's files of one host, or what `resources` says, into the folder `ml`."""
    config = ml / "input/config"
    config.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "resourceconfig": {"hosts": ["algo-1"], "current_host": "algo-1", **resources},
        "inputdataconfig": {channel: {"TrainingInputMode": "File"} for channel in channels},
        "hyperparameters": dict(hyperparameters or {}),
    }.items():
        (config / f"{name}.json").write_text(json.dumps(content))
    found = Job.find(ml)
    assert found is not None
    return found


def test_all_hosts_agree_who_leads_in_whatever_order_they_are_told_and_one_alone_needs_no_service(
    tmp_path: Path,
) -> None:
    assert Job.find(tmp_path) is None
    assert find_place({}) == Place() == write_job(tmp_path).place()
    names = ["algo-2", "algo-10", "algo-1"]
    found = [
        write_job(tmp_path, hosts=told, current_host=current, network_interface_name="eth0").place()
        for told, current in ((names, "algo-1"), (names[::-1], "algo-2"), (names, "algo-10"))
    ]
    assert sorted(place.number for place in found) == [0, 1, 2]
    assert {(at.master, at.hosts, at.port, at.interface) for at in found} == {("algo-1", 3, 29500, "eth0")}
    for rank in ("NODE_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        assert find_place({**TWO, rank: "1"}) == Place(hosts=2, number=1, master="head", port=29500)


def test_channels_and_hyperparameters_are_options_of_the_training(tmp_path: Path) -> None:
    at = f"{tmp_path}/input/data"
    assert write_job(tmp_path, channels=("shards", "code")).data() == (f"{at}/shards", None)
    several = write_job(tmp_path, channels=("shards", "train", "validation"))
    assert several.data() == (f"{at}/train", f"{at}/validation")
    with pytest.raises(SettingError, match="which of the channels one, two"):
        write_job(tmp_path, channels=("one", "two")).data()
    given = {"batch_size": "64", "bf16": "True", "resume": "false", "out": "my_runs", "sagemaker_region": "x"}
    options = ["--batch-size", "64", "--bf16", "--out", "my_runs"]
    assert write_job(tmp_path, hyperparameters=given).options() == options


def test_what_is_wrong_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for environment, said in (
        ({**TWO, "SLURM_PROCID": "2"}, "number 2, but there are 2"),
        (TWO, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
    ):
        with pytest.raises(SettingError, match=said):
            find_place(environment)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    for options, said in (([], "there is no --data, and no channel"), (["--data", "here"], "--checkpoints")):
        assert main(options) == 2
        assert said in capsys.readouterr().err
    write_job(tmp_path, channels=("train",), current_host="algo-7")
    assert main(["train"]) == 2
    assert "resourceconfig.json: hosts must be a list with current_host 'algo-7'" in capsys.readouterr().err


def test_a_job_of_sagemaker_trains_on_its_channel_and_leaves_its_model(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path, channels=("train",))
    recipe = Recipe(format="shards", size=16, fit="crop", splits="train=0.8,val=0.2")
    convert(raw_tree, tmp_path / "input/data/train", recipe, workers=0)
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


def rank(text: str) -> list[str]:
    """A rank that runs `text`."""
    return [sys.executable, "-c", f"import os, pathlib, signal, sys, time\n{text}"]


def test_a_rank_that_fails_ends_the_others_and_its_exit_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.sagemaker.train._PATIENCE_S", 0.2)
    command = rank("sys.exit(2) if os.environ['RANK'] == '1' else time.sleep(600)")
    assert run_ranks(command, Place(), 2, os.environ) == 2
    assert run_ranks(rank("os.kill(os.getpid(), 9)"), Place(), 1, os.environ) == 137


def test_ranks_are_told_what_torchrun_tells_and_a_signal_reaches_each_once_and_waits_until_they_have_saved(
    tmp_path: Path,
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    names += ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    text = (
        "came = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: came.append(1))\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        f"told = ' '.join(os.environ[name] for name in {names})\n"
        "(folder / ('ready' + os.environ['RANK'])).touch()\n"
        "while not came: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "(folder / ('saved' + os.environ['RANK'])).write_text(f'{told} {len(came)}')\n"
        "sys.exit(143)"
    )
    starting = (
        "import os, sys; from bench.sagemaker import train\n"
        "place = train.Place(hosts=3, number=1, master='algo-1', port=29500, interface='eth0')\n"
        f"sys.exit(train.run_ranks({rank(text)!r}, place, 2, os.environ))"
    )
    process = subprocess.Popen([sys.executable, "-c", starting], env={**os.environ, "PYTHONPATH": str(ROOT)})
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    saved = [(tmp_path / f"saved{rank}").read_text() for rank in (2, 3)]
    assert saved == [f"{rank} {rank - 2} 6 2 1 3 algo-1 29500 eth0 1" for rank in (2, 3)]


def test_every_pod_of_the_job_finds_its_place() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(SLURM.with_name("job.yaml").read_text())
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    places = [find_place({**environment, "JOB_COMPLETION_INDEX": str(index)}) for index in range(2)]
    # a pod of an Indexed Job is called JOB-INDEX, in the sub-domain that a service without an address gives
    name, _, domain = places[0].master.partition(".")
    assert places == [Place(hosts=2, number=index, master=f"{name}.{domain}", port=29500) for index in (0, 1)]
    assert name == f"{job['metadata']['name']}-0"
    assert domain == pods["subdomain"] == service["metadata"]["name"]
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (2, "Indexed")
    args, rest = parse(container["args"], None)
    common.parser("train", "").parse_args(["data", *rest])
    (mounted,) = (mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "data")
    assert all(str(folder).startswith(f"{mounted}/") for folder in (args.checkpoints, args.data))
    assert pods["terminationGracePeriodSeconds"] >= 120
