"""The core, `pip install precache` without extras, is all that converting needs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import precache
from precache.formats import FORMATS
from tests.command import ROOT, check_bad_input
from tests.test_layers import files, imports

DISTRIBUTIONS = {"PIL": "pillow", "botocore": "boto3", "google_crc32c": "google-crc32c"}
"""Of modules that are not named as what installs them."""
OPTIONAL = {"boto3", "datasets", "huggingface_hub", "obstore", "pyarrow", "ray"}
"""Modules that extras bring, imported where they are needed alone."""
PYPROJECT = (ROOT / "pyproject.toml").read_text()
WITHOUT_EXTRAS = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in (
            "torch", "torchvision", "cv2", "plotly", "webdataset", "nvidia", "datasets", "pyarrow",
            "boto3", "huggingface_hub", "obstore", "ray"
        ):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
"""
CONVERT_ALL = f"""{WITHOUT_EXTRAS}
import precache.cli.main
for form in sys.argv[2:]:
    arguments = ["convert", sys.argv[1], "out/" + form, "--format", form, "--size", "32", "--workers", "1"]
    for command in (arguments, ["verify", "out/" + form], ["inspect", "out/" + form, "--html", "page.html"]):
        assert precache.cli.main.commandline.run(precache.cli.main.main, "precache", command) == 0
assert precache.cli.main.commandline.run(precache.cli.main.main, "precache", ["doctor"]) == 0
"""


def listed(heading: str) -> set[str]:
    """The names of the packages in a list of pyproject.toml."""
    (content,) = re.findall(rf"^{heading} = \[\n(.*?)^\]", PYPROJECT, re.DOTALL | re.MULTILINE)
    return set(re.findall(r'^    "([a-z0-9-]+)', content, re.MULTILINE))


def test_converting_needs_none_of_the_extras(raw_tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONVERT_ALL, raw_tree, *FORMATS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=100)


def test_bench_without_its_packages_names_the_extra(tmp_path: Path) -> None:
    program = f"{WITHOUT_EXTRAS}\nimport bench.cli\nbench.cli.entry_point()"
    command, environment = [sys.executable, "-c", program, "loaders"], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    check_bad_input(done, "the extra 'bench'", "-m pip install 'precache[bench]'")


def test_the_core_lists_what_precache_imports_and_nothing_else() -> None:
    used = {name.split(".")[0] for path in files("precache") for name in imports(path)}
    others = {DISTRIBUTIONS.get(name, name) for name in used - sys.stdlib_module_names - {"precache"}}
    assert others - OPTIONAL == listed("dependencies")
    extras = PYPROJECT[PYPROJECT.index("[project.optional-dependencies]") :]
    assert all(f'"{name}>=' in extras for name in OPTIONAL & others)


def test_the_version_is_the_same_wherever_it_is_stated() -> None:
    assert f'version = "{precache.__version__}"' in PYPROJECT
    assert f"## {precache.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.network
@pytest.mark.timeout(600)
def test_the_core_alone_installs_and_converts(raw_tree: Path, tmp_path: Path) -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():  # a copy: building writes into the source tree
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", tmp_path / "source"], check=True)
    freeze = [python, "-m", "pip", "freeze"]
    packages = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout.lower()
    assert not re.search(r"torch|plotly|^webdataset|opencv|dali", packages, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for form in FORMATS:
        command = [python.with_name("precache"), "convert", raw_tree, tmp_path / form, "--format", form]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True)
    installed = sum(f.stat().st_size for f in (tmp_path / "venv").rglob("*") if f.is_file())
    assert installed < 200e6
