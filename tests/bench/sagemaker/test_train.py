"""Training on SageMaker, Slurm and Kubernetes: options of torchrun, and trainings of two ranks on CPUs."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from loaders.examples import common
from precache import Recipe, convert
from tests.command import ROOT

FOLDER = ROOT / "bench" / "sagemaker"
SRUN = """#!/bin/bash
# two nodes that are both this machine: drops the options, and runs the command once for each
while [[ "$1" == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
SCONTROL = '#!/bin/bash\n[[ "$1 $2" == "show hostnames" ]] && tr , "\\n" <<< "$3"\n'
TORCHRUN = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
SMALL = {"model": "resnet10", "size": "16", "batch_size": "16", "bf16": "True", "compile": "False"}
HOSTS = ["algo-2", "127.0.0.1"]  # the first by name leads


def make_programs(folder: Path, **programs: str) -> dict[str, str]:
    """Write programs into a folder; return the environment in which they are found."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def sagemaker_variables(ml: Path, host: str, hosts: list[str], data: Path, gpus: int = 0) -> dict[str, str]:
    """Return the variables that SageMaker's training toolkit sets in the container of a host."""
    return {
        "SM_HOSTS": json.dumps(hosts, separators=(",", ":")),
        "SM_CURRENT_HOST": host,
        "SM_NUM_GPUS": str(gpus),
        "SM_NETWORK_INTERFACE_NAME": "lo",
        "SM_CHANNEL_TRAIN": str(data),
        "SAGEMAKER_BASE_DIR": str(ml),
    }


def start(environment: dict[str, str], epochs: int, **variables: str) -> "subprocess.Popen[str]":
    """Start `train.sh` as the toolkit does: each hyperparameter is a pair of words."""
    pairs = {**SMALL, "epochs": epochs}.items()
    words = [word for name, value in pairs for word in (f"--{name}", str(value))]
    return subprocess.Popen(
        [FOLDER / "train.sh", *words],
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.fixture
def shards(raw_tree: Path, tmp_path: Path) -> Path:
    recipe = Recipe(format="shards", size=16, fit="crop", splits="train=0.8,val=0.2")
    convert(raw_tree, tmp_path / "a folder" / "shards", recipe, workers=0)
    return tmp_path / "a folder" / "shards"


@pytest.mark.timeout(240)
def test_two_hosts_of_sagemaker_train_together_and_the_first_saves(shards: Path, tmp_path: Path) -> None:
    environment = make_programs(tmp_path, torchrun=TORCHRUN)
    port = free_port()
    jobs = [
        start(
            {**environment, **sagemaker_variables(tmp_path / host, host, HOSTS, shards)},
            2,
            PET_MASTER_PORT=port,
        )
        for host in HOSTS
    ]
    second, first = [job.communicate(timeout=200) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], (first, second)
    assert [line.split(":")[0] for line in first[0].splitlines()] == ["epoch 1", "epoch 2"]
    assert "validation accuracy" in first[0]
    assert second[0] == ""
    assert [(tmp_path / host / "checkpoints/checkpoint.pt").exists() for host in HOSTS] == [False, True]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_of_sagemaker_goes_on_after_sigterm(shards: Path, tmp_path: Path) -> None:
    environment = make_programs(tmp_path, torchrun=TORCHRUN)
    environment |= sagemaker_variables(tmp_path / "ml", "localhost", ["localhost"], shards, gpus=2)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    interrupted = start(environment, 1000)
    assert interrupted.stdout is not None
    lines = [interrupted.stdout.readline() for _ in range(2)]
    interrupted.send_signal(signal.SIGTERM)
    rest, _ = interrupted.communicate(timeout=60)
    assert interrupted.returncode != 0
    epochs = len([line for line in (*lines, *rest.splitlines()) if line.startswith("epoch")])
    again = start(environment, epochs + 2)
    printed, errors = again.communicate(timeout=100)
    assert again.returncode == 0, errors
    first_words = [line.split(":")[0] for line in printed.splitlines()]
    assert first_words == [f"epoch {epochs + 1}", f"epoch {epochs + 2}"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_slurm_script_trains_on_all_nodes_and_resumes(shards: Path, tmp_path: Path) -> None:
    environment = {
        **make_programs(tmp_path, srun=SRUN, scontrol=SCONTROL, torchrun=TORCHRUN),
        "MASTER_PORT": free_port(),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost,other",
        "SLURM_NNODES": "2",
    }
    options = ("--model", "resnet10", "--size", "16", "--batch-size", "16", "--epochs")
    command = ["bash", FOLDER / "slurm.sh", shards, tmp_path / "runs of one", *options]
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
    service, job = manifests = list(yaml.safe_load_all((FOLDER / "job.yaml").read_text()))
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
