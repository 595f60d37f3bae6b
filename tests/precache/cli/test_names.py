"""Names of files come from others: none of them commands a terminal, whoever prints it."""

import json
import os
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import loaders
import precache
from precache.cli.terminal import Guarded
from precache.errors import DatasetError, ImageError, SettingError, printable
from tests.command import run_here as run

# A title, a colour, other directions, C1's CSI and NEL, DEL, new lines of three kinds, what is not text.
COMMANDS = os.fsdecode("\x1b]0;title\x07\x1b[31m\u202e\u2066\x9b32m\x85\x7f\r\n\u2028".encode() + b"\xff")
NASTY = f"a{COMMANDS}z"
BAD = ("Cc", "Cf", "Cs", "Zl", "Zp")
ALLOWED = "\n"


def check_plain(result: Any, *mentions: str) -> None:
    """Nothing but text came out; `mentions` did."""
    for text in (result.stdout, result.stderr):
        bad = {c for c in text if unicodedata.category(c) in BAD and c not in ALLOWED}
        assert not bad, (result.args, bad, text)
        assert not re.search("\r[^\n\r]*z", text), "the names' own"
    for mention in mentions:
        assert mention in result.stdout + result.stderr


@pytest.fixture(scope="module")
def nasty(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tree of nasty names, at a nasty path; with damaged pictures and what is ignored."""
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
    check_plain(result, "rejected 003.candle/a\\x1b]0;title\\x07\\x1b[31m\\u202e", "\\udcffz")
    return out


def test_inspecting_and_verifying(nasty: Path, nasty_dataset: Path) -> None:
    copy = Path(shutil.copytree(nasty_dataset, nasty / f"copy{NASTY}"))
    (copy / "train-00000.safetensors").unlink()
    for words, code, mentions in (
        (("inspect", nasty_dataset), 0, ("001a\\x1b]0;title", "[bold]:smile:", "rejected 003.candle/a\\x1b")),
        (("inspect", nasty_dataset, "--html", f"{NASTY}.html"), 0, ()),
        (("inspect", nasty_dataset, "--json"), 0, ()),
        (("verify", nasty_dataset, nasty / NASTY, "--deep", "--workers", 0), 0, ()),
        (("verify", copy), 1, ("rewrite it with: precache convert SRC $'",)),
        (("verify", nasty_dataset, copy, "--across"), 0, ()),
        (("check", nasty / NASTY, "--workers", 0), 1, ("003.candle/a\\x1b]0;title",)),
        (("convert", f"no{NASTY}", "x", "--format", "shards"), 2, ()),
        (("convert", nasty / NASTY, "x", "--format", NASTY), 2, ()),
        (("convert", nasty / NASTY, "x", f"--{NASTY}"), 2, ()),
        ((NASTY,), 2, ()),
        (("inspect", f"no{NASTY}", "--debug"), 2, ("Traceback",)),
        (("sample", nasty / NASTY), 2, ()),
        (("fetch", NASTY), 2, ()),
    ):
        result = run("precache", *words, cwd=nasty)
        assert result.returncode == code, words
        check_plain(result, *mentions)
        assert code < 2 or len(result.stderr.splitlines()) == 1 or "--debug" in words
        if "--json" in words:
            assert f"001{NASTY}" in json.loads(result.stdout)["splits"]["train"]["classes"]


@pytest.mark.slow
@pytest.mark.timeout(300)  # four processes that import torch
def test_benchmarks(nasty: Path, nasty_dataset: Path) -> None:
    short = ("--batches", 2, "--warmup", 1, "--repeats", 1, "--batch-size", 8, "--size", 32, "--workers", 1)
    shards = ("--backend", "shards", "--trainer", "emulated", "--device", "cpu", "--json", "result.json")
    result = run("bench", "loaders", nasty_dataset, *shards, *short, cwd=nasty)
    assert result.returncode == 0, result.stderr
    check_plain(result)
    path = nasty / f"result{NASTY}.json"
    content = json.loads((nasty / "result.json").read_text())
    content["skipped"] = {NASTY: NASTY}
    content["machine"]["cpu"] = NASTY
    for row in content["rows"]:
        row["backend"] = row["data"] = NASTY
    path.write_text(json.dumps(content))
    report = run("bench", "report", path, cwd=nasty)
    assert report.returncode == 0, report.stderr
    check_plain(report, "\\u202e")


def test_what_loaders_say(nasty: Path, nasty_dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    reading = loaders.Reading(workers=0, on_error="skip")
    with loaders.build(nasty / NASTY, size=32, reading=reading) as loader:
        assert sum(1 for _ in loader)
    assert any("a\\x1b]0;title" in said for said in caplog.messages)
    with pytest.raises(DatasetError, match="does not exist") as error:
        loaders.build(f"{nasty_dataset}x")
    assert all(said.isprintable() for said in (*caplog.messages, str(error.value)))


def test_an_unexpected_error_is_one_too(nasty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*arguments: object) -> None:
        raise RuntimeError(NASTY)

    monkeypatch.setattr(precache, "open_dataset", defect)
    result = run("precache", "inspect", ".", cwd=nasty)
    assert result.returncode == 2
    check_plain(result, "Traceback", "this is a bug; please report it", "a\\x1b]0;title")


def test_the_text_of_an_error_is_one_plain_line() -> None:
    for error in (DatasetError(f"{NASTY}: is bad"), SettingError(NASTY), ImageError(NASTY, f"is {NASTY}")):
        assert str(error).isprintable()
    for text in ("001.ak47", "Ärger", "日本語", "🙂", "a\\b", "e\u0301"):
        assert printable(text) == text, "no command"


def test_all_that_is_printed_while_a_command_runs_is_plain(tmp_path: Path) -> None:
    """Also by libraries, and where the encoding lacks a character."""
    path = tmp_path / "out"
    with open(path, "w", encoding="ascii") as file:
        print(f"é{NASTY}\tone\ntwo", file=Guarded(file))
    assert path.read_bytes().startswith(b"\\xe9a\\x1b]0;title\\x07")
    assert path.read_bytes().endswith(b"z\tone\ntwo\n")
