"""Training on SageMaker, Slurm and Kubernetes: options of torchrun, and trainings of two ranks on CPUs."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import run as torchrun

from bench.sagemaker.train import find_hosts, main, training_options
from loaders.examples import common
from precache import Recipe, convert
from tests.command import ROOT

SLURM = ROOT / "bench" / "sagemaker" / "slurm.sh"
SRUN = """#!/bin/bash
# two nodes that are both this machine: drops the options, and runs the command once for each
while [[ "$1" == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
SCONTROL = '#!/bin/bash\n[[ "$1 $2" == "show hostnames" ]] && tr , "\\n" <<< "$3"\n'
SMALL = {"model": "resnet10", "size": "16", "batch_size": "16", "epochs": "2"}
HOSTS = ["127.0.0.1", "algo-2"]


def write_job(
    ml: Path, channels: Iterable[str] = (), hyperparameters: Mapping[str, str] | None = None, **resources: Any
) -> Path:
    """Write SageMaker's files of a job into the folder `ml`: for one host, or those of `resources`."""
    config = ml / "input/config"
    config.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "resourceconfig": {"hosts": ["algo-1"], "current_host": "algo-1", **resources},
        "inputdataconfig": {channel: {"TrainingInputMode": "File"} for channel in channels},
        "hyperparameters": dict(hyperparameters or {}),
    }.items():
        (config / f"{name}.json").write_text(json.dumps(content))
    return ml


def start(ml: Path, **variables: str) -> "subprocess.Popen[str]":
    """Start the training of the job in `ml`, as its container starts it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SAGEMAKER_BASE_DIR": str(ml),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, "-m", "bench.sagemaker.train", "train"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ml, env=environment, text=True, **pipes)  # type: ignore[call-overload]


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.fixture
def shards(raw_tree: Path, tmp_path: Path) -> Path:
    recipe = Recipe(format="shards", size=16, fit="crop", splits="train=0.8,val=0.2")
    convert(raw_tree, tmp_path / "a folder" / "shards", recipe, workers=0)
    return tmp_path / "a folder" / "shards"


def give_channel(ml: Path, shards: Path) -> None:
    (ml / "input/data").mkdir(parents=True)
    (ml / "input/data/train").symlink_to(shards)


def test_a_single_host_has_rank_0(tmp_path: Path) -> None:
    assert find_hosts(write_job(tmp_path)) == ["--nnodes=1", "--node-rank=0"]


def test_all_hosts_find_the_same_leader_in_any_order_of_hosts(tmp_path: Path) -> None:
    names = ["algo-2", "algo-10", "algo-1"]
    options = [
        find_hosts(write_job(tmp_path, hosts=hosts, current_host=current))
        for hosts, current in ((names, "algo-1"), (names[::-1], "algo-2"), (names, "algo-10"))
    ]
    assert {rank for _, rank, _ in options} == {f"--node-rank={rank}" for rank in range(3)}
    assert {(count, leader) for count, _, leader in options} == {("--nnodes=3", "--master-addr=algo-1")}


@pytest.mark.parametrize(
    ("channels", "train", "further"),
    [
        (("shards", "code"), "shards", []),
        (("shards", "train", "validation"), "train", ["--val={data}/validation"]),
    ],
)
def test_channels_become_folders_of_the_training(
    channels: tuple[str, ...], train: str, further: list[str], tmp_path: Path
) -> None:
    data = tmp_path / "input/data"
    write_job(tmp_path, channels=channels)
    assert training_options(tmp_path) == [
        f"{data}/{train}",
        f"--out={tmp_path}/checkpoints",
        "--resume",
        *(option.format(data=data) for option in further),
    ]


def test_hyperparameters_become_options_of_the_training(tmp_path: Path) -> None:
    hyperparameters = {
        "batch_size": "64",
        "bf16": "True",
        "resume": "false",
        "model": "resnet50",
        "sagemaker_region": "x",
    }
    write_job(tmp_path, channels=("train",), hyperparameters=hyperparameters)
    options = training_options(tmp_path)
    assert options[3:] == ["--batch-size=64", "--bf16", "--model=resnet50"]
    common.parser("train", "").parse_args(options)


def check_job_is_refused(ml: Path, capsys: pytest.CaptureFixture[str], *mentions: str) -> None:
    """Check that the training ends with exit code 2 and one line that has all of `mentions`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAGEMAKER_BASE_DIR", str(ml))
        assert main(["train"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(mention in line for mention in mentions), line


def test_a_training_elsewhere_than_on_sagemaker_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_job_is_refused(tmp_path, capsys, "resourceconfig.json", "torchrun -m loaders.examples.train")


def test_a_host_that_is_not_listed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path, current_host="algo-7")
    check_job_is_refused(tmp_path, capsys, "resourceconfig.json", "algo-7")


@pytest.mark.parametrize(("channels", "mention"), [(("one", "two"), "one, two"), (("code",), "code")])
def test_a_job_without_one_channel_to_train_on_is_refused(
    channels: tuple[str, ...], mention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, channels=channels)
    check_job_is_refused(tmp_path, capsys, mention, "call it train")


@pytest.mark.parametrize(("name", "content"), [("hyperparameters", "[]"), ("inputdataconfig", "{")])
def test_a_damaged_file_of_a_job_is_named(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, channels=("train",))
    path = tmp_path / f"input/config/{name}.json"
    path.write_text(content)
    check_job_is_refused(tmp_path, capsys, str(path), "JSON")


@pytest.mark.timeout(240)
def test_two_hosts_train_together_and_the_first_saves_the_model(shards: Path, tmp_path: Path) -> None:
    port = free_port()
    jobs = []
    for host in HOSTS:
        ml = write_job(
            tmp_path / host, ("train",), SMALL, hosts=HOSTS, current_host=host, network_interface_name="lo"
        )
        give_channel(ml, shards)
        jobs.append(start(ml, PET_MASTER_PORT=port))
    first, second = [job.communicate(timeout=200) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], (first, second)
    assert [line.split(":")[0] for line in first[0].splitlines()] == ["epoch 1", "epoch 2"]
    assert "validation accuracy" in first[0]
    model = torch.load(tmp_path / HOSTS[0] / "model/model.pt", weights_only=True)
    assert len(model["classes"]) == 5
    assert "fc.weight" in model["model"]
    assert second[0] == ""
    assert not (tmp_path / HOSTS[1] / "model").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_goes_on_after_sigterm(shards: Path, tmp_path: Path) -> None:
    many = {**SMALL, "epochs": "1000", "tensorboard": "true"}
    ml = write_job(tmp_path / "ml", ("train",), many)
    give_channel(ml, shards)
    interrupted = start(ml, PET_NPROC_PER_NODE="2")
    assert interrupted.stdout is not None
    lines = [interrupted.stdout.readline() for _ in range(2)]
    interrupted.send_signal(signal.SIGTERM)
    rest, _ = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 143
    epochs = len([line for line in (*lines, *rest.splitlines()) if line.startswith("epoch")])
    write_job(ml, ("train",), {**many, "epochs": str(epochs + 2)})
    again = start(ml, PET_NPROC_PER_NODE="2")
    printed, errors = again.communicate(timeout=100)
    assert again.returncode == 0, errors
    first_words = [line.split(":")[0] for line in printed.splitlines()]
    assert first_words == [f"epoch {epochs + 1}", f"epoch {epochs + 2}"]
    assert list((ml / "output/data").glob("events.*"))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_failed_job_has_the_exit_code_and_message_of_its_rank(shards: Path, tmp_path: Path) -> None:
    ml = write_job(tmp_path / "ml", ("train",), {**SMALL, "model": "resnet9"})
    give_channel(ml, shards)
    failing = start(ml, PET_NPROC_PER_NODE="2")
    _, errors = failing.communicate(timeout=100)
    assert failing.returncode == 2
    assert "argument --model: invalid choice: 'resnet9'" in errors


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_slurm_script_trains_on_all_nodes_and_resumes(shards: Path, tmp_path: Path) -> None:
    run_torchrun = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": run_torchrun}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": free_port(),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost,other",
        "SLURM_NNODES": "2",
    }
    options = ("--model", "resnet10", "--size", "16", "--batch-size", "16", "--epochs")
    command = ["bash", SLURM, shards, tmp_path / "runs of one", *options]
    for epochs in ("1", "2"):
        ended = subprocess.run(
            [*command, epochs], env=environment, capture_output=True, text=True, timeout=140, check=False
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines()[-1].startswith(f"epoch {epochs}: loss")
    assert "epoch 1: loss" not in ended.stdout  # the first epoch was not trained again
    assert (tmp_path / "runs of one" / "checkpoint.pt").exists()


def test_every_pod_of_the_kubernetes_job_finds_the_leader() -> None:
    yaml = pytest.importorskip("yaml")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    service, job = manifests = list(yaml.safe_load_all(SLURM.with_name("job.yaml").read_text()))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    (number,) = container["env"]
    assert "batch.kubernetes.io/job-completion-index" in number["valueFrom"]["fieldRef"]["fieldPath"]
    assert container["command"] == ["torchrun"]
    args = torchrun.parse_args([word.replace(f"$({number['name']})", "1") for word in container["args"]])
    # the host name of a pod is JOB-INDEX, in the sub-domain of a service without an address
    pod, _, domain = args.master_addr.partition(".")
    assert (pod, domain) == (f"{job['metadata']['name']}-0", pods["subdomain"])
    assert domain == service["metadata"]["name"]
    hosts = {int(args.nnodes), job["spec"]["completions"], job["spec"]["parallelism"]}
    assert (hosts, args.node_rank, job["spec"]["completionMode"]) == ({2}, 1, "Indexed")
    assert (args.module, args.training_script) == (True, "loaders.examples.train")
    training = common.parser("train", "").parse_args(args.training_script_args)
    (mounted,) = (mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "data")
    assert all(str(folder).startswith(f"{mounted}/") for folder in (training.out, training.path))
    assert pods["terminationGracePeriodSeconds"] >= 60
