"""Trainings of the examples learn, agree with plain PyTorch, and resume where they were ended."""

import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from loaders.examples import common
from tests.command import ROOT
from tests.conftest import IMAGES
from tests.loader_contract import ids_of
from tests.loaders.examples import batch_record
from tests.loaders.examples.conftest import CLASSES, SIZE, TRAINED

BATCHES, EPOCHS = 4, 2
WORDS = ("--model", "resnet10", "--batch-size", 12, "--size", SIZE, "--lr", 0.01, "--device", "cpu")
SMALL = [str(word) for word in (*WORDS, "--epochs", EPOCHS)]
PACKAGES = {
    "train": "torch",
    "train_lightning": "pytorch_lightning",
    "train_accelerate": "accelerate",
}
LIBRARIES = [name for name in PACKAGES if name != "train"]
EXAMPLES = ["train", *(pytest.param(name, marks=pytest.mark.slow) for name in LIBRARIES)]


def import_example(name: str) -> ModuleType:
    pytest.importorskip(PACKAGES[name], reason=f"pip install {PACKAGES[name]}")
    return import_module(f"loaders.examples.{name}")


def run(data: Path, out: Path, *more: object, name: str = "train") -> int:
    try:
        return int(import_example(name).main([str(data), "--out", str(out), *SMALL, *map(str, more)]))
    except SystemExit as stop:  # of the Lightning example
        return int(str(stop.code))


