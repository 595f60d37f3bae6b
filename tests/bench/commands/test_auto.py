"""`precache auto`: what it decides, converts, says and stores. Rates are given, but in the slow tests."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precache
from bench.commands import auto as command
from bench.machine.disk import Disk
from bench.machine.measurements import Hardware, Measurement
from bench.measure import automatic
from bench.measure.loader_run import LoaderRun
from bench.measure.recommendation import Recommendation, train_images
from bench.measure.sampling import RecommendSpec
from bench.report import forecast as model
from bench.report import stats
from bench.report.choice import median_error, needed_bytes
from bench.report.forecast import AS_IT_IS, RAW_NAME, TODAY_NAME, Inputs, Profile
from bench.report.trust import is_disturbed
from precache.cli import main
from precache.console import commandline
from precache.conversion.estimate import predict_bytes
from precache.destination import AUTO_NAME
from precache.errors import SettingError
from precache.example_data.sample_tree import make_sample
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run

TRAINER = 2000.0
SMALL = ("--size", "32", "--batch-size", "8")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Machine:
    """A machine whose loaders give so many images/s, by format; it keeps what it was asked."""

    def __init__(self) -> None:
        self.rates = {
            TODAY_NAME: 250.0,
            RAW_NAME: 500.0,
            "shards": 8000.0,
            "webdataset": 1500.0,
            "dali": 1400.0,
        }
        self.turns: list[dict[str, float]] = []
        self.asked: list[tuple[str, ...]] = []
        self.after: dict[str, float] = {}
        self.other_cpu = 0.0
        self.first_epochs: set[bool] = set()
        self.disk_bytes_per_s = 5e8

    def recommend(
        self, scan: Scan, spec: RecommendSpec, *, formats: tuple[str, ...], on_progress: object
    ) -> Recommendation:
        self.asked.append(formats)
        inputs = Inputs(
            images=len(scan.samples),
            train_images=train_images(scan),
            cpus=2,
            gpus=1,
            trainer_images_per_s=TRAINER,
            disk_bytes_per_s=self.disk_bytes_per_s,
            read_s=0.001,
            memory_bytes=16e9,
        )
        turns = [self._profiles(scan, spec, formats, {**self.rates, **turn}) for turn in self.turns]
        profiles = self._profiles(scan, spec, formats, self.rates)
        rate = stats.Estimate(500, 490, 510)
        reads = Measurement("disk, sequential read", "direct I/O", "MB/s", None, rate)
        machine = {"cpu": "a CPU", "memory": "16 GiB", "accelerator": "none", "date": "2026-11-21"}
        settings = {
            "stored_size": spec.stored_size, "quality": spec.quality, "batch_size": spec.batch_size,
            "size": spec.size, "workers": 2, "trainer": "emulated:2000", "repeats": 1, "other_cpu": 0.0,
            "sample_pictures": 16, "check": "never", "augment": "train",
        }  # fmt: skip
        return Recommendation(
            settings, Hardware(machine, Disk("sda", False), (reads,), 1e5, None, 3), inputs, profiles,
            model.predict(profiles, inputs), {}, [], [model.predict(turn, inputs) for turn in turns],
        )  # fmt: skip

    def serve(self, path: Path, name: str, spec: RecommendSpec, *, first_epoch: bool) -> LoaderRun:
        self.first_epochs.add(first_epoch)
        rate = {**self.rates, **self.after}[name]
        return LoaderRun(rate, TRAINER, min(rate, TRAINER), 1e-6)

    def share(self) -> float:
        return self.other_cpu

    def _profiles(
        self, scan: Scan, spec: RecommendSpec, formats: tuple[str, ...], rates: dict[str, float]
    ) -> list[Profile]:
        return [
            Profile(
                name=name, image_bytes=predict_bytes(scan, spec.recipe(name)) / len(scan.samples)
                if name not in AS_IT_IS else 1e4, startup_s=1.0, image_s=0.01, shard_images=100,
                loader_images_per_s=rates[name], cpus=2, serial_s=1e-6, overlap=1.0, random_reads=False,
            )
            for name in (*AS_IT_IS, *formats)
        ]  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(command, "recommend", found.recommend)
    monkeypatch.setattr(automatic.sampling, "serve", found.serve)
    monkeypatch.setattr(automatic, "OtherProcesses", lambda: found)
    return found


@pytest.fixture
def auto(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs `precache auto` on the small tree, in an empty folder, without a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def auto(*words: object, src: object = raw_tree) -> "subprocess.CompletedProcess[str]":
        capfd.readouterr()
        code = commandline.run(main, "precache", ["auto", str(src), *map(str, words), *SMALL])
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return auto


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / AUTO_NAME).read_text())
    return content


def words(said: str) -> str:
    """Without what converting took, which is predicted and then measured."""
    return re.sub(r"\([^)]*\)|after [\d,]+ epochs?", "", said)


MEASURED = "Measured: ImageFolder and DataLoader keep an accelerator of 2,000 images/s busy 12% of the time."


def written(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != AUTO_NAME}


def test_it_says_why_converts_measures_and_stores(machine: Machine, auto: Run, tmp_path: Path) -> None:
    ended = auto("out", "--yes")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("ImageFolder and DataLoader keep an accelerator of 2,000 images/s busy 12%")
    assert lines[1].startswith(
        "Pictures are stored whole, their shorter side at most 64 px: twice the side that is trained, within"
    )
    assert lines[2].startswith("Instead, webdataset would take ")
    proof = [line.removeprefix("Measured: ") for line in lines[lines.index(MEASURED) :][:4]]
    assert [words(" ".join(proof))] == [words(lines[0])], "but for times"
    dataset = precache.open_dataset(tmp_path / "out")
    assert dataset.manifest.recipe == precache.Recipe(format="shards", size=64)
    assert precache.verify(tmp_path / "out") == []
    stored = report(tmp_path / "out")
    quantities = {(check["name"], check["quantity"]) for check in stored["recommendation"]["checks"]}
    assert quantities == {
        *((name, what) for name in (*AS_IT_IS, "shards") for what in ("loader", "with trainer")),
        ("shards", "size"), ("shards", "conversion"),
    }  # fmt: skip
    size = next(c for c in stored["recommendation"]["checks"] if c["quantity"] == "size")
    assert abs(size["error"]) < 0.15
    assert stored["median_error"] < 0.15


def test_a_second_run_converts_nothing_and_says_the_same(machine: Machine, auto: Run, tmp_path: Path) -> None:
    assert auto("out", "--yes").returncode == 0
    before = written(tmp_path / "out")
    machine.rates["shards"] = 1.0  # what would be found now does not count
    ended = auto("out", "--yes")
    assert ended.returncode == 0
    assert "nothing to do" in ended.stdout
    assert MEASURED in ended.stdout
    assert (written(tmp_path / "out"), len(machine.asked)) == (before, 1)


@pytest.mark.parametrize("content", ['{"version": 1, "said": 3}', "[" * 10_000])
def test_a_damaged_report_is_measured_again(
    content: str, machine: Machine, auto: Run, tmp_path: Path
) -> None:
    assert auto("out", "--yes").returncode == 0
    before = written(tmp_path / "out")
    (tmp_path / "out" / AUTO_NAME).write_text(content)
    assert auto("out", "--yes").returncode == 0
    assert written(tmp_path / "out") == before
    quantities = {check["quantity"] for check in report(tmp_path / "out")["recommendation"]["checks"]}
    assert quantities == {"size", "loader", "with trainer"}  # nothing was converted


def test_without_dst_it_goes_where_convert_would_put_it(machine: Machine, auto: Run, tmp_path: Path) -> None:
    machine.rates |= {"webdataset": 4000.0, "shards": 100.0}
    assert auto("--yes").returncode == 0
    assert (tmp_path / "data/webdataset" / AUTO_NAME).exists()
    assert "nothing to do" in auto("--yes").stdout


def test_where_the_tree_keeps_up_nothing_is_converted(machine: Machine, auto: Run, tmp_path: Path) -> None:
    machine.rates[RAW_NAME] = 3000.0
    ended = auto("out", "--yes")
    assert (ended.returncode, list(tmp_path.iterdir())) == (0, [])
    assert "Change that line to `loaders.build`: it is busy 100%" in ended.stdout
    assert ended.stdout.endswith("Converting gains no more.\n")
    machine.rates[TODAY_NAME] = 3000.0
    ended = auto("out", "--yes")
    assert (ended.returncode, list(tmp_path.iterdir())) == (0, [])
    assert ended.stdout.startswith("ImageFolder and DataLoader already keep an accelerator")


def test_what_is_within_noise_converts_nothing(machine: Machine, auto: Run, tmp_path: Path) -> None:
    machine.turns = [{}, {"shards": 400.0}]
    ended = auto("out", "--yes")
    assert (ended.returncode, list(tmp_path.iterdir())) == (0, [])
    assert "Unclear, within noise: whether shards is faster" in ended.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "converts"), [("y\n", True), ("\n", True), ("n\n", False)])
def test_at_a_terminal_it_asks(
    typed: str, converts: bool, machine: Machine, auto: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    ended = auto("out")
    assert ended.returncode == 0, ended.stderr
    assert "Convert to shards, into out? [Y/n]" in ended.stdout
    assert (tmp_path / "out").exists() == converts
    assert ("nothing was converted" in ended.stdout) != converts


def test_a_question_that_nobody_answers_ends_it(
    machine: Machine, auto: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert (auto("out").returncode, list(tmp_path.iterdir())) == (130, [])


def test_what_was_killed_goes_on_as_it_was_chosen(
    machine: Machine, auto: Run, raw_tree: Path, tmp_path: Path
) -> None:
    """Whatever would be chosen now; and the time of a part is not taken for that of the whole."""

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:  # the first of two shards is finished
            raise Stop

    setting = automatic.Setting(37, 90)
    recipe = automatic.recipe("webdataset", setting)
    recipe = precache.Recipe(**{**recipe.to_json(), "splits": "train=0.5,val=0.5"})
    with pytest.raises(Stop):
        precache.convert(raw_tree, tmp_path / "out", recipe, workers=0, on_progress=stop)
    ended = auto("out", "--yes", "--splits", "train=0.5,val=0.5")
    assert ended.returncode == 0, ended.stderr
    assert machine.asked == [("webdataset",)]
    assert (
        "a conversion to webdataset, at most 37 px, JPEG quality 90, was begun; going on with it"
        in ended.stdout
    )
    assert precache.open_dataset(tmp_path / "out").manifest.recipe == recipe
    quantities = {check["quantity"] for check in report(tmp_path / "out")["recommendation"]["checks"]}
    assert "conversion" not in quantities


def test_a_dataset_that_is_slower_than_its_tree_is_a_regression(machine: Machine, auto: Run) -> None:
    machine.after = {"shards": 100.0}
    ended = auto("out", "--yes")
    assert ended.returncode == 1
    assert "Converting lost: from shards the trainer gets 100 images/s, by `loaders.build`" in ended.stdout


def test_beside_other_busy_processes_it_says_so_and_calls_nothing_a_regression(
    machine: Machine, auto: Run, caplog: pytest.LogCaptureFixture
) -> None:
    machine.after, machine.other_cpu = {"shards": 100.0}, 0.6
    assert auto("out", "--yes").returncode == 0
    assert "Other processes took 60% of the CPUs" in caplog.text


def test_what_does_not_fit_into_memory_is_measured_from_the_disk_without_an_epoch_before(
    machine: Machine, auto: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic.page_cache, "warm", lambda path: False)
    machine.disk_bytes_per_s = 1e6
    assert auto("out", "--yes").returncode == 0
    assert machine.first_epochs == {False}
    found = report(tmp_path / "out")["recommendation"]
    cold = {one["name"]: one["cold_images_per_s"] for one in found["predictions"]}
    said = {c["name"]: c["predicted"]["median"] for c in found["checks"] if c["quantity"] == "loader"}
    assert said == {"imagefolder": 100.0, "raw tree": 100.0, "shards": cold["shards"]}
    assert cold["shards"] < machine.rates["shards"]


def test_a_dataset_that_takes_more_than_was_allowed_is_said_to(
    machine: Machine, auto: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "predict_bytes", lambda *_: 1)
    ended = auto("out", "--yes", "--max-bytes", "1kB")
    assert ended.returncode == 1
    assert "out: takes " in ended.stderr
    assert ", more than --max-bytes 1kB" in ended.stderr


def test_what_is_chosen_fits_and_nothing_better_does(raw_tree: Path) -> None:
    scan = scan_tree(raw_tree)
    names = ("shards", "webdataset")
    room, every = 1e9, []
    for _ in range(5):
        found = automatic.choose(scan, 96, names, room, "the disk")
        needs = [needed_bytes(found.sizes[name]) for name in found.formats]
        assert max(needs) <= room
        every.append((found.setting.stored_size, found.setting.quality, found.formats))
        room = max(needs) - 1
    rest = ((192, 95), (192, 90), (192, 75), (110, 75))
    assert every == [(192, 95, names), *((size, quality, names[1:]) for size, quality in rest)]
    with pytest.raises(SettingError, match="the smallest, webdataset of at most 110 px, JPEG quality 75"):
        automatic.choose(scan, 96, names, room, "the disk")


def test_its_report_does_not_keep_a_dataset_from_being_replaced(
    machine: Machine, auto: Run, raw_tree: Path, tmp_path: Path
) -> None:
    assert auto("out", "--yes").returncode == 0
    recipe = precache.Recipe(format="webdataset", size=16)
    precache.convert(raw_tree, tmp_path / "out", recipe, workers=0, overwrite=True)
    assert not (tmp_path / "out" / AUTO_NAME).exists()
    check_bad_input(auto("out", "--yes"), "out: holds a conversion of other pictures", "--overwrite")
    assert auto("out", "--yes", "--overwrite").returncode == 0
    assert precache.open_dataset(tmp_path / "out").manifest.recipe.format == "shards"


@pytest.mark.parametrize(
    ("words", "mentions"),
    [
        ([], ["there is no terminal to ask at", "--yes"]),
        (["s3://bucket/out", "--yes"], ["s3://bucket/out: ", "'precache convert'"]),
        (["--yes", "--format", "tars"], ["unknown format 'tars'", "dali, shards, webdataset"]),
        (["--yes", "--max-bytes", "lots"], ["'lots' is not a number of bytes"]),
        (["--yes", "--max-bytes", "1kB"], ["no format fits into the 1kB of --max-bytes", "--max-bytes 1MB"]),
        (["--yes", "--trainer", "none", "--trainer-rate", "5"], ["--trainer and --trainer-rate"]),
        (["--yes", "--trainer-rate", "-1"], ["trainer_rate must be positive"]),
        (["--yes", "--splits", "train=2"], ["splits must be shares"]),
        (["--yes", "--max-rejects", "most"], ["max_rejects must be"]),
        (["mine", "--yes"], ["mine: is not empty, and not a folder that precache made"]),
        (["file", "--yes"], ["file: is a file; choose a folder as DST"]),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(
    words: list[str], mentions: list[str], machine: Machine, auto: Run, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    (tmp_path / "file").write_text("")
    check_bad_input(auto(*words), *mentions)
    assert machine.asked == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


def test_a_source_that_is_no_tree_on_a_disk_is_refused(machine: Machine, auto: Run, tmp_path: Path) -> None:
    check_bad_input(auto("out", "--yes", src="s3://bucket/photos"), "s3://bucket/photos: ", "on a disk")
    check_bad_input(auto("out", "--yes", src="gone"), "gone")
    (tmp_path / "labels.csv").write_text("image,label\n")
    check_bad_input(auto("out", "--yes", src="labels.csv"), "labels.csv")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from precache.cli import entry_point
sys.argv[0] = "precache"
entry_point()
"""


