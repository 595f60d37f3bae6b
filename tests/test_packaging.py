import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.command import ROOT

BUILD = "from setuptools import build_meta; build_meta.build_wheel('..'); build_meta.build_sdist('..')"


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77")
    source = tmp_path_factory.mktemp("built") / "source"
    for name in tracked:  # a copy: building writes into the source tree
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, capture_output=True, check=True, timeout=100)
    return source.parent


def test_the_wheel_holds_the_three_packages_and_no_tests(built: Path, tracked: set[str]) -> None:
    wheel = zipfile.ZipFile(next(built.glob("*.whl")))
    names = wheel.namelist()
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
    assert not any(name.startswith("bench/lab") for name in names), "they run in a checkout"
    assert max(info.file_size for info in wheel.infolist()) < 50_000, "no notebooks, no figures"
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    text = wheel.read(entry_points).decode()
    assert "precache = precache.__main__:entry_point" in text
    assert "bench = bench.cli:entry_point" in text


def test_the_source_distribution_holds_all_that_is_tracked(built: Path, tracked: set[str]) -> None:
    """Tests with what they need, guides, and what the guides show."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as opened:
        held = {name.partition("/")[2] for name in opened.getnames() if not opened.getmember(name).isdir()}
    made = {
        name for name in held if name in ("PKG-INFO", "setup.cfg") or name.startswith("precache.egg-info/")
    }
    assert held - made == {name for name in tracked if not name.startswith(".")}


def test_what_an_index_shows_has_no_dead_link(built: Path) -> None:
    """A relative link leads nowhere there."""
    wheel = zipfile.ZipFile(next(built.glob("*.whl")))
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    _, _, description = wheel.read(name).decode().partition("\n\n")
    assert "precache" in description
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", description)
    assert all("".join(link).startswith(("https://", "#")) for link in links), links
