"""The files that people copy to start a training: each is what its reader takes, with our options."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.sagemaker.train import Place, find_place, parse
from precache import Recipe, convert
from tests.command import ROOT

FOLDER = ROOT / "bench" / "sagemaker"
SLURM = FOLDER / "slurm.sh"


def documents() -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FOLDER / "job.yaml").read_text()))


def check_training(options: list[str]) -> None:
    """That `loaders.examples.train` takes them."""
    common = pytest.importorskip("loaders.examples.common")
    common.parser("train", "").parse_args(["data", *options])


def test_every_pod_of_the_job_finds_its_place_and_the_first_one() -> None:
    service, job = documents()
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    hosts = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == hosts
    places = [find_place({**environment, "JOB_COMPLETION_INDEX": str(index)}) for index in range(hosts)]
    # a pod of an Indexed Job is called JOB-INDEX, in the sub-domain that a service without an address gives
    name, _, domain = places[0].master.partition(".")
    assert places == [Place(hosts=2, number=index, master=f"{name}.{domain}", port=29500) for index in (0, 1)]
    assert name == f"{job['metadata']['name']}-0"
    assert domain == pods["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_the_job_mounts_what_its_options_name() -> None:
    _, job = documents()
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    assert container["command"] == ["python", "-m", "bench.sagemaker.train"]
    args, rest = parse(container["args"], None)
    check_training(rest)
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert str(args.checkpoints).startswith("/data/")
    assert args.data.startswith("/data/")
    assert set(mounts.values()) == {volume["name"] for volume in pods["volumes"]}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert pods["terminationGracePeriodSeconds"] >= 120


def test_the_slurm_script_is_bash_that_stops_at_the_first_error() -> None:
    assert subprocess.run(["bash", "-n", SLURM], check=False).returncode == 0
    text = SLURM.read_text()
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=[\w:@-]+)?", line) for line in directives)
    assert "#SBATCH --ntasks-per-node=1" in directives
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail")  # sbatch reads no further than commands
    assert os.access(SLURM, os.X_OK)
    (example,) = re.findall(r"sbatch --nodes=4 slurm.sh \S+ \S+ (.*)", text)
    check_training(example.split())


SRUN = """#!/bin/bash
# two nodes that are both this machine: options go, the command runs once for each
while [[ "$1" == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""


SCONTROL = '#!/bin/bash\n[[ "$1 $2" == "show hostnames" ]] && tr , "\\n" <<< "$3"\n'


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