def test_without_torch_the_command_is_listed_and_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(WITHOUT_TORCH)
    listed = run("bare", "--help", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    commands = listed.stdout.partition("Commands:\n")[2].splitlines()
    assert commands[0].split()[0] == "auto"
    check_bad_input(run("bare", "auto", "photos", cwd=tmp_path), "needs the extra 'bench'", "precache[bench]")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_predictions_are_near_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, conversion times and images/s, of trees of each kind: the median error over all of them.

    What is measured while others take the CPUs says nothing of the predictions.
    """
    monkeypatch.chdir(tmp_path)
    errors, disturbed = [], False
    for like, images in (("imagenet", 256), ("caltech", 768)):
        make_sample(tmp_path / like, images=images, classes=4, like=like)
        for name in ("shards", "webdataset"):
            out = f"{like}-{name}"
            words = ["auto", like, out, "--yes", "--format", name, "--trainer-rate", "20000"]
            assert commandline.run(main, "precache", words) in (0, 1)
            found = report(tmp_path / out)["recommendation"]
            checks = found["checks"]
            print(out, {f"{c['name']}, {c['quantity']}": round(c["error"], 3) for c in checks})
            errors += [check["error"] for check in checks]
            shares = found["settings"]["other_cpu"], report(tmp_path / out)["other_cpu"]
            disturbed |= any(map(is_disturbed, shares))
            assert all(abs(check["error"]) < 0.15 for check in checks if check["quantity"] == "size")
    median = median_error(errors)
    print(f"median error of {len(errors)} predictions, on 2 kinds of trees: {median:.1%}")
    if disturbed and median >= 0.15:
        pytest.skip(f"the median error is {median:.1%}, but other processes took the CPUs")
    assert median < 0.15
