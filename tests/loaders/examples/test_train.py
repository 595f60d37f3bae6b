"""The training in plain PyTorch: it learns, and whatever ends it, it goes on as if nothing had."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loaders.examples import train
from loaders.examples.common import build_loaders, parser
from precache import SettingError
from tests.command import ROOT
from tests.loaders.examples import served
from tests.loaders.examples.conftest import CLASSES, SIZE

SMALL = ("--model", "resnet10", "--batch-size", "12", "--size", str(SIZE), "--lr", "0.01", "--device", "cpu")
BATCHES = 4
EPOCHS = 2


def run(data: Path, out: Path, *more: object) -> int:
    return train.main([str(data), "--out", str(out), "--epochs", str(EPOCHS), *SMALL, *map(str, more)])


def weights(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(out / "checkpoint.pt", weights_only=True)["model"]
    return found


def check_same_weights(out: Path, other: Path) -> None:
    ours, theirs = weights(out), weights(other)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing ended; what it served is in `served`."""
    out = tmp_path_factory.mktemp("undisturbed")
    with served.writing_down(out / "served"):
        assert run(data, out) == 0
    return out


def figures(line: str) -> dict[str, float]:
    found = re.findall(r"((?:validation )?(?:loss|accuracy)) ([0-9.]+)", line)
    return {name: float(value) for name, value in found}


def test_it_learns_and_says_how_well_it_does_at_each_epoch(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, tmp_path, "--epochs", 4, "--tensorboard") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch {number}" for number in range(1, 5)]
    assert all(re.search(r", [0-9,]+ images/s, validation loss ", line) for line in lines)
    first, last = figures(lines[0]), figures(lines[-1])
    assert last["loss"] < first["loss"]
    assert last["validation accuracy"] > 1.5 * 100 / CLASSES
    assert list(tmp_path.glob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    ("split", "place"),
    [
        pytest.param("train", (0, 0), id="first batch", marks=pytest.mark.slow),
        pytest.param("train", (1, 2), id="within an epoch"),
        pytest.param("train", (0, BATCHES - 1), id="last batch", marks=pytest.mark.slow),
        pytest.param("val", (0, 0), id="validation"),
    ],
)
def test_what_sigterm_ended_goes_on_to_the_same_weights(
    split: str,
    place: tuple[int, int],
    undisturbed: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with served.writing_down(tmp_path / "served", signal.SIGTERM, split, place):
        assert run(data, tmp_path) == 143
    assert served.read(tmp_path / "served", split)[-1][1:3] == place, "no batch is begun behind it"
    with served.writing_down(tmp_path / "served"):
        assert run(data, tmp_path, "--resume") == 0
    assert served.read(tmp_path / "served") == served.read(undisturbed / "served")
    check_same_weights(tmp_path, undisturbed)
    assert capsys.readouterr().out.count("validation accuracy") == EPOCHS


def test_a_second_sigterm_does_not_cut_a_checkpoint_off(
    undisturbed: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def interrupted(descriptor: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with served.writing_down(tmp_path / "served", signal.SIGTERM, "train", (1, 1)):
        assert run(data, tmp_path) == 143  # by the one that came while epoch 0 was saved
    monkeypatch.undo()
    assert run(data, tmp_path, "--resume") == 0
    check_same_weights(tmp_path, undisturbed)


@pytest.mark.slow
def test_what_was_killed_goes_on_from_its_last_epoch(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.loaders.examples.served", tmp_path / "killed", signal.SIGKILL]
    command += [0, "train", 1, 1, "loaders.examples.train", data, "--out", tmp_path, "--epochs", EPOCHS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        [*map(str, command), *SMALL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with served.writing_down(tmp_path / "served"):
        assert run(data, tmp_path, "--resume") == 0
    assert served.read(tmp_path / "served") == served.read(undisturbed / "served")[BATCHES:]
    check_same_weights(tmp_path, undisturbed)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a run of bad input ends with."""
    assert train.main([*map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: error: ")
    return line


def test_a_checkpoint_is_neither_overwritten_nor_mistaken(
    undisturbed: Path, tree: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path, *SMALL)
    path = tmp_path / "checkpoint.pt"
    whole = (undisturbed / "checkpoint.pt").read_bytes()
    path.write_bytes(whole)
    assert f"{path}: is there already; add --resume" in refused(capsys, data, *out)
    assert "is of resnet10" in refused(capsys, data, *out, "--resume", "--model", "resnet18")
    assert f"{path}: this state was taken with dataset" in refused(capsys, tree, *out, "--resume")
    for damaged in (whole[: len(whole) // 2], b"", b"no checkpoint"):
        path.write_bytes(damaged)
        assert f"{path}: damaged, or no checkpoint" in refused(capsys, data, *out, "--resume")
        assert path.read_bytes() == damaged
    torch.save({"state_dict": {}}, path)
    assert f"{path}: damaged, or no checkpoint" in refused(capsys, data, *out, "--resume")


def test_bad_input_is_one_line(
    data: Path,
    tree: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = ("--out", tmp_path / "out", *SMALL)
    assert f"{tmp_path / 'nowhere'}: does not exist" in refused(capsys, tmp_path / "nowhere", *out)
    assert "nowhere: does not exist" in refused(capsys, data, *out, "--val", tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "grey").symlink_to(tree / "colour 0")
    assert "has other classes" in refused(capsys, data, *out, "--val", tmp_path / "other")
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(capsys, data, *out, "--out", tmp_path / "file")
    args = parser("train", "").parse_args([str(data), "--batch-size", "64"])
    with pytest.raises(SettingError, match="--batch-size 64 cannot be shared by 3 ranks; use 63"):
        build_loaders(args, ranks=3)


def test_a_tree_without_a_split_val_trains_and_says_that_nothing_is_validated(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tree, tmp_path, "--epochs", 1) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"no validation: {tree}: unknown split 'val'")
    assert "validation" not in second
    assert run(tree, tmp_path / "again", "--epochs", 1, "--val", tree) == 0
    assert "validation accuracy" in capsys.readouterr().out
