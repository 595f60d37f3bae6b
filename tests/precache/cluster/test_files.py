"""The files that people copy to start a cluster: each is what its reader takes, with our commands."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precache import __version__
from precache.cli.main import main
from tests.command import ROOT

CLUSTER = ROOT / "precache" / "cluster"
SLURM = CLUSTER / "ray-on-slurm.sh"
COMMAND = re.compile(r"precache (?:convert|clean|push|pull|verify) [^'`#\n]*")


def loaded(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((CLUSTER / name).read_text())


def commands(path: Path) -> list[list[str]]:
    """Arguments of `precache` in a file, where they are a whole command line."""
    text = path.read_text().replace("\\\n", " ").replace('"$@"', "SRC DST --format shards")
    return [shlex.split(match[0])[1:] for match in COMMAND.finditer(text) if match[0].count(" ") > 3]


@pytest.mark.parametrize("name", ["ray-on-slurm.sh", "rayjob.yaml", "ray-vm-cluster.yaml", "README.md"])
def test_each_command_in_a_file_is_one_that_this_release_takes(name: str) -> None:
    found = commands(CLUSTER / name)
    assert any("--engine" in arguments for arguments in found)
    for command, *arguments in found:
        context = main.commands[command].make_context(command, list(arguments))
        assert "--engine" not in arguments or context.params["engine"] == "ray", arguments


@pytest.mark.parametrize("name", ["rayjob.yaml", "ray-vm-cluster.yaml", "Dockerfile", "README.md"])
def test_files_install_this_release(name: str) -> None:
    text = (CLUSTER / name).read_text()
    assert set(re.findall(r"precache(?:-ray:|\[[a-z,]+\]==)([0-9.]+[0-9])", text)) == {__version__}


# Kubernetes: those fields of RayJob and RayCluster of ray.io/v1 that are used here, by
# https://github.com/ray-project/kuberay/blob/master/ray-operator/apis/ray/v1/, and those of pods.

POD = """
    containers[].name containers[].image
    containers[].volumeMounts[].name containers[].volumeMounts[].mountPath
    containers[].resources.requests.cpu containers[].resources.requests.memory
    containers[].resources.limits.cpu containers[].resources.limits.memory
    volumes[].name volumes[].persistentVolumeClaim.claimName securityContext.fsGroup
"""
JOB = """
    apiVersion kind metadata.name spec.entrypoint spec.backoffLimit spec.shutdownAfterJobFinishes
    spec.ttlSecondsAfterFinished spec.submitterConfig.backoffLimit spec.rayClusterSpec.rayVersion
"""
GROUP = ["rayStartParams.*", *(f"template.spec.{name}" for name in POD.split())]
WORKERS = ["groupName", "replicas", "minReplicas", "maxReplicas", *GROUP]
RAY_JOB = {
    *JOB.split(),
    *(f"spec.rayClusterSpec.headGroupSpec.{name}" for name in GROUP),
    *(f"spec.rayClusterSpec.workerGroupSpecs[].{name}" for name in WORKERS),
}


def fields(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of the fields of a file, with what they hold."""
    if isinstance(value, dict):
        for key, inner in value.items():
            known = "*" if name.endswith("rayStartParams") else key
            yield from fields(inner, f"{name}.{known}" if name else known)
    elif isinstance(value, list):
        for inner in value:
            yield from fields(inner, f"{name}[]")
    else:
        yield name, value


def test_the_rayjob_is_what_kuberay_takes() -> None:
    job = loaded("rayjob.yaml")
    found = list(fields(job))
    assert {name for name, _ in found} - RAY_JOB == set()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    for name, value in found:
        if name.endswith("*"):  # the operator hands them to `ray start`
            assert isinstance(value, str), name
        elif name.endswith(("eplicas", "Limit", "Finished")):
            assert isinstance(value, int), name
        elif name.endswith(".memory"):
            assert re.fullmatch("[0-9]+[KMGT]i", value), name
        elif name.endswith(("ame", "Name")):
            assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", value), name
    cluster = job["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert len(pods) > 1
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    for pod in pods:  # all see the folders of the command at one path
        assert pod["containers"][0]["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
        assert [volume["name"] for volume in pod["volumes"]] == ["data"]
    start = f"FROM rayproject/ray:{cluster['rayVersion']}-"
    assert start in (CLUSTER / "Dockerfile").read_text()


def test_the_machines_are_what_the_cluster_launcher_takes() -> None:
    ray, jsonschema = pytest.importorskip("ray"), pytest.importorskip("jsonschema")
    config = loaded("ray-vm-cluster.yaml")
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(config, json.loads(schema.read_text()))
    assert config["head_node_type"] in config["available_node_types"]
    starts = [config[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker")]
    assert "--head" in starts[0]
    assert "--address=$RAY_HEAD_IP:6379" in starts[1]
    cpus = config["available_node_types"]["worker"]["resources"]["CPU"]
    assert f"--num-cpus={cpus} " in starts[1]


# Slurm.


def test_the_script_is_bash_that_stops_at_the_first_error() -> None:
    assert subprocess.run(["bash", "-n", SLURM], check=False).returncode == 0
    text = SLURM.read_text()
    assert text.startswith("#!/bin/bash\n")
    assert "\nset -euo pipefail\n" in text
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=[\w:-]+)?", line) for line in directives)
    assert text.index("#SBATCH --requeue") < text.index("set -euo")  # sbatch reads no further than commands
    assert os.access(SLURM, os.X_OK)


def test_the_script_says_how_it_is_called() -> None:
    ended = subprocess.run(["bash", SLURM, "SRC"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: sbatch")


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
    psutil = pytest.importorskip("psutil")
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
    flags = ["--format", "shards", "--size", "48", "--fit", "crop", "--shard-bytes", "82944"]
    out = tmp_path / "a folder" / "out"
    command = ["bash", str(SLURM), str(raw_tree), str(out), *flags]
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
    for path in converted["shards"].iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    port = f":{20000 + os.getpid() % 20000}"
    running = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in running if port in line] == []
