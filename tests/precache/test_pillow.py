"""Pillow and Pillow-SIMD, which are both the package PIL: replacing one by the other, and running without."""

import os
import re
import subprocess
import sys
from pathlib import Path

from precache.packages import pillow_install_command
from tests.command import ROOT, check_bad_input


def readme_command() -> str:
    """Return the command in the guide that installs Pillow-SIMD."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "precache/README.md").read_text(), re.DOTALL)
    (command,) = (block for block in blocks if "uninstall -y pillow" in block)
    return str(command)


def test_the_guide_gives_the_command_of_errors_for_pillow() -> None:
    command = pillow_install_command("pillow-simd").replace(sys.executable, "python")
    assert " ".join(readme_command().replace("\\\n", " ").split()) == command


def test_without_pillow_commands_and_imports_say_the_remedy(tmp_path: Path) -> None:
    """PIL is an empty package here, as after one was installed over the other and uninstalled."""
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL/__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    remedy = "pip uninstall -y pillow pillow-simd && "
    for command in ("precache convert a b", "bench recommend a"):
        check_bad_input(run("-m", *command.split()), "Pillow is missing or broken", remedy)
    result = run("-c", "from precache import convert")
    assert result.returncode == 1
    assert remedy in result.stderr.splitlines()[-1]
