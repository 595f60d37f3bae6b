"""File names with control characters, which no command and no warning may print to a terminal."""

import json
import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import loaders
from precache import Recipe, convert, page
from tests.command import ROOT
from tests.command import run_here as run

# A title, a colour, other directions, C1's CSI and NEL, DEL, kinds of line breaks, a byte that is no text.
CONTROL_CHARACTERS = os.fsdecode(
    "\x1b]0;title\x07\x1b[31m\u202e\u2066\x9b32m\x85\x7f\r\n\u2028".encode() + b"\xff"
)
NASTY = f"a{CONTROL_CHARACTERS}<i>z"


def check_plain(result: Any, *mentions: str) -> None:
    """Check that the output has no control characters, and has the `mentions`."""
    for text in (result.stdout, result.stderr):
        bad = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c != "\n"}
        assert not bad, (result.args, bad, text)
    for mention in mentions:
        assert mention in result.stdout + result.stderr


@pytest.fixture(scope="module")
def nasty(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tree of nasty names at a nasty path, with damaged pictures and ignored files."""
    folder = tmp_path_factory.mktemp("nasty")
    tree = Path(shutil.copytree(raw_tree, folder / NASTY))
    (tree / "001.anchor").rename(tree / f"001{NASTY}")
    (tree / "002.basket").rename(tree / f"002{NASTY}[bold]:smile:")
    victims = sorted(tree.glob("003*/*.jpg"))
    victims[0].write_bytes(b"<html>")
    victims[0].rename(victims[0].with_name(f"{NASTY}.jpg"))
    (tree / "003.candle" / f"{NASTY}.txt").write_text("no picture")
    (tree / f"{NASTY}.txt").write_text("no picture")
    (tree / f"empty{NASTY}").mkdir()
    return folder


@pytest.fixture(scope="module")
def nasty_dataset(nasty: Path) -> Path:
    out = nasty / f"out{NASTY}"
    words = f"--format shards --size 48 --shard-bytes {12 * 48 * 48 * 3} --max-rejects 0.1 --workers 0"
    result = run("precache", "convert", nasty / NASTY, out, *words.split(), cwd=nasty)
    assert result.returncode == 0, result.stderr
    check_plain(result, "rejected 003.candle/a\\x1b]0;title\\x07\\x1b[31m\\u202e", "\\udcff<i>z")
    return out


def test_commands_print_no_control_characters_of_names(nasty: Path, nasty_dataset: Path) -> None:
    copy = Path(shutil.copytree(nasty_dataset, nasty / f"copy{NASTY}"))
    (copy / "train-00000.safetensors").unlink()
    for words, code, mentions in (
        (("inspect", nasty_dataset), 0, ("001a\\x1b]0;title", "[bold]:smile:", "rejected 003.candle/a\\x1b")),
        (("inspect", nasty_dataset, "--html", f"{NASTY}.html"), 0, ()),
        (("inspect", nasty_dataset, "--json"), 0, ()),
        (("verify", nasty_dataset, nasty / NASTY, "--deep", "--workers", 0), 0, ()),
        (("verify", nasty_dataset, copy), 1, ("rewrite it with: precache convert SRC $'",)),
        (("check", nasty / NASTY, "--workers", 0), 1, ("003.candle/a\\x1b]0;title",)),
        (("convert", nasty / NASTY, "x", "--format", NASTY), 2, ()),
        (("convert", nasty / NASTY, "x", f"--{NASTY}"), 2, ()),
        ((NASTY,), 2, ()),
        (("inspect", f"no{NASTY}", "--debug"), 2, ("Traceback",)),
        (("sample", nasty / NASTY), 2, ()),
    ):
        result = run("precache", *words, cwd=nasty)
        assert result.returncode == code, words
        check_plain(result, *mentions)
        assert code < 2 or len(result.stderr.splitlines()) == 1 or "--debug" in words
        if "--json" in words:
            assert f"001{NASTY}" in json.loads(result.stdout)["splits"]["train"]["classes"]
    pages = (nasty / f"{NASTY}.html").read_text() + page.paragraphs([NASTY])
    assert ("<i>" in pages, "&lt;i&gt;" in pages) == (False, True)


def test_warnings_of_loaders_have_no_control_characters(
    nasty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reading = loaders.Reading(workers=0, on_error="skip")
    with loaders.build(nasty / NASTY, size=32, reading=reading) as loader:
        assert sum(1 for _ in loader)
    assert any("a\\x1b]0;title" in message for message in caplog.messages)
    assert all(message.isprintable() for message in caplog.messages)


def test_a_remedy_is_a_command_that_a_shell_runs(raw_tree: Path, tmp_path: Path) -> None:
    """The path has spaces, a quote and a byte that is no text; the colour looks like a comment to a shell."""
    out = tmp_path / os.fsdecode(b"my 'data' \x1b[31m\xff")
    recipe = Recipe(format="webdataset", size=16, background="#1e90ff")
    convert(raw_tree, out, recipe, workers=0)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "train-00000.tar").unlink()
    result = run("precache", "verify", out, cwd=tmp_path)
    assert result.returncode == 1
    assert "\x1b" not in result.stderr
    _, remedy = result.stderr.splitlines()
    _, _, command = remedy.partition("with: precache ")
    command = command.replace("SRC", str(raw_tree))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = f"{sys.executable} -m precache {command}"
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
