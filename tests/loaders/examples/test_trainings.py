"""Each training learns, ends with the same model as plain PyTorch, and goes on as if nothing had ended it."""

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
from tests.loaders.examples import served
from tests.loaders.examples.conftest import CLASSES, SIZE, TRAINED

BATCHES, EPOCHS = 4, 2
WORDS = ("--model", "resnet10", "--batch-size", 12, "--size", SIZE, "--lr", 0.01, "--device", "cpu")
SMALL = [str(word) for word in (*WORDS, "--epochs", EPOCHS)]
PACKAGES = {
    "train": "torch",
    "train_lightning": "pytorch_lightning",
    "train_accelerate": "accelerate",
    "train_transformers": "transformers",
}
LIBRARIES = [name for name in PACKAGES if name != "train"]
EACH = ["train", *(pytest.param(name, marks=pytest.mark.slow) for name in LIBRARIES)]


def example(name: str) -> ModuleType:
    pytest.importorskip(PACKAGES[name], reason=f"pip install {PACKAGES[name]}")
    return import_module(f"loaders.examples.{name}")


def run(data: Path, out: Path, *more: object, name: str = "train") -> int:
    try:
        return int(example(name).main([str(data), "--out", str(out), *SMALL, *map(str, more)]))
    except SystemExit as stop:  # Lightning has its processes ended so
        return int(str(stop.code))


