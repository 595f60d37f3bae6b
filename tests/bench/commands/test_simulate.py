"""The command `simulate`: where its rates come from, what it prints, and a result measured for real."""

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.cli import main
from bench.measure.comparison import Arm, RunSettings, compare
from bench.report.simulation import DECODE, STEP, STORAGE, Prediction
from precache.console import commandline
from tests.bench.slowed import BATCH, make_tree, slow
from tests.command import ROOT, check_bad_input


def command(*arguments: object) -> int:
    return commandline.run(main, "bench", ["simulate", *map(str, arguments)])


RESULT = ROOT / "bench/results/caltech101-xeon-2cpu-emulated-4000.json"


@pytest.mark.parametrize(
    ("trainer_images_per_s", "workers", "binds"),
    [
        pytest.param(200, 2, DECODE, marks=pytest.mark.slow),
        pytest.param(60, 2, STEP, marks=pytest.mark.slow),
        pytest.param(100, 2, None, marks=pytest.mark.slow),  # as fast as one another
        pytest.param(80, 1, DECODE, marks=pytest.mark.slow),
    ],
)
def test_the_prediction_from_a_result_comes_within_a_tenth_of_it(
    trainer_images_per_s: int, workers: int, binds: str | None, tmp_path: Path
) -> None:
    """Two workers read and decode 100 images/s, one 50, by sleeping; all else is real."""
    spec = RunSettings(
        trainers=(f"emulated:{trainer_images_per_s}",), batch_size=BATCH, workers=workers, size=32, warmup=4,
        batches=14, repeats=1, device=torch.device("cpu"),
    )  # fmt: skip
    slowed = partial(slow, {"storage": 0.005, "decode": 0.015, "transfer": 0.0})
    result = compare([Arm("pytorch", make_tree(tmp_path / "tree"))], spec, around=slowed)
    stored, out = tmp_path / "r.json", tmp_path / "simulated.json"
    stored.write_text(json.dumps(result.to_json()))
    assert command("--result", stored, "--gpus", 1, "--json", out) == 0
    (predicted,) = json.loads(out.read_text())["predictions"]
    (row,) = result.rows
    assert row.together is not None
    assert predicted["images_per_s"] == pytest.approx(row.together.median, rel=0.1)
    assert predicted["images_per_s"] == pytest.approx(min(50 * workers, trainer_images_per_s), rel=0.1)
    assert binds in (None, predicted["binds"])


def test_rates_come_from_a_result_and_options_replace_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = next(row for row in json.loads(RESULT.read_text())["rows"] if row["backend"] == "webdataset")
    out = tmp_path / "out/simulated.json"
    arguments = ("--result", RESULT, "--backend", "webdataset", "--gpus", "1,16")
    assert command(*arguments, "--json", out) == 0
    stored = json.loads(out.read_text())
    assert stored["rates"]["decode_s"] == pytest.approx(2 / row["loader"]["median"])
    assert stored["rates"]["trainer_images_per_s"] == row["trainer"]["median"]
    assert (stored["rates"]["batch_size"], stored["rates"]["workers"]) == (64, 2)
    one, many = (Prediction(**content) for content in stored["predictions"])
    assert (one.binds, many.binds, many.gpus, many.nodes) == (DECODE, DECODE, 16, 2)
    assert one.images_per_s == pytest.approx(row["loader"]["median"], rel=0.01)
    assert "With 1 GPU decoding is the bottleneck: it waits 1" in capsys.readouterr().out
    assert command(*arguments, "--workers", 8, "--json", "-") == 0
    replaced = json.loads(capsys.readouterr().out)
    assert [one["binds"] for one in replaced["predictions"]] == [STEP, STEP]


