"""The files that users copy to start a cluster are valid, and so are the commands in them."""

import re
import shlex
import subprocess

import pytest

from precache.cli.main import main
from tests.command import ROOT

CLUSTER = ROOT / "precache" / "cluster"
SLURM = CLUSTER / "ray-on-slurm.sh"
COMMAND = re.compile(r"precache (?:convert|push|pull|verify) [^'`#\n]*")


@pytest.mark.parametrize("name", ["ray-on-slurm.sh", "rayjob.yaml", "ray-vm-cluster.yaml", "README.md"])
def test_each_command_in_a_cluster_file_is_valid(name: str) -> None:
    text = (CLUSTER / name).read_text().replace("\\\n", " ").replace('"$@"', "SRC DST --format shards")
    # more than three spaces: a whole command line, and not a mention of the command
    lines = [match[0] for match in COMMAND.finditer(text) if match[0].count(" ") > 3]
    assert any("--engine" in line for line in lines)
    for line in lines:
        _, command, *arguments = shlex.split(line)
        context = main.commands[command].make_context(command, list(arguments))
        assert "--engine" not in arguments or context.params["engine"] == "ray", arguments


def test_the_slurm_script_prints_its_usage() -> None:
    result = subprocess.run(["bash", SLURM, "SRC"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr[:13]) == (2, "usage: sbatch")
    text = SLURM.read_text()
    assert text.index("#SBATCH --requeue") < text.index("\nset -euo pipefail\n")  # where sbatch stops reading
