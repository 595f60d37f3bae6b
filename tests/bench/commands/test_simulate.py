"""`bench simulate` against closed forms, a stored result and real trials whose stages sleep."""

import json
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.commands.simulate import DECODE, LINK, STEP, STORAGE, Prediction, Rates, simulate
from bench.measure.fresh import run_fresh
from bench.measure.settings import Settings
from bench.measure.trial import measure
from precache.console import commandline
from tests.bench.slowed import BATCH, make_tree, slow
from tests.command import ROOT, check_bad_input

RESULT = ROOT / "bench/results/caltech101-xeon-2cpu-emulated-4000.json"
GIVEN = ("--decode-ms", 1, "--trainer-rate", 100)


def command(*arguments: object) -> int:
    return commandline.run(main, "bench", ["simulate", *map(str, arguments)])


def rates(**changed: Any) -> Rates:
    """Every stage far faster than a trainer of 1,000 images/s, unless changed."""
    usual = {"decode_s": 1e-5, "image_bytes": 100_000.0, "trainer_images_per_s": 1000.0, "workers": 4}
    return Rates(**{**usual, **changed})


@pytest.mark.parametrize("gpus", [1, 3, 8, 64])
@pytest.mark.parametrize(
    ("changed", "binds", "per_gpu", "together"),
    [
        ({}, STEP, 1000.0, None),
        ({"decode_s": 0.008}, DECODE, 4 / 0.008, None),
        ({"decode_s": 0.008, "cpus": 4}, DECODE, None, 4 / 0.008),
        ({"storage_mbps": 50.0}, STORAGE, None, 500.0),
        ({"node_mbps": 20.0, "storage_mbps": 1e6}, LINK, None, 200.0),
    ],
)
def test_the_slowest_stage_decides(
    changed: dict[str, Any], binds: str, per_gpu: float | None, together: float | None, gpus: int
) -> None:
    """On one node: its CPUs, its link and the storage are shared by all GPUs."""
    found = simulate(rates(**changed), gpus, nodes=1)
    expected = together if per_gpu is None else per_gpu * gpus
    assert found.images_per_s == pytest.approx(expected)
    assert found.binds == binds
    assert found.busy[binds] == 1
    assert found.busy[STEP] == pytest.approx(1 - found.wait_share)
    assert found.wait_share == pytest.approx(1 - found.images_per_s / (1000 * gpus))
    assert found.needed_mbps == pytest.approx(100 * gpus)


def test_each_node_brings_its_own_link_and_cpus_and_all_wait_for_the_fullest() -> None:
    for nodes in (1, 2, 8):
        assert simulate(rates(node_mbps=20.0), 8, nodes).images_per_s == pytest.approx(200 * nodes)
        crowded = simulate(rates(decode_s=0.016, cpus=4), 8, nodes)
        assert crowded.images_per_s == pytest.approx(250 * nodes)
    assert simulate(rates(node_mbps=20.0), 3, 2).images_per_s == pytest.approx(300), "100 for each of two"


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "workers", "binds"), [(200, 2, DECODE), (60, 2, STEP), (80, 1, DECODE)])
def test_real_trials_come_within_a_tenth(trainer: int, workers: int, binds: str, tmp_path: Path) -> None:
    """Each worker reads and decodes 50 images/s, by sleeping; all else is real."""
    settings = Settings(
        backend="pytorch", path=make_tree(tmp_path / "tree"), classes=2, trainer=f"emulated:{trainer}",
        batch_size=BATCH, workers=workers, size=32, batches=14,
        around=partial(slow, {"storage": 0.005, "decode": 0.015, "transfer": 0.0}),
    )  # fmt: skip
    alone = run_fresh(measure, replace(settings, trainer="none")).images_per_s
    assert alone == pytest.approx(50 * workers, rel=0.3)
    predicted = simulate(Rates(decode_s=workers / alone, trainer_images_per_s=trainer, workers=workers), 1, 1)
    assert predicted.binds == binds
    together = run_fresh(measure, settings).images_per_s
    assert together == pytest.approx(predicted.images_per_s, rel=0.1)


