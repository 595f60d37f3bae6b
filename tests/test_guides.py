"""Commands and Python of the documents run as they are printed."""

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
import torchvision

from bench.cli import main as bench
from precache.cli import commandline
from precache.cli.main import main as precache
from precache.example_data.sample_tree import make_sample
from precache.sources.tree import scan_tree
from precache.storage.urls import Url
from tests.command import ROOT, run
from tests.precache.sources.tars import make_webdataset

GUIDES = (
    "README.md",
    "precache/README.md",
    "loaders/README.md",
    "bench/README.md",
    "bench/results/README.md",
)
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {"precache": precache, "bench": bench}
# Functions in the place of the commands print their arguments, after the shell has expanded variables,
# loops and quotes.
RECORD = 'precache() { record precache "$@"; }; bench() { record bench "$@"; }; pip() { :; }; make() { :; }\n'
RECORD += "python() { :; }; strace() { :; }; mktemp() { :; }\n"
RECORD += "record() { printf '%s\\x1f' \"$@\"; printf '\\n'; }; mkdir() { :; }; mv() { :; }; tar() { :; }\n"
SMALL = {
    "--batches": "2", "--warmup": "1", "--repeats": "1", "--batch-size": "8", "--size": "64", "--steps": "2",
    "--pictures": "16", "--seconds": "0.1", "--workers": "1", "--trainer": "emulated:2000",
    "--seeds": "2", "--epochs": "2",
}  # fmt: skip
"""Options that make a command of `bench` quick, added where the guide does not give them."""

TRAIN = """
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

squares = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])
for _ in range(3):
    list(DataLoader(datasets.ImageFolder("photos", squares), batch_size=8))
"""


def blocks(guide: str, kind: str) -> list[str]:
    """Return the code blocks of a guide that are marked as `kind`, sh or python."""
    return [text for language, text in BLOCK.findall((ROOT / guide).read_text()) if language == kind]


def commands(guide: str) -> Iterator[list[str]]:
    """Yield each call of `precache` and `bench` in the shell blocks of a guide, in order."""
    for block in blocks(guide, "sh"):
        ended = subprocess.run(["bash", "-c", RECORD + block], capture_output=True, text=True, check=False)
        for line in ended.stdout.splitlines():
            if line.startswith(("precache\x1f", "bench\x1f")):
                yield line.split("\x1f")[:-1]


def in_bucket(words: list[str], bucket: Url) -> list[str]:
    """Return the same command with a bucket that exists."""
    return [word.replace("s3://bucket", str(bucket)) for word in words]


def run_here(program: str, words: list[str], bucket: Url) -> None:
    """Run a command, without worker processes if the guide does not ask for some: they start slowly."""
    few = ["--workers", "0"] if words[0] in ("check", "convert") and "--workers" not in words else []
    code = commandline.run(PROGRAMS[program], program, [words[0], *few, *in_bucket(words[1:], bucket)])
    assert code == 0, words


def command_of(program: str, name: str) -> click.Command:
    group = PROGRAMS[program]
    command = group.get_command(click.Context(group), name)
    assert command is not None, f"{program} {name}"
    return command


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what the guides begin with: photos, a table of them, tars."""
    folder = tmp_path_factory.mktemp("guides")
    make_sample(folder / "photos", images=64, classes=4, like="caltech", workers=0)
    rows = [["image", "species", "fold", "width", "caption", "tags"]]
    for number, sample in enumerate(scan_tree(folder / "photos").samples):
        species, fold = ("owl", "heron")[number % 2], "train" if number % 4 else "valid"
        rows.append([sample.path, species, fold, str(number), "at noon", "bird;water"])
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    (folder / "deep").mkdir()
    (folder / "deep/birds").symlink_to("../photos")
    (folder / "more").symlink_to("photos")
    (folder / "unlabelled").symlink_to(Path("photos") / Path(rows[1][0]).parent)
    make_webdataset(folder / "tars", folder / "photos")
    return folder


@pytest.fixture
def photos(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, in which a test works and may change everything."""
    shutil.copytree(made, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("guide", GUIDES)
def test_every_command_of_a_guide_is_valid(guide: str) -> None:
    calls = list(commands(guide))
    assert calls
    for program, name, *words in calls:
        if name != "--version":
            command_of(program, name).make_context(name, words)


@pytest.mark.parametrize("guide", ["precache/README.md", "loaders/README.md"])
def test_commands_and_python_of_a_guide_run(guide: str, photos: Path, bucket: Url) -> None:
    for program, *words in commands(guide):
        if "--without" in words:
            picture = next((photos / "photos").glob("*/*.jpg"))
            shutil.copy(picture, picture.with_name("new.jpg"))
        if program == "precache" and words[0] not in ("--version", "sample"):
            run_here(program, words, bucket)
    programs = blocks(guide, "python")
    assert programs
    for text in programs:
        exec(compile(text, guide, "exec"), {"__name__": "__main__"})


def test_the_readme_converts_and_its_lines_train_from_either_path(photos: Path, bucket: Url) -> None:
    for program, *words in commands("README.md"):
        if program == "precache":
            run_here(program, words, bucket)
    (text,) = blocks("README.md", "python")
    assert 'build("photos", batch_size=256' in text
    quick = text.replace("batch_size=256", "batch_size=8, size=64")
    for path in ("photos", "data/shards"):
        model = torchvision.models.resnet18(num_classes=4)
        names = {"__name__": "__main__", "model": model, "cross_entropy": torch.nn.functional.cross_entropy}
        exec(compile(quick.replace("photos", path), "README.md", "exec"), names)
        assert all(parameter.grad is not None for parameter in model.parameters())


# forkserver imports the program anew as spawn does
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_the_first_lines_run_where_workers_import_the_program(method: str, photos: Path) -> None:
    """macOS, Windows and Python 3.14 start workers so."""
    text = blocks("README.md", "python")[0].replace("batch_size=256", "batch_size=16, size=32")
    start = f"if __name__ == '__main__':\n    multiprocessing.set_start_method({method!r})\n"
    names = "model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(4))\n"
    names += "cross_entropy = torch.nn.functional.cross_entropy\n"
    (photos / "program.py").write_text(f"import multiprocessing\nimport torch\n{start}{names}{text}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "program.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_python_that_starts_workers_has_the_guard() -> None:
    texts = [text for guide in GUIDES for text in blocks(guide, "python")]
    over_pictures = [text for text in texts if '("photos"' in re.sub("#.*", "", text)]
    assert len(over_pictures) == 5
    for text in over_pictures:
        assert '\nif __name__ == "__main__":' in text, text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_bench_run(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for script in ("train.py", "mytrainer.py"):
        (photos / script).write_text(TRAIN)
    for program, name, *words in commands("bench/README.md"):
        if program == "precache":
            assert commandline.run(precache, "precache", [name, *words]) == 0
            continue
        quick = dict(SMALL)
        if name == "watch":
            quick["--batches"] = "8"  # fewer are refused
        options = {option for parameter in command_of(program, name).params for option in parameter.opts}
        added = options & quick.keys() - {word.split("=")[0] for word in words}
        arguments = [part for option in sorted(added) for part in (option, quick[option])]
        # a batch must not have more pictures than there are
        arguments += [word.replace("32,64,128", "16,32") for word in words]
        ended = run("bench", name, *arguments, cwd=photos)
        assert ended.returncode == 0, (name, words, ended.stderr)
