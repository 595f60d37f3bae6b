"""`bench convert` on a small tree, and the photographs that it can be measured on."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.cli import main
from bench.machine.photos import make_photos
from bench.measure import conversion
from bench.measure.conversion import OURS, ConversionSpec, measure
from bench.measure.processes import run_watched
from bench.report import conversion_table as report
from bench.report.stats import Estimate
from precache.console import commandline
from precache.errors import MissingDependencyError, SettingError, WorkerError
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run
from tests.conftest import IMAGES, small_recipe


def spec(scratch: Path, name: str, **settings: object) -> ConversionSpec:
    defaults = {
        "recipe": small_recipe(name), "workers": 1, "pictures": 20, "repeats": 2, "against": (),
        "peer_python": sys.executable, "scratch": scratch,
    }  # fmt: skip
    return ConversionSpec(**{**defaults, **settings})


@pytest.mark.parametrize("name", ["shards", "webdataset"])
def test_stages_and_whole_conversions_are_measured(
    name: str, raw_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[tuple[int, int]] = []
    result = measure(raw_tree, spec(tmp_path, name, against=("copy",)), lambda *step: steps.append(step))
    stages = {"read", "decode", "resize", "write"} | ({"encode"} if name != "shards" else set())
    assert result.stages.keys() == stages
    assert all(0 < stage.low <= stage.median <= stage.high for stage in result.stages.values())
    assert [whole.name for whole in result.wholes] == [OURS, "copy"]
    assert result.wholes[0].ratio == Estimate(1, 1, 1)
    ours, copy = (whole.images_per_s for whole in result.wholes)
    assert ours.low / copy.high <= result.wholes[1].ratio.median <= ours.high / copy.low
    assert result.stages_limit < result.decode_limit
    assert 20 * 2**20 < result.peak_bytes < 2**30
    assert steps[-1] == (7, 7)
    assert list(tmp_path.iterdir()) == []
    report.show(result)
    text = " ".join(capsys.readouterr().out.split())
    assert re.match(r"Converting reaches [\d,]+ images/s, start-up included. \w+ takes \d+% of", text)
    for mention in (f"{IMAGES} pictures", "median of 2", "simplejpeg", "MiB of memory", f"--format {name}"):
        assert mention in text


def test_without_another_writer_there_is_no_column_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    machine = {"cpu": "EPYC", "memory": "1 GiB", "pillow_flavour": "pillow", "python": "3", "date": "today"}
    settings = {
        "source": "photos", "images": 3, "source_bytes": 1, "recipe": {"format": "shards"}, "workers": 2,
        "peers": {}, "page_cache": "warm", "repeats": 1,
    }  # fmt: skip
    ours, other = (conversion.Whole(n, Estimate(9, 9, 9), Estimate(1, 1, 1)) for n in (OURS, "copy"))
    for wholes, there in (((ours,), False), ((ours, other), True)):
        report.show(conversion.ConversionResult(machine, settings, {"decode": Estimate(9, 9, 9)}, wholes, 0))
        assert ("precache is" in capsys.readouterr().out) == there


def test_limits_follow_from_the_stages() -> None:
    stages = {"decode": Estimate(100, 90, 110), "resize": Estimate(300, 300, 300)}
    result = conversion.ConversionResult({}, {"workers": 2}, stages, (), 0)
    assert result.decode_limit == 200
    assert result.stages_limit == pytest.approx(150)
    assert result.costliest == ("decode", pytest.approx(0.75))


def test_bad_settings_are_named(tmp_path: Path, raw_tree: Path) -> None:
    with pytest.raises(SettingError, match="unknown writer 'tfds'; choose from: copy, ffcv"):
        spec(tmp_path, "shards", against=("tfds",))
    with pytest.raises(SettingError, match="gone: no such folder"):
        spec(tmp_path / "gone", "shards")
    lacking = replace(spec(tmp_path, "shards"), against=("mds",), peer_python="/no/python")
    with pytest.raises(SettingError, match=r"/no/python: cannot be run .*--peer-python"):
        measure(raw_tree, lacking)


def test_a_missing_peer_comes_with_its_install_command(raw_tree: Path, tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    try:
        import ffcv  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependencyError, match="-m pip install ffcv pillow"):
            measure(raw_tree, spec(tmp_path, "shards", against=("ffcv",)))
    else:
        pytest.skip("ffcv is installed")


def test_the_command_works_as_typed(
    raw_tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/raw").symlink_to(raw_tree)
    quick = ("--repeats", 1, "--pictures", 10, "--size", 32, "--json", "r.json", "--scratch", ".")
    unequal = run("bench", "convert", "--against", "webdataset", *quick, cwd=tmp_path)
    check_bad_input(unequal, "writer webdataset stores squares, unlike fit keep; give --fit crop")
    result = run("bench", "convert", "--against", "webdataset", "--fit", "crop", *quick, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "|" not in result.stdout, "no Markdown on a terminal"
    assert re.search(r"^webdataset +\d+ +\d+-\d+ +[\d.]+x \(", result.stdout, re.MULTILINE)
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    assert (tmp_path / "r.json").stat().st_size > 500
    code = commandline.run(main, "bench", ["convert", str(raw_tree), "--workers", "0"])
    check_bad_input(subprocess.CompletedProcess([], code, *capfd.readouterr()), "workers must be", "got 0")


@pytest.mark.slow
def test_photos_have_the_size_asked_for_on_average(raw_tree: Path, tmp_path: Path) -> None:
    make_photos(raw_tree, tmp_path / "photos", (620, 400), 30)
    scan = scan_tree(tmp_path / "photos")
    assert len(scan.samples) == 30
    assert scan.classes == scan_tree(raw_tree).classes
    sizes = np.array([Image.open(tmp_path / "photos" / s.path).size for s in scan.samples])
    assert np.abs(sizes.mean(axis=0) / (620, 400) - 1).max() < 0.1
    assert sizes.std(axis=0).min() > 40
    for bad, message in (("500", "mean must be a size"), ("9000x10", "width must be")):
        check_bad_input(run("bench", "photos", raw_tree, "other", "--mean", bad, cwd=tmp_path), message)
    with pytest.raises(SettingError, match="lie one inside the other"):
        make_photos(raw_tree, raw_tree / "photos", (80, 80), 2)
    check_bad_input(run("bench", "photos", raw_tree, "photos", "--pictures", 5, cwd=tmp_path), "is not empty")


def test_a_watched_process_is_timed_measured_and_its_failure_named() -> None:
    held = run_watched(
        [sys.executable, "-c", "import time; x = bytearray(80 << 20); time.sleep(0.5); print('done')"],
        memory=True,
    )
    assert held.wall_s >= 0.5
    assert held.output == "done\n"
    assert 80 * 2**20 < held.peak_bytes < 200 * 2**20
    with pytest.raises(WorkerError, match=r"exit code 3; the reason"):
        run_watched([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
