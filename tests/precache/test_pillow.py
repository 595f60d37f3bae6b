"""Pillow and Pillow-SIMD, both of which are the package PIL: one in the place of the other, and neither."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from precache.packages import put_pillow
from tests.command import ROOT, check_bad_input

STATES = {
    "neither": [],
    "pillow": ["install pillow"],
    "simd": ["install pillow-simd"],
    "pillow over simd": ["install pillow-simd", "install pillow"],
    "simd over pillow": ["install pillow", "install pillow-simd"],
    "pillow over simd, uninstalled": ["install pillow-simd", "install pillow", "uninstall -y pillow"],
    "simd over pillow, uninstalled": ["install pillow", "install pillow-simd", "uninstall -y pillow-simd"],
}
"""What pip did before, in a fresh environment."""
WHICH = """
import PIL
from PIL import Image, features
Image.new("RGB", (9, 9)).resize((5, 5), 2)
assert features.version("jpg")
print("pillow-simd" if ".post" in PIL.__version__ else "pillow")
"""


def command_of_the_readme() -> str:
    blocks = re.findall(
        r"^```sh\n(.*?)^```$", (ROOT / "precache/README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (command,) = (block for block in blocks if "uninstall -y pillow" in block)
    return str(command)


def test_the_readme_gives_the_command_of_doctor() -> None:
    ours = put_pillow("pillow-simd").replace(sys.executable, "python")
    assert " ".join(command_of_the_readme().replace("\\\n", " ").split()) == ours


def test_doctor_runs_without_pillow_and_the_other_commands_say_what_puts_it_back(tmp_path: Path) -> None:
    """Half of it is what a package leaves that was put over the other and uninstalled."""
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL/__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    remedy = "pip uninstall -y pillow pillow-simd && "
    doctor = run("-m", "precache", "doctor")
    assert (doctor.returncode, doctor.stderr) == (0, "")
    assert remedy in doctor.stdout
    assert "backend shards" in doctor.stdout
    for module in ("precache", "bench"):
        check_bad_input(run("-m", module, "convert", "a", "b"), "Pillow is missing or broken", remedy)
    used = run("-c", "from precache import convert")
    assert used.returncode == 1
    assert remedy in used.stderr.splitlines()[-1]


@pytest.mark.network
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wanted", ["pillow-simd", "pillow"])
@pytest.mark.parametrize("state", STATES)
def test_either_is_put_in_the_place_of_the_other_from_every_state(
    state: str, wanted: str, tmp_path: Path
) -> None:
    python = new_environment(tmp_path, state)
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = command_of_the_readme()
    if wanted == "pillow":
        command = put_pillow("pillow").replace(sys.executable, "python")
    subprocess.run(["bash", "-ec", command], env=environment, cwd=tmp_path, check=True)
    assert which(python) == wanted
    listed = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    assert re.findall("^(pillow[a-z-]*)==", listed.stdout.lower().replace("_", "-"), re.M) == [wanted]
    assert {path.name for path in tmp_path.iterdir()} == {"venv"}, "left in the working folder"


@pytest.mark.network
@pytest.mark.timeout(600)
def test_what_cannot_be_compiled_leaves_pillow_as_it_was(tmp_path: Path) -> None:
    python = new_environment(tmp_path, "pillow")
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"CC": "/bin/false", "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(["bash", "-c", command_of_the_readme()], env=environment, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert which(python) == "pillow"


def new_environment(folder: Path, state: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    for command in STATES[state]:
        subprocess.run([python, "-m", "pip", *command.split()], check=True)
    return python


def which(python: Path) -> str:
    done = subprocess.run([python, "-c", WHICH], capture_output=True, text=True, check=True)
    return done.stdout.strip()
