"""The files that people copy to start a cluster: each is what its reader takes, with our commands."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from precache import __version__
from precache.cli.main import main
from tests.command import ROOT
from tests.precache.destinations import contents

CLUSTER = ROOT / "precache" / "cluster"
SLURM = CLUSTER / "ray-on-slurm.sh"
COMMAND = re.compile(r"precache (?:convert|clean|push|pull|verify) [^'`#\n]*")


def loaded(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((CLUSTER / name).read_text())


@pytest.mark.parametrize("name", ["ray-on-slurm.sh", "rayjob.yaml", "ray-vm-cluster.yaml", "README.md"])
def test_each_command_in_a_file_is_one_that_this_release_takes(name: str) -> None:
    text = (CLUSTER / name).read_text().replace("\\\n", " ").replace('"$@"', "SRC DST --format shards")
    lines = [match[0] for match in COMMAND.finditer(text) if match[0].count(" ") > 3]  # a whole command line
    assert any("--engine" in line for line in lines)
    for line in lines:
        _, command, *arguments = shlex.split(line)
        context = main.commands[command].make_context(command, list(arguments))
        assert "--engine" not in arguments or context.params["engine"] == "ray", arguments


@pytest.mark.parametrize("name", ["rayjob.yaml", "ray-vm-cluster.yaml", "Dockerfile", "README.md"])
def test_files_install_this_release(name: str) -> None:
    text = (CLUSTER / name).read_text()
    assert set(re.findall(r"precache(?:-ray:|\[[a-z,]+\]==)([0-9.]+[0-9])", text)) == {__version__}


def test_all_pods_of_the_rayjob_have_one_image_and_one_folder() -> None:
    job = loaded("rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    assert len(pods) > 1
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    for group, pod in zip(groups, pods, strict=True):  # all see the folders of the command at one path
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert pod["containers"][0]["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
        assert [volume["name"] for volume in pod["volumes"]] == ["data"]
    start = f"FROM rayproject/ray:{cluster['rayVersion']}-"
    assert start in (CLUSTER / "Dockerfile").read_text()


def test_the_machines_are_what_the_cluster_launcher_takes() -> None:
    ray, jsonschema = pytest.importorskip("ray"), pytest.importorskip("jsonschema")
    config = loaded("ray-vm-cluster.yaml")
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(config, json.loads(schema.read_text()))
    starts = [config[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker")]
    assert "--head" in starts[0]
    assert "--address=$RAY_HEAD_IP:6379" in starts[1]
    cpus = config["available_node_types"]["worker"]["resources"]["CPU"]
    assert f"--num-cpus={cpus} " in starts[1]


def test_the_script_for_slurm_is_bash_that_says_how_it_is_called() -> None:
    ended = subprocess.run(["bash", SLURM, "SRC"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: sbatch")
    text = SLURM.read_text()
    assert text.index("#SBATCH --requeue") < text.index("\nset -euo pipefail\n")  # sbatch reads no further
    assert os.access(SLURM, os.X_OK)


SRUN = """#!/bin/bash
# of two tasks, both here: options go, the command runs
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""


@pytest.mark.slow
def test_the_script_converts_and_leaves_no_process(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """With stand-ins of Slurm's commands, and two nodes that are both this machine."""
    pytest.importorskip("ray")
    folder = tmp_path / "bin"
    folder.mkdir()
    python = Path(sys.executable).parent
    for name, text in {
        "srun": SRUN,
        "scontrol": "#!/bin/bash\necho 127.0.0.1\necho localhost\n",
        "precache": f'#!/bin/bash\nexec {python}/python -m precache "$@"\n',
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{python}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "two",
        "SLURM_CPUS_PER_TASK": "1",
    }
    flags = ["--format", "shards", "--size", "48", "--fit", "crop", "--resample", "bilinear"]
    out = tmp_path / "a folder" / "out"
    command = ["bash", str(SLURM), str(raw_tree), str(out), *flags, "--shard-bytes", "82944"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=110)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, stderr
    assert b"images/s" in stdout
    assert contents(out) == contents(converted["shards"])
    port = f":{20000 + os.getpid() % 20000}"
    running = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in running if port in line] == []
