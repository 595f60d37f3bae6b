"""The same training with other libraries: it ends with the same model, also after a SIGTERM."""

import signal
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from loaders.examples import train
from tests.loaders.examples import served
from tests.loaders.examples.test_train import EPOCHS, SMALL

LIBRARIES = {"lightning": "pytorch_lightning", "accelerate": "accelerate", "transformers": "transformers"}


@pytest.fixture(params=LIBRARIES)
def example(request: pytest.FixtureRequest) -> ModuleType:
    pytest.importorskip(LIBRARIES[request.param], reason=f"pip install {LIBRARIES[request.param]}")
    return import_module(f"loaders.examples.train_{request.param}")


def run(module: ModuleType, data: Path, out: Path, *more: object) -> int:
    words = (data, "--out", out, "--epochs", EPOCHS, *SMALL, *more)
    try:
        code: int = module.main([*map(str, words)])
    except SystemExit as stop:  # Lightning has its processes ended so
        code = int(str(stop.code))
    return code


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[served.Served, dict[str, float]]:
    """What `train` serves, and what it says of the last epoch's validation."""
    out = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch, served.writing_down(out / "served"):
        said: list[dict[str, float]] = []
        patch.setattr("loaders.examples.common.report", lambda epoch, figures, *_: said.append(figures))
        assert run(train, data, out) == 0
    last = {name: value for name, value in said[-1].items() if name.startswith("validation")}
    return served.read(out / "served"), last


def test_it_ends_with_the_same_model_as_plain_pytorch(
    example: ModuleType,
    plain: tuple[served.Served, dict[str, float]],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[dict[str, float]] = []
    monkeypatch.setattr("loaders.examples.common.report", lambda epoch, figures, *_: said.append(figures))
    mine = [tmp_path / "out" / f"checkpoint-{name}/loader.json" for name in (1, 2, 4, 6, 500, "best")]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    (tmp_path / "out/checkpoint.json").write_text("mine")
    with served.writing_down(tmp_path / "served", signal.SIGTERM, "train", (1, 1)):
        assert run(example, data, tmp_path / "out") == 143
    with served.writing_down(tmp_path / "served"):
        assert run(example, data, tmp_path / "out", "--resume") == 0
    rows, expected = plain
    assert served.read(tmp_path / "served") == rows
    assert len(said) == EPOCHS
    assert {name: said[-1][name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert said[-1]["images_per_s"] > 0
    assert [list(path.parent.iterdir()) for path in mine] == [[path] for path in mine], "the user's stay"
    assert (tmp_path / "out/checkpoint.json").read_text() == "mine"
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == len(mine)


@pytest.mark.slow
def test_it_goes_on_only_when_told_to_and_with_its_own_data(
    example: ModuleType, tree: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(example, data, tmp_path, "--epochs", 1) == 0
    capsys.readouterr()
    assert run(example, data, tmp_path) == 2
    assert "is there already; add --resume" in capsys.readouterr().err
    assert run(example, data, tmp_path, "--resume", "--model", "resnet18") == 2
    assert "is of resnet10, not of resnet18" in capsys.readouterr().err
    assert run(example, tree, tmp_path, "--resume") == 2
    assert "this state was taken with dataset" in capsys.readouterr().err
    assert run(example, tree.parent / "nowhere", tmp_path / "other") == 2
    assert "nowhere: does not exist" in capsys.readouterr().err
