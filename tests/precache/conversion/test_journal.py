"""Whatever became of a journal, the same command ends as if nothing had happened, or says why not."""

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from precache import convert
from precache.conversion.journal import JOURNAL_NAME
from precache.dataset.index import index_name
from precache.errors import DatasetError, PrecacheError
from precache.storage import records
from precache.storage.records import RecordFile
from tests.conftest import small_recipe
from tests.killing import contents

MUTATIONS: dict[str, Callable[[random.Random, bytearray, int], bytes]] = {
    "flip": lambda rng, data, at: bytes([*data[:at], data[at] ^ 1 << rng.randrange(8), *data[at + 1 :]]),
    "cut": lambda rng, data, at: data[:at],
    "zeros": lambda rng, data, at: data[:at] + bytes(len(data) - at),
    "insert": lambda rng, data, at: data[:at] + rng.randbytes(9) + data[at:],
    "delete": lambda rng, data, at: data[:at] + data[at + rng.randrange(1, 200) :],
    "nest": lambda rng, data, at: data[:at] + b"[" * 100_000 + data[at:],
    "huge number": lambda rng, data, at: data[:at] + b"9" * 5000 + data[at:],
    "repeat": lambda rng, data, at: data + b"".join(rng.sample(data.splitlines(True), 2)),
    "shuffle": lambda rng, data, at: b"".join(rng.sample(lines := data.splitlines(True), len(lines))),
    "drop a line": lambda rng, data, at: b"".join(sorted(data.splitlines(True), key=len)[1:]),
}


@pytest.fixture(scope="module")
def unfinished(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most shards are done, and one is written but not in the journal."""
    out = tmp_path_factory.mktemp("unfinished") / "out"

    def stop(done: int, total: int) -> None:
        if done > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(raw_tree, out, small_recipe("shards"), workers=0, on_progress=stop)
    lines = (out / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    (out / JOURNAL_NAME).write_bytes(b"".join(lines[:-1]))
    return out


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("kind", MUTATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_no_damage_to_a_journal_gives_another_dataset(
    kind: str, seed: int, raw_tree: Path, converted: dict[str, Path], unfinished: Path, tmp_path: Path
) -> None:
    rng = random.Random(f"{kind} {seed}")
    out = Path(shutil.copytree(unfinished, tmp_path / "out"))
    journal = bytearray((out / JOURNAL_NAME).read_bytes())
    (out / JOURNAL_NAME).write_bytes(MUTATIONS[kind](rng, journal, rng.randrange(len(journal))))
    mine = {"mine-12345.jpg": b"mine"} if seed == 1 else {}
    for name, content in mine.items():
        (out / name).write_bytes(content)
    try:
        convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=seed == 2)
    except PrecacheError:
        found = contents(out)
        assert {name: found.get(name) for name in mine} == mine
        assert mine  # or else it could have begun again
    else:
        assert contents(out) == {**contents(converted["shards"]), **mine}


def test_a_damaged_line_and_those_after_it_are_dropped_and_that_is_said(
    raw_tree: Path,
    converted: dict[str, Path],
    unfinished: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = Path(shutil.copytree(unfinished, tmp_path / "out"))
    lines = (out / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"rejected": []', b'"rejected": [ ]')
    (out / JOURNAL_NAME).write_bytes(b"".join(lines))
    kept = (out / "train-00000.safetensors").stat().st_mtime_ns
    with caplog.at_level(logging.WARNING, "precache"):
        done = convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert caplog.messages == [
        f"{out / JOURNAL_NAME}: line 3 is damaged or cut off; its shard and those of the lines below are "
        f"converted again"
    ]
    assert done.converted == 70 - 12
    assert (out / "train-00000.safetensors").stat().st_mtime_ns == kept
    assert contents(out) == contents(converted["shards"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"train-00001"', '"../victim"'),
        ('"train-00001"', '"train-00002"'),
        ('"train-00001"', "[]"),
        ('"files": [[', '"files": [[1e400, '),
        ('"files": [[', '"files": [[0, "00000000"], ['),
        ('"rejected": []', '"rejected": [[999999, "../victim"]]'),
        ('"rejected": []', '"rejected": {"id": 0}'),
        ('"checksums": [', '"checksums": ["!", '),
        ('"checksums": [', '"checksums": [0, '),
        ('"source:modified_ns": [', '"source:modified_ns": [1e400, '),
        ('"files": [', f'"files": [{"[" * 5000}'),
    ],
)
def test_a_line_with_a_right_checksum_is_still_compared_with_the_plan(
    old: str, new: str, raw_tree: Path, converted: dict[str, Path], unfinished: Path, tmp_path: Path
) -> None:
    """Written by somebody who knows how: no file that it names is opened, and no count in it is believed."""
    out = Path(shutil.copytree(unfinished, tmp_path / "out"))
    (tmp_path / "victim").write_text("mine")
    lines = (out / JOURNAL_NAME).read_text().splitlines()
    assert old in lines[2]
    rewrite(
        out / JOURNAL_NAME, [line.replace(old, new, 1) if n == 2 else line for n, line in enumerate(lines)]
    )
    done = convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert done.converted > 11  # the line's shard, too
    assert contents(out) == contents(converted["shards"])
    assert (tmp_path / "victim").read_text() == "mine"


def rewrite(path: Path, lines: list[str]) -> None:
    """Write records of the text of `lines`, with right checksums."""

    path.unlink()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    file = RecordFile(descriptor)
    dumps = records.json.dumps
    for line in lines:
        body = line[: line.rindex(', "checksum": "')] + "}"
        records.json.dumps = lambda content, body=body: body
        try:
            file.append({})
        finally:
            records.json.dumps = dumps
    file.close()


@pytest.mark.parametrize("content", [b"", bytes(100), b'{"journal": 1, "rec', b'{"journal'])
def test_an_empty_or_cut_off_journal_is_no_obstacle(
    content: bytes, raw_tree: Path, converted: dict[str, Path], unfinished: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(unfinished, tmp_path / "out"))
    (out / JOURNAL_NAME).write_bytes(content)
    assert convert(raw_tree, out, small_recipe("shards"), workers=0).converted == 70
    assert contents(out) == contents(converted["shards"])


def test_an_empty_journal_makes_no_folder_of_somebody_else_ours(raw_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / JOURNAL_NAME).touch()
    before = contents(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(DatasetError, match=r"holds other files \(thesis.txt\); move them elsewhere"):
            convert(raw_tree, tmp_path, small_recipe("shards"), workers=0, overwrite=overwrite)
        assert contents(tmp_path) == before


def test_a_journal_of_the_users_in_a_finished_dataset_stays(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(converted["shards"], tmp_path / "out"))
    (out / JOURNAL_NAME).write_text("Dear diary\n")
    assert convert(raw_tree, out, small_recipe("shards"), workers=0).converted == 0
    with pytest.raises(DatasetError, match=r"not part of the dataset \(journal.jsonl\)"):
        convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True)
    assert (out / JOURNAL_NAME).read_text() == "Dear diary\n"


def test_a_leftover_of_our_own_journal_alone_is_no_obstacle(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / f".{JOURNAL_NAME}.0123456789abcdef.partial").write_text('{"jour')
    convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert contents(out) == contents(converted["shards"])


def test_what_a_dead_worker_left_is_gone_when_the_dataset_is_finished(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def leave(done: int, total: int) -> None:
        for name in ("train-00003.safetensors", index_name()):
            (out / f".{name}.0123456789abcdef.partial").touch()

    convert(raw_tree, out, small_recipe("shards"), workers=0, on_progress=leave)
    assert contents(out) == contents(converted["shards"])
