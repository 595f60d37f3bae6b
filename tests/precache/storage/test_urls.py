"""Parsing of paths and URLs."""

import os
from pathlib import Path

import pytest
from PIL import Image

import loaders
from precache import Recipe, check, convert, open_dataset, verify
from precache.errors import SettingError
from precache.storage.urls import Url, locate
from tests.command import run_here


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data/raw", Path("data/raw")),
        ("file:///data/my%20photos", Path("/data/my photos")),
        ("s3a://bucket//a//b/", Url("s3://bucket", "a/b")),
        ("az://account/container/a", Url("az://account/container", "a")),
        ("https://host:8000/a/b.tar", Url("https://host:8000", "a/b.tar")),
    ],
)
def test_locate_parses_paths_and_urls(text: str, expected: Path | Url) -> None:
    assert locate(text) == locate(expected) == expected


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    for name in ("a/1.png", "b/2.png"):
        (home / "tree" / name).parent.mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(home / "tree" / name)
    (home / "splits.csv").write_text("a/1.png,train\nb/2.png,val\n")
    (home / "table.csv").write_text("path,label\na/1.png,x\n")
    recipe = Recipe(format="shards", size=8)
    assert check("~/tree", list_file="~/list.csv", workers=0).rejected == ()
    convert("~/tree", "~/out", recipe, workers=0)
    convert("~/tree", "~/split", recipe, split_list="~/splits.csv", workers=0)
    convert("~/table.csv", "~/table", recipe, root="~/tree", workers=0)
    with pytest.raises(SettingError, match="nothing to convert"):
        convert("~/tree", "~/more", recipe, without=["~/out"], workers=0)
    assert verify("~/out") == []
    assert open_dataset("~/out").path == home / "out"
    reading = loaders.Reading(workers=0, cache_dir="~/cache")
    for options in ({}, {"precache": "~/first"}, {"splits": "~/splits.csv", "split": "val"}):
        with loaders.build("~/tree", batch_size=1, reading=reading, **options) as loader:
            assert loader.samples == (1 if "split" in options else 2)
    assert len(loaders.ImageDataset("~/tree", precache="~/first")) == 2
    for command in ("inspect ~/out --html ~/page.html", "check ~/tree --list ~/list.csv", "verify ~/out"):
        assert run_here("precache", *command.split(), cwd=here).returncode == 0, command
    assert {"out", "split", "table", "first", "list.csv", "page.html"} <= {*os.listdir(home)}
    assert os.listdir(here) == []


@pytest.mark.parametrize("text", ["ftp://host/a", "az://account", "s3://bucket/../other"])
def test_locate_refuses_unknown_and_incomplete_urls(text: str) -> None:
    with pytest.raises(SettingError, check=lambda error: error.path == text):
        locate(text)


def test_locate_refuses_a_password_without_printing_it() -> None:
    with pytest.raises(SettingError) as raised:
        locate("https://me:hunter2@host/data")
    assert "hunter2" not in str(raised.value)
