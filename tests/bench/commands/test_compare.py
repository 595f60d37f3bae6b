"""`bench compare` on results made by hand, as 'bench loaders --json' writes them."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from precache.cli import commandline
from tests.command import check_bad_input

Write = Callable[..., Path]


def rate(median: float, spread: float = 0.02) -> dict[str, float]:
    return {"median": median, "low": median * (1 - spread), "high": median * (1 + spread)}


def row(backend: str, data: str, loader: float, together: float, trainer: str = "emulated:4000") -> Any:
    return {
        "backend": backend,
        "data": data,
        "trainer_name": trainer,
        "loader": rate(loader),
        "trainer": rate(4000) if trainer != "none" else None,
        "together": rate(together),
        "ratio": rate(together / 4000) if trainer != "none" else None,
        "first_batch_s": rate(0.1),
        "batch_s_median": 0.016,
        "batch_s_p95": 0.020,
    }


ROWS = [row("shards", "shards", 22_000, 3_900), row("pytorch", "raw tree", 1_900, 1_850)]

DATA = {
    "shards on shards": {"samples": 9145, "digest": "0123456789abcdef"},
    "pytorch on raw tree": {"samples": 9145, "digest": "89abcdef01234567"},
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a result with the rows given, and what else differs from the usual."""

    def write(name: str, rows: list[Any], **changed: Any) -> Path:
        machine = {"cpu": "EPYC, 2 CPUs", "memory": "24 GiB", "accelerator": "none", "date": "2026-11-21"}
        settings = {
            "trainers": ["emulated:4000"], "batch_size": 64, "size": 224, "workers": 2, "repeats": 5,
            "page_cache": "warm", "amp": "off", "compiled": False, "cache": "none",
            "augment": "eval", "shuffle": "auto", "device": "cpu", "data": DATA, "other_cpu": 0.0,
        }  # fmt: skip
        for values in (machine, settings):
            values.update({key: value for key, value in changed.items() if key in values})
        path = tmp_path / name
        path.write_text(
            json.dumps({"version": 1, "machine": machine, "settings": settings, "rows": rows, "skipped": {}})
        )
        return path

    return write


def compare(*arguments: object) -> int:
    return commandline.run(main, "bench", ["compare", *map(str, arguments)])


