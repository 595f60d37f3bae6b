import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from PIL import features

from precache import Recipe, convert, packages
from precache.cli.commandline import parse_bytes, parse_share
from precache.cli.main import FIRST, OF_BENCH, main
from precache.errors import SettingError, shell_command
from precache.example_data.sample_tree import make_sample
from tests.command import ROOT, run_here
from tests.conftest import small_recipe

USUAL = "format size fit quality splits workers overwrite update help-all"


def test_inspect_shows_what_a_folder_holds_and_ten_classes_of_it(tmp_path: Path) -> None:
    make_sample(tmp_path / "tree", images=12, classes=12, like="caltech", workers=0)
    convert(tmp_path / "tree", tmp_path / "out", small_recipe("dali"), workers=0)
    shown = run_here("precache", "inspect", "out", cwd=tmp_path).stdout
    for mention in ("JPEG of quality 95, 48x48", "simplejpeg", "precache convert SRC out --format dali"):
        assert mention in shown
    assert not re.search(r"[a-z]_[a-z]", shown), "names of fields, as in the manifest"
    assert ("010." in shown, "011." in shown) == (True, False)
    assert shown.index("and 2 more: --all-classes") < shown.index("12 in 12 classes")
    assert "012." in run_here("precache", "inspect", "out", "--all-classes", cwd=tmp_path).stdout
    summary = json.loads(run_here("precache", "inspect", "out", "--json", cwd=tmp_path).stdout)
    assert summary["samples"] == sum(summary["splits"]["train"]["classes"].values()) == 12
    assert (summary["recipe"]["size"], summary["rejected"], summary["source"]["options"]) == (48, [], {})
    assert summary["source"]["digest"] in shown, "which source it was made from"


def test_a_share_is_a_percentage_or_a_number_and_bytes_have_units() -> None:
    assert [parse_share("max_rejects", text) for text in ("1%", "0.01", "0")] == [0.01, 0.01, 0]
    for bad in ("101%", "1%x"):
        with pytest.raises(SettingError, match="max_rejects"):
            parse_share("max_rejects", bad)
    texts = ("128MiB", "2GB", "1.5KiB", "1000", "7 kB")
    assert [*map(parse_bytes, texts)] == [2**27, 2 * 10**9, 1536, 1000, 7000]


def test_a_remedy_is_a_command_that_a_shell_runs(raw_tree: Path, tmp_path: Path) -> None:
    """Spaces, a quote, a colour that a shell takes for a comment, a byte that is not text."""
    out = tmp_path / os.fsdecode(b"my 'data' \x1b[31m\xff")
    recipe = Recipe(format="webdataset", size=16, background="#1e90ff")
    convert(raw_tree, out, recipe, workers=0)
    good = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "train-00000.tar").unlink()
    result = run_here("precache", "verify", out, cwd=tmp_path)
    assert result.returncode == 1
    assert "\x1b" not in result.stderr
    _, remedy = result.stderr.splitlines()
    _, _, command = remedy.partition("with: precache ")
    command = command.replace("SRC", str(raw_tree))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = f"{sys.executable} -m precache {command}"
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == good


@pytest.mark.parametrize(
    "path", ["plain", "with space", "it's", "-x", "#1", "$HOME", "`id`", "a\nb\\'", "\udcff\u202e", "é"]
)
def test_a_path_in_a_command_is_one_word_for_a_shell(path: str) -> None:
    command = shell_command("printf %s", Path(path))
    assert command.isprintable()
    printed = subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout
    assert os.fsdecode(printed).removeprefix("./") == path


def test_doctor_names_backends_and_the_command_that_installs_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = metadata.version

    def version(package: str) -> str:
        if package in packages.DALI:
            raise metadata.PackageNotFoundError(package)
        return "0.9.1" if package == "torchcodec" else installed(package)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(features, "get_supported", lambda: ["jpg", "zlib", "avif", "libtiff", "jpg_2000"])
    result = run_here("precache", "doctor", cwd=tmp_path)
    assert result.returncode == 0
    for mention in ("libjpeg", "backend pytorch", "backend shards", "backend dali", "gpu"):
        assert mention in result.stdout
    shown = " ".join(result.stdout.split())
    assert "cannot read WEBP, which stock Pillow can" in shown
    assert "torchcodec 0.9.1 is too old" in shown
    assert "-m pip install 'precache[dali]'" in shown


def test_dali_is_the_build_that_is_installed_or_fits_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, driver, cuda in (
        ("", None, 120),
        ("", "575.57.08", 120),
        ("", "580.65.06", 130),
        ("nvidia-dali-cuda130", "575.57.08", 130),
        ("nvidia-dali-cuda120", "580.65.06", 120),
    ):
        found = {installed: "2.4.0"}
        monkeypatch.setattr(packages, "version_of", found.get)
        assert packages.dali_package(driver) == f"nvidia-dali-cuda{cuda}"


def test_help_shows_the_way_and_cuts_no_sentence_off(tmp_path: Path) -> None:
    """That of convert begins with an example and keeps the rest for --help-all."""

    def shown(*command: str) -> str:
        return run_here("precache", *command, cwd=tmp_path).stdout

    whole = shown("--help")
    places = [whole.index(f"\n  {name} ") for name in (*FIRST, "check", "push")]
    assert places == sorted(places)
    assert "..." not in whole.partition("\n")[2]
    for name, command in main.commands.items():
        names = {name for param in command.params for name in param.opts if name[:2] == "--"}
        if name not in OF_BENCH:
            full = shown(name, "--help-all" if "--help-all" in names else "--help")
            assert names | {"--debug"} <= set(re.findall(r"--[a-z-]+", full))
    usual = shown("convert", "--help")
    assert usual.split("\n\n")[1].strip().startswith("precache convert photos ")
    listed = re.findall(r"^  (--[a-z-]+)", usual, re.MULTILINE)
    assert listed == [f"--{name}" for name in USUAL.split()]