def check_same_weights(out: Path, other: Path) -> None:
    weights, expected = (torch.load(folder / "checkpoint.pt")["model"] for folder in (out, other))
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that nothing ended, with its batches (`served`) and its last figures (`figures`)."""
    out = tmp_path_factory.mktemp("undisturbed")
    reported: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, batch_record.record_batches(out / "served"):
        patch.setattr("loaders.examples.common.report", lambda epoch, figures, *_: reported.append(figures))
        assert run(data, out) == 0
    torch.save(reported[-1], out / "figures")
    return out


def test_training_learns_and_reports_each_epoch(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, tmp_path, "--epochs", 4, "--tensorboard") == 0
    line = r"^epoch \d: loss ([\d.]+), .* images/s, .* validation accuracy ([\d.]+)%"
    epochs = re.findall(line, capsys.readouterr().out, re.MULTILINE)
    assert len(epochs) == 4
    losses, accuracies = ([float(figure) for figure in column] for column in zip(*epochs, strict=True))
    assert losses[-1] < losses[0]
    assert accuracies[-1] > 1.5 * 100 / CLASSES
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_splits_option_divides_a_raw_tree_into_train_and_val(raw_tree: Path) -> None:
    words = [str(raw_tree), "--splits", "train=0.7,val=0.3", "--size", "32", "--device", "cpu"]
    training, validation = common.build_loaders(common.parser("train", "A training.").parse_args(words), 1)
    assert validation is not None
    with training, validation:
        assert sorted(ids_of([*training, *validation])) == [*range(IMAGES)]


@pytest.mark.parametrize(("split", "place"), [("train", (1, 2)), ("val", (0, 0))])
def test_training_ended_by_sigterm_resumes_to_the_same_weights(
    split: str, place: tuple[int, int], undisturbed: Path, data: Path, tmp_path: Path
) -> None:
    fsync, record = os.fsync, tmp_path / "served"

    def fsync_with_second_sigterm(descriptor: int) -> None:
        """Send another SIGTERM while the checkpoint of the first one is being saved."""
        if [row[1:3] for row in batch_record.read(record, split)][-1:] == [place]:
            os.kill(os.getpid(), signal.SIGTERM)
        fsync(descriptor)

    with (
        batch_record.record_batches(record, signal.SIGTERM, split, place),
        mock.patch.object(os, "fsync", fsync_with_second_sigterm),
    ):
        assert run(data, tmp_path) == 143
    assert batch_record.read(record, split)[-1][1:3] == place, "it is the last batch"
    with batch_record.record_batches(record):
        assert run(data, tmp_path, "--resume") == 0
    assert batch_record.read(record) == batch_record.read(undisturbed / "served")
    check_same_weights(tmp_path, undisturbed)


def test_training_ended_by_ctrl_c_resumes_from_its_last_epoch(
    undisturbed: Path, data: Path, tmp_path: Path
) -> None:
    """Ctrl-C saves nothing, so that it stands for SIGKILL, too."""
    with (
        pytest.raises(KeyboardInterrupt),
        batch_record.record_batches(tmp_path / "ended", signal.SIGINT, "train", (1, 1)),
    ):
        run(data, tmp_path)
    with batch_record.record_batches(tmp_path / "served"):
        assert run(data, tmp_path, "--resume") == 0
    assert batch_record.read(tmp_path / "served") == batch_record.read(undisturbed / "served")[BATCHES:]
    check_same_weights(tmp_path, undisturbed)


@pytest.mark.parametrize("name", LIBRARIES)
def test_other_libraries_end_with_the_same_model_after_a_sigterm(
    name: str, undisturbed: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[dict[str, float]] = []
    monkeypatch.setattr("loaders.examples.common.report", lambda epoch, figures, *_: reported.append(figures))
    with batch_record.record_batches(tmp_path / "served", signal.SIGTERM, "train", (1, 1)):
        assert run(data, tmp_path / "out", name=name) == 143
    with batch_record.record_batches(tmp_path / "served"):
        assert run(data, tmp_path / "out", "--resume", name=name) == 0
    assert batch_record.read(tmp_path / "served") == batch_record.read(undisturbed / "served")
    assert len(reported) == EPOCHS
    expected = torch.load(undisturbed / "figures")
    for figure in ("validation_loss", "validation_accuracy"):
        assert reported[-1][figure] == pytest.approx(expected[figure], rel=1e-3)
    assert reported[-1]["images_per_s"] > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXAMPLES)
def test_sigterm_to_one_of_two_ranks_ends_both_after_the_same_batch(
    name: str, data: Path, tmp_path: Path
) -> None:
    """torchrun starts both ranks, with gloo; one rank resumes. Each sample is served once an epoch."""
    import_example(name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m"]
    command += [
        "tests.loaders.examples.batch_record",
        tmp_path / "served.{}",
        signal.SIGTERM,
        1,
        "train",
        1,
        1,
    ]
    command += [f"loaders.examples.{name}", data, "--out", tmp_path / "run", *SMALL]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode != 0
    assert "exitcode  : 143" in ended.stderr
    assert ended.stdout.count("epoch 1:") == 1
    with batch_record.record_batches(tmp_path / "served.2"):
        assert run(data, tmp_path / "run", "--resume", name=name) == 0
    ranks = [batch_record.read(file) for file in sorted(tmp_path.glob("served.?"))]
    for epoch in range(EPOCHS):
        ids = [i for rows in ranks for i in batch_record.ids_of(rows, epoch)]
        assert len(ids) == len(set(ids)) == TRAINED
    assert len({len(rows) for rows in ranks[:2]}) == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_bad_input_ends_with_one_line_and_keeps_the_checkpoint(
    name: str, tree: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_refused(mention: str, data: Path, out: Path, *words: object) -> None:
        assert run(data, out, *words, name=name) == 2
        assert mention in capsys.readouterr().err.splitlines()[-1]

    out, other = tmp_path / "out", tmp_path / "other"
    (tmp_path / "classes").mkdir()
    (tmp_path / "classes/grey").symlink_to(tree / "colour 0")
    assert run(data, out, "--epochs", 1, name=name) == 0
    check_refused("add --resume", data, out)
    check_refused("--model resnet10", data, out, "--resume", "--model", "resnet18")
    check_refused(": this state ", tree, out, "--resume")
    check_refused("nowhere: ", tmp_path / "nowhere", other)
    check_refused(f"--val {tmp_path / 'classes'}", data, other, "--val", tmp_path / "classes")
    (path,) = out.glob("checkpoint.*")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"no checkpoint"):
        path.write_bytes(damaged)
        check_refused(f"{path}: ", data, out, "--resume")
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("name", PACKAGES)
def test_example_takes_the_commands_of_its_docstring(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_example(name)
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    options = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    commands = re.findall(rf"-m loaders.examples.{name} (.*)", module.__doc__ or "")
    assert len(commands) == 2
    assert {option for command in commands for option in re.findall(r"--[a-z0-9-]+", command)} <= options
