"""The core, `pip install precache` without extras, is enough to convert."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from precache.formats import FORMATS
from tests.command import ROOT
from tests.test_layers import files, imports

DISTRIBUTIONS = {
    "PIL": "pillow",
    "botocore": "boto3",
    "cv2": "opencv-python-headless",
    "google_crc32c": "google-crc32c",
}
"""Module -> package that installs it, where their names differ."""
OPTIONAL = {"boto3", "obstore", "opencv-python-headless", "pyarrow", "ray"}
"""Modules that extras install, imported only where they are used."""
PYPROJECT = (ROOT / "pyproject.toml").read_text()
WITHOUT_EXTRAS = """
import sys

missing = "torch torchvision cv2 plotly webdataset nvidia datasets pyarrow boto3 obstore ray psutil"
sys.modules |= dict.fromkeys(missing.split())  # None: cannot be imported
"""
CONVERT_ALL = f"""{WITHOUT_EXTRAS}
import precache.cli.main
for form in sys.argv[2:]:
    arguments = ["convert", sys.argv[1], "out/" + form, "--format", form, "--size", "32", "--workers", "1"]
    for command in (arguments, ["verify", "out/" + form], ["inspect", "out/" + form, "--html", "page.html"]):
        assert precache.cli.main.commandline.run(precache.cli.main.main, "precache", command) == 0
assert precache.cli.main.commandline.run(precache.cli.main.main, "precache", ["--version"]) == 0
"""


IMPORT_WITHOUT_PACKAGES = """
import sys

packages = sys.argv[1].split(",")
sys.modules[packages[0]] = None  # cannot be imported
if sys.argv[2:]:
    from bench.__main__ import entry_point
    del sys.argv[1]
    entry_point()
for package in packages:
    for name in list(sys.modules):
        if sys.modules[name] is None or name.split(".")[0] in (package, "loaders", "precache"):
            del sys.modules[name]
    sys.modules[package] = None
    try:
        import loaders.examples.common
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
"""
BENCH_LOADERS = (
    "loaders",
    "tree",
    "--backend",
    "imagefolder",
    "--size",
    "16",
    "--device",
    "cpu",
    "--batches",
    "2",
)


# torch first and torchvision last: neither can be imported twice
@pytest.mark.parametrize(
    ("packages", "command", "remedy"),
    [
        ("torch,cv2,psutil,torchvision", (), "precache[loaders]"),
        ("xxhash", (), "install precache"),
        ("psutil", BENCH_LOADERS, "precache[bench]"),
        ("plotly", (*BENCH_LOADERS, "--html", "page.html"), "precache[bench]"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    packages: str, command: tuple[str, ...], remedy: str, tmp_path: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_PACKAGES, packages, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    for package, line in zip(packages.split(","), result.stderr.splitlines(), strict=True):
        assert f" {package} " in line
        assert remedy in line
        assert command or line.startswith("MissingDependencyError: ")
    assert result.returncode == (2 if command else 0)


def package_names(heading: str) -> set[str]:
    """Return the names of the packages in a list of pyproject.toml."""
    (content,) = re.findall(rf"^{heading} = \[\n(.*?)^\]", PYPROJECT, re.DOTALL | re.MULTILINE)
    return set(re.findall(r'^    "([a-z0-9-]+)', content, re.MULTILINE))


def test_converting_needs_none_of_the_extras(raw_tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONVERT_ALL, raw_tree, *FORMATS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=100)


def test_the_core_lists_what_precache_imports_and_nothing_else() -> None:
    used = {name.split(".")[0] for path in files("precache") for name in imports(path)}
    others = {DISTRIBUTIONS.get(name, name) for name in used - sys.stdlib_module_names - {"precache"}}
    assert others - OPTIONAL == package_names("dependencies")
    extras = PYPROJECT[PYPROJECT.index("[project.optional-dependencies]") :]
    assert all(f'"{name}>=' in extras for name in OPTIONAL & others)
