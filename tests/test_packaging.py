import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.command import ROOT


def test_the_wheel_holds_the_three_packages_and_no_tests(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="building the wheel needs setuptools 77")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in tracked:  # a copy: building writes into the source tree
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*command, "--wheel-dir", tmp_path, source], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"precache", "loaders", "bench"}
    for package in packages:
        assert f"{package}/py.typed" in names
        assert f"{package}/__main__.py" in names or package == "loaders"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for folder in ("precache/cluster", "bench/sagemaker"):  # what users copy from there
        assert {name for name in tracked if name.startswith(folder)} <= set(names)
    assert "bench/caltech256.ipynb" in names
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "precache = precache.__main__:entry_point" in text
    assert "bench = bench.cli:entry_point" in text


def test_an_editable_install_warns_of_nothing(tmp_path: Path) -> None:
    """As `make` does it; setuptools warns in a box where it must guess where packages lie."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for package in ("precache", "loaders", "bench"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    build = "from setuptools import build_meta; build_meta.build_editable('.')"
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert built.returncode == 0, built.stderr
    assert "****" not in built.stdout + built.stderr
