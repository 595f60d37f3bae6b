"""`bench hardware`: structure, units and relations of its figures, never their size."""

import json
from pathlib import Path

import torch

from bench.report.hardware import PARTS, make_result
from bench.report.result import Trial
from tests.command import run_here

MACHINE = {"cpu": "2 CPUs", "memory": "1 GiB", "accelerator": "none", "date": "today"}
SETTINGS = {
    "pictures": "photos", "images": 1000, "file_bytes": 10**8, "scratch": ".", "on_scratch_disk": True,
    "repeats": 1,
}  # fmt: skip


def trial(part: str, rate: float) -> Trial:
    return Trial({"part": part, "repeat": 0}, {PARTS[part].number: rate}, facts={"how": ""})


def test_hardware_measures_every_part_or_says_why_not(raw_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    quick = ("--repeats", 2, "--seconds", 0.01, "--scratch", "scratch", "--json", "out/h.json")
    ended = run_here("bench", "hardware", "--data", raw_tree, *quick, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert all(len(line.rstrip()) <= 100 and "…" not in line for line in ended.stdout.splitlines())
    stored = json.loads((tmp_path / "out/h.json").read_text())
    measured = [row["name"] for row in stored["rows"]]
    assert sorted([*measured, *stored["skipped"]]) == sorted(PARTS)
    assert ("host to device, pinned" in measured) == torch.cuda.is_available()
    assert all(f"\n{name} " in ended.stdout for name in measured)
    assert len(stored["trials"]) == 2 * len(measured)
    shown = run_here("bench", "report", "out/h.json", cwd=tmp_path)
    assert shown.stdout.splitlines()[0] == ended.stdout.splitlines()[0]
    files = {path.name for path in (tmp_path / "scratch").rglob("*") if path.is_file()}
    assert files <= {".precache-staging"}, "the process removes it as it ends"


def test_the_answer_names_the_only_part_that_was_measured() -> None:
    (answer,) = make_result(MACHINE, SETTINGS, [trial("disk, sequential read", 1e8)], {}).answer
    assert answer[0].startswith("Reading from the disk is the slowest part")


def test_the_answer_names_the_slowest_part_first() -> None:
    read, decode = trial("disk, sequential read", 1e8), trial("JPEG decode, all cores", 500)
    result = make_result(MACHINE, SETTINGS, [read, decode], {})
    assert [row.name for row in result.rows if result.is_best(row)] == ["JPEG decode, all cores"]
    assert result.answer[0][0].index("2.00 s") < result.answer[0][0].index("1,000 ms")


def test_times_are_given_for_all_pictures_and_their_bytes() -> None:
    trials = [trial("memory copy, one thread", 1e9), trial("JPEG decode, one core", 250)]
    copy, decode = make_result(MACHINE, SETTINGS, trials, {}).rows
    assert copy.values["alone_s"].median == 0.1
    assert decode.values["alone_s"].median == 4
    assert copy.texts["rate"] == "1,000 MB/s (1,000-1,000)"
