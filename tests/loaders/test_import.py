"""`import loaders` where its packages are not installed."""

import subprocess
import sys

import pytest

from tests.command import ROOT

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # as Python has it of what is not there
import loaders
"""


@pytest.mark.parametrize("package", ["torch", "cv2"])
def test_a_missing_package_of_the_extra_is_one_line_with_the_command(package: str) -> None:
    command = [sys.executable, "-c", WITHOUT, package]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"precache.errors.MissingDependencyError: loaders need {package}")
    assert last.endswith("pip install 'precache[loaders]'")
    assert "During handling" not in result.stderr
