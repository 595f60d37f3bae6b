"""`bench compare` on results made by hand, as 'bench loaders --json' writes them."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.report.row import Row
from precache.cli import commandline
from tests.bench.rich_result import altered, around, peer, rich_result
from tests.bench.rich_result import row as fed_row
from tests.command import check_bad_input

Write = Callable[..., Path]
SETTINGS: dict[str, Any] = {
    "trainers": ["emulated:4000"], "batch_size": 64, "size": 224, "repeats": 5, "other_cpu": 0.0,
    "data": {"shards on shards": {"samples": 9145, "digest": "0123456789abcdef"}},
}  # fmt: skip
OTHER_DATA = {"shards on shards": {"samples": 9144, "digest": "fedcba9876543210"}}


def row(backend: str, data: str, loader: float, together: float) -> Row:
    rates = {"loader": around(loader, 0.02), "together": around(together, 0.02)}
    return altered(fed_row(backend, data, loader, trainer_name="emulated:4000"), **rates)


SHARDS, TREE = row("shards", "shards", 22_000, 3_900), row("pytorch", "raw tree", 1_900, 1_850)
SLOWER, DALI = row("shards", "shards", 22_000, 3_000), row("dali", "dali", 3_000, 2_900)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a result with the rows given, and what else differs from the usual."""

    def write(name: str, *rows: Row, cpu: str = "EPYC, 2 CPUs", **changed: Any) -> Path:
        rich = rich_result()
        machine, settings = {**rich.machine, "cpu": cpu}, {**rich.settings, **SETTINGS, **changed}
        result = replace(rich, machine=machine, settings=settings, rows=rows, skipped={})
        (tmp_path / name).write_text(json.dumps(result.to_json()))
        return tmp_path / name

    return write


def compare(*arguments: object) -> int:
    return commandline.run(main, "bench", ["compare", *map(str, arguments)])


def line(text: str, *words: str) -> str:
    (found,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return found.rstrip()


def test_a_rate_is_judged_by_the_whole_range_of_b_over_a(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write("a.json", SHARDS)
    for loader, options, verdict, code in (
        (around(44_000, 0.02), [], "2.00 (1.92-2.08)  faster", 0),
        (around(16_000, 0.02), [], "regression", 1),
        (around(16_000, 0.02), ["--tolerance", 0.3], "slower", 0),
        (around(20_240, 0.02), [], "slower", 0),  # -8%, +-2% on both sides: it may be as little as -4.3%
        (around(15_000, 0.6), [], "within noise", 0),
    ):
        assert compare(before, write("b.json", altered(SHARDS, loader=loader)), *options) == code
        assert line(capsys.readouterr().out, "shards", " loader ").endswith(verdict)
    assert compare(before, write("b.json", SLOWER, repeats=1)) == 0, "one repeat is no evidence"
    fast, slow = (peer("gather", "shards", rate) for rate in (40_000, 20_000))
    assert compare(write("a.json", SHARDS, fast), write("b.json", SHARDS, slow)) == 0, "it is not ours"


def test_what_differs_in_machine_or_work_is_not_compared_unless_forced(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    before = write("a.json", SHARDS, TREE)
    for changed, mention in (
        ({"cpu": "Xeon, 8 CPUs"}, "cpu EPYC, 2 CPUs and Xeon, 8 CPUs"),
        ({"trainers": ["resnet50", "none"]}, "trainers emulated:4000 and resnet50, none"),
        ({"data": OTHER_DATA}, "9,145 pictures (digest 0123456789ab) and 9,144 pictures (digest fedcba"),
    ):
        after = write("b.json", SHARDS, TREE, **changed)
        refused = subprocess.CompletedProcess([], compare(before, after), *capfd.readouterr())
        check_bad_input(refused, mention, "--force", "a.json", "b.json")
        assert compare(before, after, "--force") == 0
        assert mention in capfd.readouterr().out


def test_a_row_that_the_second_lacks_is_exit_code_1_unless_forced_and_the_json_has_every_change(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = write("a.json", SHARDS, TREE), write("b.json", SHARDS, DALI, SHARDS)
    assert compare(before, after) == 1
    printed = capsys.readouterr().out
    for path, only in ((before, "pytorch on raw tree"), (after, "dali"), (after, "shards (2)")):
        assert f"only in {path}: {only} with emulated:4000" in printed
    assert compare(before, after, "--force") == 0
    assert compare(write("c.json", SHARDS), before) == 0, "a row more is no loss"
    capsys.readouterr()
    assert compare(before, write("b.json", SLOWER, DALI), "--json", "-", "--quiet") == 1
    content = json.loads(capsys.readouterr().out)
    found = [(each["row"]["backend"], each["rate"], each["verdict"]) for each in content["changes"]]
    assert found == [("shards", "loader", "not distinguishable"), ("shards", "together", "regression")]
    missing = [key["backend"] for key in (*content["only_before"], *content["only_after"])]
    assert missing == ["pytorch", "dali"]
