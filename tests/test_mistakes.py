"""Typical mistakes end with exit code 2 and one line that names the value; each command explains itself."""

import shlex
from pathlib import Path

import click
import pytest

import loaders
from bench.cli import main as bench
from precache import Recipe, convert
from precache.cli.main import main as precache
from precache.errors import PrecacheError
from precache.example_data.sample_tree import make_sample
from tests.command import run_here

MISTAKES = {
    "precache frobnicate": "frobnicate",
    "precache convert photos out": "--format",
    "precache convert nowhere out --format shards": "nowhere",
    "precache convert fotos out --format shards": "photos",  # did you mean
    "precache convert empty out --format shards": "empty/CLASS/picture.jpg",
    "precache convert flat out --format shards": "--class-depth 0",
    "precache convert notes.txt out --format shards": "notes.txt",
    "precache convert table.csv out --format shards": "line 2",
    "precache convert latin.csv out --format shards": "iconv -f WINDOWS-1252 -t UTF-8 latin.csv",
    "precache convert vectors.csv out --format shards": "--target number",
    "precache convert pairs out --format shards": "precache convert pairs/images DST --class-depth 0",
    "precache convert photos photos/out --format shards": "photos/out",
    "precache convert photos flat --format shards": "picture.jpg",
    "precache convert photos out --format sharks": "'shards'",
    "precache convert photos out --format dali --splits a=2": "a=2",
    "precache convert photos out --format shards --splits 0.8": "0.8",
    "precache convert photos out --format shards --quality 50": "--quality 50",
    "precache convert photos shards --format shards --size 16": "--overwrite",
    "precache convert broken out --format shards --workers 0": "cat/1.jpg",
    "precache verify shards photos": "precache verify --deep shards photos",
    "precache verify shards --root photos": "--root photos",
    "precache inspect photos": "precache convert photos",
    "precache inspect shards --html no/such/page.html": "no/such/page.html",
    "precache check shards": "precache verify shards",
    "precache push photos s3://bucket/photos": "precache convert photos",
    "bench frobnicate": "frobnicate",
    "bench loaders photos --device cpu --backend dalli": "'dali'",
    "bench loaders photos --device cpu --backend shards": "--backend all",
    "bench recommend photos --gpus 0": "gpus",
    "bench report notes.txt": "notes.txt",
}
"""Command -> what its error names: the value that is wrong, or the remedy."""
BUILD_MISTAKES = {
    "nowhere": ({"path": "nowhere"}, "nowhere"),
    "a text": ({"path": "notes.txt"}, "notes.txt"),
    "a split": ({"split": "val"}, "train"),
    "no samples in a batch": ({"batch_size": 0}, "got 0"),
    "a DataLoader's setting": ({"num_workers": 4}, "Reading(workers=...)"),
    "a class": ({"sampling": loaders.Sampling(classes=["cat"])}, "'cat'"),
    "ranks": ({"ranks": loaders.Ranks(rank=0, world_size=3, per_node=2)}, "per_node 2"),
}
"""What is wrong -> arguments of `loaders.build`, and what its error names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a tree `photos`, its `shards`, and what is none of both."""
    folder = tmp_path_factory.mktemp("mistakes")
    make_sample(folder / "photos", images=20, classes=2, seed=1, like="caltech", workers=0)
    for name in ("empty", "flat", "broken/cat"):
        (folder / name).mkdir(parents=True)
    (folder / "flat/picture.jpg").write_bytes(b"\xff\xd8\xff")
    (folder / "broken/cat/1.jpg").write_bytes(b"<html>")
    (folder / "notes.txt").write_text("mine")
    (folder / "table.csv").write_text("path,label\nnowhere.jpg,cat\n")
    (folder / "latin.csv").write_bytes(b"Bild;Sch\xe4den\n1.jpg;ja\n")
    (folder / "vectors.csv").write_text('path,label\nflat/picture.jpg,"[-1, 1]"\n')
    for name in ("images/1.jpg", "masks/1.png"):
        (folder / "pairs" / name).parent.mkdir(parents=True)
        (folder / "pairs" / name).write_bytes(b"\xff\xd8\xff")
    convert(folder / "photos", folder / "shards", Recipe(format="shards", size=32), workers=0)
    return folder


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_end_with_one_line_that_names_the_value(folder: Path, command: str) -> None:
    done = run_here(*shlex.split(command), cwd=folder)
    program = command.split(maxsplit=1)[0]
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{program}: error: ")]
    assert (done.returncode, len(lines)) == (2, 1), done
    assert done.stderr.endswith(f"{lines[0]}\n")
    assert MISTAKES[command] in lines[0]
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("mistake", BUILD_MISTAKES)
def test_build_raises_one_line_that_names_the_value(
    folder: Path, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    arguments, mention = BUILD_MISTAKES[mistake]
    with pytest.raises(PrecacheError) as raised:
        loaders.build(**{"path": "shards", **arguments})  # type: ignore[arg-type]
    assert mention in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("program", "group"), [("precache", precache), ("bench", bench)])
def test_each_command_explains_itself(program: str, group: click.Group, tmp_path: Path) -> None:
    names = group.list_commands(click.Context(group))
    listing = run_here(program, "--help", cwd=tmp_path)
    assert listing.returncode == 0
    for name in names:
        assert name in listing.stdout
        done = run_here(program, name, "--help", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"{program} {name}" in done.stdout