def line(text: str, *words: str) -> str:
    (found,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return found.rstrip()


def test_a_result_of_a_busy_machine_is_told(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    quiet, busy = write("a.json", ROWS), write("b.json", ROWS, other_cpu=0.31)
    assert compare(quiet, busy) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{busy}: Other processes took 31% of the CPUs" in printed
    assert f"{quiet}: Other" not in printed


@pytest.mark.parametrize(
    ("loader", "options", "verdict", "code"),
    [
        (rate(44_000), [], "2.00 (1.92-2.08)  faster", 0),
        (rate(16_000), [], "regression", 1),
        (rate(16_000), ["--tolerance", 0.3], "slower", 0),
        (rate(20_240), [], "slower", 0),  # -8%, +-2% on both sides: the ratio may be as high as 0.957
        (rate(15_000, spread=0.6), [], "within noise", 0),
    ],
)
def test_a_rate_is_judged_by_the_whole_range_of_b_over_a(
    write: Write,
    capsys: pytest.CaptureFixture[str],
    loader: dict[str, float],
    options: list[object],
    verdict: str,
    code: int,
) -> None:
    before, after = write("a.json", ROWS[:1]), write("b.json", [{**ROWS[0], "loader": loader}])
    assert compare(before, after, *options) == code
    found = line(capsys.readouterr().out, "shards", " loader ")
    assert found.split("  ")[0] == "shards"
    assert found.endswith(verdict)


def test_a_single_repeat_distinguishes_nothing(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    before = write("a.json", ROWS[:1])
    after = write("b.json", [row("shards", "shards", 22_000, 3_000)], repeats=1)
    assert compare(before, after) == 0
    assert line(capsys.readouterr().out, "shards", "together").endswith("within noise")


def test_what_ours_are_compared_with_may_be_slower(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = ({**row("gather", "shards", rate, rate), "peer": True} for rate in (40_000, 20_000))
    assert compare(write("a.json", [*ROWS, fast]), write("b.json", [*ROWS, slow])) == 0
    assert line(capsys.readouterr().out, "gather", " loader ").endswith("slower")


@pytest.mark.parametrize(
    ("changed", "mention"),
    [
        ({"cpu": "Xeon, 8 CPUs"}, "cpu EPYC, 2 CPUs and Xeon, 8 CPUs"),
        ({"batch_size": 32}, "batch_size 64 and 32"),
        ({"trainers": ["resnet50", "none"]}, "trainers emulated:4000 and resnet50, none"),
        ({"compiled": True}, "compiled False and True"),
        (
            {"data": {**DATA, "shards on shards": {"samples": 9144, "digest": "fedcba9876543210"}}},
            "data of shards on shards 9,145 pictures (digest 0123456789ab) and 9,144 pictures (digest "
            "fedcba987654)",
        ),
    ],
)
def test_what_differs_in_machine_or_work_is_not_compared_unless_forced(
    write: Write, capfd: pytest.CaptureFixture[str], changed: dict[str, Any], mention: str
) -> None:
    before, after = write("a.json", ROWS), write("b.json", ROWS, **changed)
    code = compare(before, after)
    check_bad_input(
        subprocess.CompletedProcess([], code, *capfd.readouterr()), mention, "use --force", "a.json", "b.json"
    )
    assert compare(before, after, "--force") == 0
    assert f"Compared although they differ in {mention}." in capfd.readouterr().out


def test_a_row_that_the_second_lacks_is_exit_code_1_unless_forced(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write("a.json", ROWS)
    after = write("b.json", [ROWS[0], row("dali", "dali", 3_000, 2_900), ROWS[0]])
    assert compare(before, after) == 1
    printed = capsys.readouterr().out
    assert f"{after} lacks 1 row of {before}; --force goes on without." in printed
    assert f"only in {before}: pytorch on raw tree with emulated:4000" in printed
    assert f"only in {after}: dali with emulated:4000" in printed
    assert f"only in {after}: shards (2) with emulated:4000" in printed
    assert compare(before, after, "--force") == 0
    assert compare(write("c.json", ROWS[:1]), before) == 0, "a row more is no loss"


def test_the_json_has_each_ratio_with_its_interval_and_verdict(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write("a.json", ROWS)
    after = write("b.json", [row("shards", "shards", 22_000, 3_000), row("dali", "dali", 3_000, 2_900)])
    assert compare(before, after, "--json", "-", "--quiet") == compare(before, after) == 1
    printed = capsys.readouterr().out
    content, end = json.JSONDecoder().raw_decode(printed)
    assert printed[end:].startswith("\n1 of 2 rates fell by more than 5%.\n"), "the answer comes first"
    of_shards = {"backend": "shards", "data": "shards", "trainer": "emulated:4000", "rank": 1}
    loader, together = content["changes"]
    assert (loader["row"], loader["rate"], loader["verdict"]) == (of_shards, "loader", "not distinguishable")
    assert (together["row"], together["rate"], together["verdict"]) == (of_shards, "together", "regression")
    assert together["before"] == rate(3_900)
    assert together["ratio"]["low"] < together["ratio"]["median"] < together["ratio"]["high"] < 0.95
    assert together["ratio"]["median"] == pytest.approx(3_000 / 3_900)
    assert [key["backend"] for key in (*content["only_before"], *content["only_after"])] == [
        "pytorch",
        "dali",
    ]
    assert (content["tolerance"], content["differences"]) == (0.05, [])
    written = tmp_path / "out/compared.json"
    assert compare(before, after, "--json", written, "--quiet") == 1
    assert json.loads(written.read_text()) == content
    assert capsys.readouterr().out == ""
