"""`bench convert` on a small tree: structure and relations of its figures, never their size."""

import json
from pathlib import Path

import pytest

from bench.measure.conversion import time_stages
from bench.report.conversion import PRECACHE, STAGE_NAMES, STAGES, WHOLE, make_result
from bench.report.result import Trial
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from tests.command import run_here
from tests.conftest import IMAGES

MACHINE = {
    "cpu": "2 CPUs",
    "memory": "1 GiB",
    "accelerator": "none",
    "date": "today",
    "pillow_flavour": "pillow",
}
SETTINGS = {
    "source": "photos", "images": 100, "source_bytes": 1000, "recipe_flags": "--format shards",
    "processes": 2, "stage_images": 10, "repeats": 2,
}  # fmt: skip


def stages(repeat: int, **seconds: float) -> Trial:
    numbers = {f"{name}_s": value for name, value in seconds.items()}
    return Trial({"what": STAGES, "repeat": repeat}, {"images": 10.0, **numbers})


def whole(repeat: int, writer: str, rate: float) -> Trial:
    return Trial({"what": WHOLE, "writer": writer, "repeat": repeat}, {"images_per_s": rate})


def test_the_answer_names_the_stage_with_most_of_the_time() -> None:
    trials = [stages(0, read=1, decode=6, resize=2, write=1), whole(0, PRECACHE, 1.5)]
    result = make_result(MACHINE, SETTINGS, trials, {})
    decode = next(row for row in result.rows if row.name == "decode")
    assert decode.values["time_share"].median == pytest.approx(0.6)
    assert decode.values["converted_images_per_s"].median == pytest.approx(2 * 10 / 6)
    assert result.is_best(decode)
    assert "Decode takes 60% of a worker's time" in result.answer[0][1]
    assert "That is 45% of what decoding alone would reach" in result.answer[1][0]
    assert "75% of what workers would reach" in result.answer[1][0]


@pytest.mark.parametrize(
    ("rates", "words"), [((1.0, 1.1), "times as many images/s as ffcv"), ((1.5, 2.1), "within noise")]
)
def test_the_answer_compares_another_writer_or_says_within_noise(
    rates: tuple[float, float], words: str
) -> None:
    trials = [
        stages(0, read=1, decode=6, resize=2, write=1),
        whole(0, PRECACHE, 2.0),
        whole(1, PRECACHE, 2.0),
    ]
    trials += [whole(repeat, "ffcv", rate) for repeat, rate in enumerate(rates)]
    result = make_result(MACHINE, SETTINGS, trials, {})
    assert words in result.answer[2][0]


@pytest.mark.parametrize("format_name", ["shards", "webdataset"])
def test_time_stages_measures_every_stage_of_the_format(
    format_name: str, raw_tree: Path, tmp_path: Path
) -> None:
    trial = time_stages(scan_tree(raw_tree), Recipe(format=format_name, size=32), 10, tmp_path)
    names = {name for name in STAGE_NAMES if name != "encode" or format_name == "webdataset"}
    assert trial.numbers.keys() == {"images", *(f"{name}_s" for name in names)}
    assert all(value > 0 for value in trial.numbers.values())


def test_convert_prints_an_answer_and_goes_on_with_more_repeats(raw_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    quick = ("--repeats", 1, "--pictures", 10, "--size", 32, "--workers", 1, "--json", "r.json")
    ended = run_here("bench", "convert", raw_tree, *quick, "--scratch", "scratch", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Converting reaches "), "the answer comes first"
    assert all(len(line.rstrip()) <= 100 for line in ended.stdout.splitlines())
    assert f"{IMAGES} pictures" in ended.stdout
    first = json.loads((tmp_path / "r.json").read_text())
    ended = run_here(
        "bench", "convert", raw_tree, *quick, "--scratch", "scratch", "--repeats", 2, cwd=tmp_path
    )
    second = json.loads((tmp_path / "r.json").read_text())
    assert second["trials"][: len(first["trials"])] == first["trials"]
    assert len(second["trials"]) == 2 * len(first["trials"])
    shown = run_here("bench", "report", "r.json", cwd=tmp_path)
    assert shown.stdout.splitlines()[0] in ended.stdout.splitlines()
    files = {path.name for path in (tmp_path / "scratch").rglob("*") if path.is_file()}
    assert files <= {".precache-staging"}, "the process removes it as it ends"
