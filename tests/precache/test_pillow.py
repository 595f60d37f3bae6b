"""Pillow and Pillow-SIMD, both of which are the package PIL: one in the place of the other, and neither."""

import os
import re
import subprocess
import sys
from pathlib import Path

from precache.packages import pillow_install_command
from tests.command import ROOT, check_bad_input


def command_of_the_readme() -> str:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "precache/README.md").read_text(), re.DOTALL)
    (command,) = (block for block in blocks if "uninstall -y pillow" in block)
    return str(command)


def test_the_readme_gives_the_command_of_doctor() -> None:
    ours = pillow_install_command("pillow-simd").replace(sys.executable, "python")
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