def predicted(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], Prediction]:
    """The rates, and the last prediction, of `--json -`."""
    assert command(*arguments, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    return found["rates"], Prediction(**found["predictions"][-1])


def test_rates_come_from_a_result_and_options_replace_them(capsys: pytest.CaptureFixture[str]) -> None:
    row = next(row for row in json.loads(RESULT.read_text())["rows"] if row["backend"] == "webdataset")
    arguments = ("--result", RESULT, "--backend", "webdataset", "--gpus", "1,16")
    taken, many = predicted(capsys, *arguments)
    assert taken["decode_s"] == pytest.approx(2 / row["loader"]["median"])
    assert (taken["trainer_images_per_s"], taken["workers"]) == (row["trainer"]["median"], 2)
    assert (many.binds, many.gpus, many.nodes) == (DECODE, 16, 2)
    assert many.images_per_s == pytest.approx(16 * row["loader"]["median"])
    assert predicted(capsys, *arguments, "--workers", 8)[1].binds == STEP
    assert command(*arguments) == 0
    assert capsys.readouterr().out.startswith("With 1 GPU decoding is the bottleneck: it waits 1")


def test_what_the_storage_must_give_comes_from_the_stored_bytes_of_a_result(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = json.loads(RESULT.read_text())
    for row in content["rows"]:
        row["image_bytes"] = 20_000.0
    stored = tmp_path / "r.json"
    stored.write_text(json.dumps(content))
    arguments = ("--result", stored, "--backend", "webdataset", "--gpus", 8)
    taken, found = predicted(capsys, *arguments)
    assert found.needed_mbps == pytest.approx(8 * taken["trainer_images_per_s"] * 20_000 / 1e6)
    assert found.binds == DECODE, "the storage is no bottleneck unless its rate is given"
    assert predicted(capsys, *arguments, "--storage-mbps", 100)[1].binds == STORAGE
    larger = predicted(capsys, *arguments, "--image-bytes", 40_000)[1]
    assert larger.needed_mbps == pytest.approx(2 * found.needed_mbps)


def test_a_result_that_is_not_to_be_relied_on_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its machine was busy, or it measured something else of loader and trainer together."""
    stored = tmp_path / "r.json"
    arguments = ("--result", stored, "--backend", "webdataset", "--gpus", 8)
    content = json.loads(RESULT.read_text())
    stored.write_text(json.dumps(content))
    assert command(*arguments) == 0
    assert str(stored) not in capsys.readouterr().out
    for row in content["rows"]:
        if row["together"] is not None:
            row["together"]["median"] /= 2
    content["settings"]["other_cpu"] = 0.31
    stored.write_text(json.dumps(content))
    assert command(*arguments) == 0
    printed = capsys.readouterr().out
    assert "% too high: loader and trainer were measured alone" in printed
    assert "Other processes took 31% of the CPUs" in printed


def test_the_answer_comes_first_then_a_row_per_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ("--decode-ms", 2, "--trainer-rate", 1786, "--image-bytes", 110_000, "--storage-mbps", 2000)
    assert command("--gpus", "1,8,64", "--nodes", "1,1,16", *rest) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "With 64 GPUs the storage is the bottleneck: they wait 84% of the time."
    assert [line.split()[:2] for line in lines[2:5]] == [["1", "1"], ["8", "1"], ["64", "16"]]
    assert all(len(line.rstrip()) <= 100 for line in lines)
    assert command(*GIVEN, "--gpus", "1,8", "--image-bytes", 110_000) == 0
    said = "No GPU waits, if the storage gives 8 GPUs 88 MB/s: the training step is the bottleneck."
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ([], ["--decode-ms is not known"]),
        (["--decode-ms", 1], ["--trainer-rate is not known"]),
        (["--result", RESULT], ["5 rows", "--backend", "shards on shards with emulated:4000"]),
        (["--result", RESULT, "--backend", "dalli"], ["0 rows are of dalli", "dali on dali"]),
        (["--backend", "dali"], ["choose a row of --result"]),
        ([*GIVEN, "--storage-mbps", 5], ["need --image-bytes"]),
        ([*GIVEN, "--gpus", "1,x"], ["gpus must be numbers", "'1,x'"]),
        ([*GIVEN, "--gpus", "0"], ["gpus must be an integer", "got 0"]),
        ([*GIVEN, "--nodes", "1"], ["nodes '1'", "as many numbers"]),
        ([*GIVEN, "--gpus", "1,2", "--nodes", "1,3"], ["nodes", "got 3"]),
        ([*GIVEN, "--decode-ms", -1], ["decode_s must be a positive number", "-0.001"]),
        ([*GIVEN, "--trainer-rate", "nan"], ["trainer_images_per_s must be a positive number, got nan"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[object], mentions: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    code = command(*arguments)
    check_bad_input(subprocess.CompletedProcess([], code, *capfd.readouterr()), *mentions)
