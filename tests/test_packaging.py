"""The wheel holds the packages and what users copy, and the core installs without torch."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from precache.formats import FORMATS
from tests.command import ROOT

BUILD = "from setuptools import build_meta; build_meta.build_wheel('..')"


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    result = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in result.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def source(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, because building writes into it."""
    source = tmp_path_factory.mktemp("built") / "source"
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77")
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, capture_output=True, check=True, timeout=100)
    return next(source.parent.glob("*.whl"))


def test_wheel_holds_the_packages_and_what_users_copy_but_no_tests(wheel: Path, tracked: set[str]) -> None:
    opened = zipfile.ZipFile(wheel)
    names = opened.namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"precache", "loaders", "bench"}
    for package in packages:
        assert f"{package}/py.typed" in names
        assert f"{package}/__main__.py" in names or package == "loaders"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for folder in ("precache/cluster", "bench/sagemaker"):  # what users copy from there
        assert {name for name in tracked if name.startswith(folder)} <= set(names)
    code = {name for name in tracked if name.endswith(".py") and name.split("/")[0] in packages}
    assert {name for name in code if not name.startswith("bench/lab/")} <= set(names)
    assert not any(name.startswith("bench/lab") for name in names), "its programs run in a checkout"
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    text = opened.read(entry_points).decode()
    assert "precache = precache.__main__:entry_point" in text
    assert "bench = bench.__main__:entry_point" in text


PYTHON_OF_MAKE = """#!/bin/sh
case "$*" in
*pillow_install_command*) echo true ;;  # instead of compiling
*kinds_not_built_in*) echo "$LOST" ;;
*PACKAGES*) exec {python} "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("lost", "packages"),
    [
        ("", ""),
        ("WEBP", "libwebp-dev"),
        ("compressed TIFF, WEBP", "libtiff-dev libwebp-dev"),
        ("AVIF, JPEG2000, compressed TIFF, WEBP", "libavif-dev libopenjp2-7-dev libtiff-dev libwebp-dev"),
    ],
)
def test_make_names_the_commands_that_repair_pillow_simd(lost: str, packages: str, tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(PYTHON_OF_MAKE.format(python=sys.executable))
    python.chmod(0o755)
    target = f"{tmp_path}/.installed"
    command = ["make", "--silent", "-B", "PYTHON=true", f"VENV={tmp_path}", target]
    environment = {**os.environ, "LOST": lost}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()[2:]
    assert len(lines) == bool(lost)
    if lost:
        assert f"without the headers for {lost}:" in lines[0]
        assert f"'sudo apt-get install {packages} && make -B {target}'" in lines[0]
        assert f"'make -B SIMD=no {target}'" in lines[0]


def install(wheel: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """Install a wheel into a fresh environment; return its `bin`, and the variables to run it with."""
    # what PYTHONPATH shows would count as installed
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [folder / "bin/python", "-m", "pip", "install", "--quiet", wheel]
    subprocess.run(install, env=environment, check=True)
    return folder / "bin", environment


@pytest.mark.network
@pytest.mark.timeout(600)
def test_core_alone_installs_without_torch_and_converts(wheel: Path, raw_tree: Path, tmp_path: Path) -> None:
    programs, environment = install(str(wheel), tmp_path / "venv")
    freeze = [str(programs / "python"), "-m", "pip", "freeze"]
    packages = subprocess.run(
        freeze, env=environment, capture_output=True, text=True, check=True
    ).stdout.lower()
    assert not re.search(r"torch|plotly|^webdataset|opencv|dali", packages, re.MULTILINE)
    for form in FORMATS:
        command = [programs / "precache", "convert", raw_tree, tmp_path / form, "--format", form]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True)


TRAIN = """
import sys
import loaders

assert loaders.__file__.startswith(sys.prefix), "the wheel, not the checkout"
if __name__ == "__main__":
    for path in ("photos", "data/shards"):
        images, labels = next(iter(loaders.build(path, batch_size=16, augment="train")))
        assert images.shape == (16, 3, 224, 224)
"""
WHOLE_PATH = """
precache sample photos --images 64
precache convert photos data/shards --format shards --splits train=0.75,val=0.25
python train.py
bench quickstart --images 64 --batches 4 --repeats 1
"""


@pytest.mark.network
@pytest.mark.timeout(1800)  # 5 GB
def test_the_wheel_that_make_builds_runs_the_whole_path(source: Path, tmp_path: Path) -> None:
    subprocess.run(["make", "wheel", f"PYTHON={sys.executable}"], cwd=source, check=True)
    (wheel,) = source.glob("dist/*.whl")
    programs, environment = install(f"{wheel}[bench]", tmp_path / "venv")
    (tmp_path / "train.py").write_text(TRAIN)
    for program, *words in map(str.split, WHOLE_PATH.strip().splitlines()):
        subprocess.run([programs / program, *words], env=environment, cwd=tmp_path, check=True)