def test_a_result_that_measured_something_else_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The model is held against what the result itself has of loader and trainer together."""
    arguments = ("--result", tmp_path / "r.json", "--backend", "webdataset", "--gpus", 8, "--workers", 64)
    content = json.loads(RESULT.read_text())
    (tmp_path / "r.json").write_text(json.dumps(content))
    assert command(*arguments) == 0
    assert "the prediction is" not in capsys.readouterr().out
    for row in content["rows"]:
        if row["together"] is not None:
            row["together"]["median"] /= 2
    content["settings"]["other_cpu"] = 0.31
    (tmp_path / "r.json").write_text(json.dumps(content))
    assert command(*arguments) == 0
    printed = capsys.readouterr().out
    assert "% too high: loader and trainer were measured alone" in printed
    assert "Other processes took 31% of the CPUs" in printed


def test_what_the_storage_must_give_comes_from_the_stored_bytes_of_a_result(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = json.loads(RESULT.read_text())
    for row in content["rows"]:
        row["image_bytes"] = 20_000.0
    stored = tmp_path / "r.json"
    stored.write_text(json.dumps(content))
    arguments = ("--result", stored, "--backend", "webdataset", "--gpus", 8, "--json", "-")

    def predicted(*options: object) -> tuple[dict[str, float], Prediction]:
        assert command(*arguments, *options) == 0
        found = json.loads(capsys.readouterr().out)
        (prediction,) = found["predictions"]
        return found["rates"], Prediction(**prediction)

    rates, found = predicted()
    assert (rates["image_bytes"], rates["storage_mbps"]) == (20_000, None)
    assert found.needed_mbps == pytest.approx(8 * rates["trainer_images_per_s"] * 20_000 / 1e6)
    assert found.binds == DECODE, "the storage binds only where its rate is given"
    assert predicted("--storage-mbps", 100)[1].binds == STORAGE
    assert predicted("--image-bytes", 40_000)[1].needed_mbps == pytest.approx(2 * found.needed_mbps)


def test_the_table_has_a_row_per_cluster_and_at_most_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ("--decode-ms", 2, "--trainer-rate", 1786, "--image-bytes", 110_000, "--storage-mbps", 2000)
    assert command("--gpus", "1,8,64", "--nodes", "1,1,16", *rest) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:5]] == [["1", "1"], ["8", "1"], ["64", "16"]]
    assert lines[0].startswith("With 64 GPUs the storage is the bottleneck: they wait")
    assert all(len(line.rstrip()) <= 100 for line in lines)


def test_where_no_gpu_waits_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ("--decode-ms", 1, "--trainer-rate", 100, "--gpus", "1,8")
    assert command(*rates) == 0
    assert capsys.readouterr().out.startswith("No GPU waits: the training step is the bottleneck.")
    assert command(*rates, "--image-bytes", 110_000) == 0
    said = "No GPU waits, if the storage gives 8 GPUs 88 MB/s: the training step is the bottleneck."
    assert capsys.readouterr().out.startswith(said)
    assert command("--decode-ms", 2, "--trainer-rate", 1786, "--gpus", 8) == 0
    assert "-0%" not in capsys.readouterr().out
    assert command(*rates, "--noise", 0.2) == 0
    assert "of the time for the slowest of them." in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ([], ["--decode-ms is not known"]),
        (["--decode-ms", 1], ["--trainer-rate is not known"]),
        (["--result", RESULT], ["5 rows", "--backend", "shards on shards with emulated:4000"]),
        (["--result", RESULT, "--backend", "dalli"], ["0 rows are of dalli", "dali on dali"]),
        (["--backend", "dali"], ["choose a row of --result"]),
        (["--decode-ms", 1, "--trainer-rate", 100, "--storage-mbps", 5], ["need --image-bytes"]),
        (["--decode-ms", 1, "--trainer-rate", 100, "--gpus", "1,x"], ["gpus must be numbers", "'1,x'"]),
        (["--decode-ms", 1, "--trainer-rate", 100, "--gpus", "0"], ["gpus must be an integer", "got 0"]),
        (["--decode-ms", 1, "--trainer-rate", 100, "--nodes", "1"], ["nodes '1'", "as many numbers"]),
        (["--decode-ms", 1, "--trainer-rate", 100, "--gpus", "1,20000"], ["gpus must be", "got 20000"]),
        (["--decode-ms", 1, "--trainer-rate", 100, "--gpus", "1,2", "--nodes", "1,3"], ["nodes", "got 3"]),
        (["--decode-ms", -1, "--trainer-rate", 100], ["decode_s must be a number", "-0.001"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[object], mentions: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    code = command(*arguments)
    check_bad_input(subprocess.CompletedProcess([], code, *capfd.readouterr()), *mentions)