def check_same_weights(out: Path, other: Path) -> None:
    ours, theirs = (torch.load(folder / "checkpoint.pt")["model"] for folder in (out, other))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `train` that nothing ended; what it served is in `served`, what it said in `said`."""
    out = tmp_path_factory.mktemp("undisturbed")
    said: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, served.writing_down(out / "served"):
        patch.setattr("loaders.examples.common.report", lambda epoch, figures, *_: said.append(figures))
        assert run(data, out) == 0
    torch.save(said[-1], out / "said")
    return out


def test_it_learns_and_says_how_well_it_does_at_each_epoch(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, tmp_path, "--epochs", 4, "--tensorboard") == 0
    line = r"^epoch \d: loss ([\d.]+), .* images/s, .* validation accuracy ([\d.]+)%"
    said = re.findall(line, capsys.readouterr().out, re.MULTILINE)
    assert len(said) == 4
    assert float(said[-1][0]) < float(said[0][0])
    assert float(said[-1][1]) > 1.5 * 100 / CLASSES
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_a_raw_tree_has_validation_by_shares(raw_tree: Path) -> None:
    words = [str(raw_tree), "--splits", "train=0.7,val=0.3", "--size", "32", "--device", "cpu"]
    training, validation = common.build_loaders(common.parser("train", "A training.").parse_args(words), 1)
    assert validation is not None
    with training, validation:
        assert sorted(ids_of([*training, *validation])) == [*range(IMAGES)]


@pytest.mark.parametrize(("split", "place"), [("train", (1, 2)), ("val", (0, 0))])
def test_what_sigterm_ended_goes_on_to_the_same_weights(
    split: str, place: tuple[int, int], undisturbed: Path, data: Path, tmp_path: Path
) -> None:
    sync, notes = os.fsync, tmp_path / "served"

    def interrupted(descriptor: int) -> None:
        """By a second one, amidst saving."""
        if [row[1:3] for row in served.read(notes, split)][-1:] == [place]:
            os.kill(os.getpid(), signal.SIGTERM)
        sync(descriptor)

    with (
        served.writing_down(notes, signal.SIGTERM, split, place),
        mock.patch.object(os, "fsync", interrupted),
    ):
        assert run(data, tmp_path) == 143
    assert served.read(notes, split)[-1][1:3] == place, "no batch is begun behind it"
    with served.writing_down(notes):
        assert run(data, tmp_path, "--resume") == 0
    assert served.read(notes) == served.read(undisturbed / "served")
    check_same_weights(tmp_path, undisturbed)


def test_what_was_ended_without_being_asked_goes_on_from_its_last_epoch(
    undisturbed: Path, data: Path, tmp_path: Path
) -> None:
    """As after SIGKILL: nothing is saved at a Ctrl-C."""
    with (
        pytest.raises(KeyboardInterrupt),
        served.writing_down(tmp_path / "ended", signal.SIGINT, "train", (1, 1)),
    ):
        run(data, tmp_path)
    with served.writing_down(tmp_path / "served"):
        assert run(data, tmp_path, "--resume") == 0
    assert served.read(tmp_path / "served") == served.read(undisturbed / "served")[BATCHES:]
    check_same_weights(tmp_path, undisturbed)


@pytest.mark.parametrize("name", LIBRARIES)
def test_other_libraries_end_with_the_same_model_also_after_a_sigterm(
    name: str, undisturbed: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, float]] = []
    monkeypatch.setattr("loaders.examples.common.report", lambda epoch, figures, *_: said.append(figures))
    mine = [tmp_path / f"out/checkpoint-{step}/loader.json" for step in (1, 4, 500, "best")]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    with served.writing_down(tmp_path / "served", signal.SIGTERM, "train", (1, 1)):
        assert run(data, tmp_path / "out", name=name) == 143
    with served.writing_down(tmp_path / "served"):
        assert run(data, tmp_path / "out", "--resume", name=name) == 0
    assert served.read(tmp_path / "served") == served.read(undisturbed / "served")
    assert len(said) == EPOCHS
    expected = torch.load(undisturbed / "said")
    validated = {figure: expected[figure] for figure in ("validation_loss", "validation_accuracy")}
    assert {figure: said[-1][figure] for figure in validated} == pytest.approx(validated, rel=1e-3)
    assert said[-1]["images_per_s"] > 0
    assert [list(path.parent.iterdir()) for path in mine] == [[path] for path in mine], "the user's stay"
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == len(mine)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EACH)
def test_sigterm_to_one_of_two_ranks_ends_both_after_the_same_batch(
    name: str, data: Path, tmp_path: Path
) -> None:
    """As torchrun starts them, with gloo; one rank goes on. Each sample is served once an epoch."""
    example(name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m"]
    command += ["tests.loaders.examples.served", tmp_path / "served.{}", signal.SIGTERM, 1, "train", 1, 1]
    command += [f"loaders.examples.{name}", data, "--out", tmp_path / "run", *SMALL]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode != 0
    assert "exitcode  : 143" in ended.stderr
    assert ended.stdout.count("epoch 1:") == 1
    with served.writing_down(tmp_path / "served.2"):
        assert run(data, tmp_path / "run", "--resume", name=name) == 0
    ranks = [served.read(file) for file in sorted(tmp_path.glob("served.?"))]
    for epoch in range(EPOCHS):
        ids = [i for rows in ranks for i in served.ids_of(rows, epoch)]
        assert len(ids) == len(set(ids)) == TRAINED
    assert len({len(rows) for rows in ranks[:2]}) == 1


@pytest.mark.parametrize("name", EACH)
def test_bad_input_is_one_line_and_a_checkpoint_is_neither_overwritten_nor_mistaken(
    name: str, tree: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(mention: str, data: Path, out: Path, *words: object) -> None:
        assert run(data, out, *words, name=name) == 2
        assert mention in capsys.readouterr().err.splitlines()[-1]

    out, other = tmp_path / "out", tmp_path / "other"
    (tmp_path / "classes").mkdir()
    (tmp_path / "classes/grey").symlink_to(tree / "colour 0")
    assert run(data, out, "--epochs", 1, name=name) == 0
    refused("is there already; add --resume", data, out)
    refused("is of resnet10, not of resnet18", data, out, "--resume", "--model", "resnet18")
    refused("this state was taken with dataset", tree, out, "--resume")
    refused("nowhere: does not exist", tmp_path / "nowhere", other)
    refused("has other classes", data, other, "--val", tmp_path / "classes")
    (path,) = (
        path for path in out.rglob("*.*") if path.name in ("checkpoint.pt", "checkpoint.ckpt", "loader.pt")
    )
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"no checkpoint"):
        path.write_bytes(damaged)
        refused(f"{path}: damaged, or no checkpoint", data, out, "--resume")
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("name", PACKAGES)
def test_the_commands_that_an_example_names_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = example(name)
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    taken = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    commands = re.findall(rf"-m loaders.examples.{name} (.*)", module.__doc__ or "")
    assert len(commands) == 2
    assert {option for command in commands for option in re.findall(r"--[a-z0-9-]+", command)} <= taken


def train_killed(settings: dict[str, Any]) -> None:
    """What a worker of Ray does, as LIFE-RANK: in its first life rank 1 is killed."""
    from ray import train

    rank, folder = train.get_context().get_world_rank(), Path(settings["out"]).parent
    life = int((folder / f"0-{rank}").exists())
    killed = signal.SIGKILL if (life, rank) == (0, 1) else 0
    with served.writing_down(folder / f"{life}-{rank}", killed, "train", (1, 2)):
        import_module("loaders.examples.train_ray").train_worker(settings)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_that_loses_a_worker_goes_on_from_its_last_checkpoint(
    data: Path, tmp_path: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.train", exc_type=ImportError, reason="pip install 'ray[train]'")
    train_ray = import_module("loaders.examples.train_ray")
    monkeypatch.setattr(train_ray, "train_worker", train_killed)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    command = [str(data), "--out", str(tmp_path / "run"), *SMALL]
    assert train_ray.main([*command, "--save-every", "2"]) == 0
    whole = []
    for rank in range(2):
        first, second = (served.read(tmp_path / f"{life}-{rank}") for life in range(2))
        begun = (second[0][1], second[0][2])
        assert (0, 0) < begun <= (1, 2)
        whole += [row for row in first if (row[1], row[2]) < begun] + second
    for epoch in range(2):
        ids = served.ids_of(whole, epoch)
        assert len(ids) == len(set(ids)) == TRAINED
    assert train_ray.main(command) == 2, "a run that is there is not gone on with unasked"
