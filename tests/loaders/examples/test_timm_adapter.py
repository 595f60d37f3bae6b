"""timm's training script on our loaders. No package of timm has it: a script of its calls stands for it.

PRECACHE_TIMM_TRAIN=.../pytorch-image-models/train.py has the real one run, too.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loaders
from precache import SettingError
from tests.loaders.examples.conftest import CLASSES, IMAGES, TRAINED

pytest.importorskip("timm", reason="pip install 'precache[frameworks]'")
adapter = pytest.importorskip("loaders.examples.timm_adapter")
SCRIPT = Path(__file__).with_name("timm_script.py")
BATCH = 8


Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script as the command line does: exit code, stdout, stderr."""
    import timm.data

    for name in ("create_dataset", "create_loader"):
        monkeypatch.setattr(timm.data, name, getattr(timm.data, name))  # put back at the end

    def run(script: Path, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["timm_adapter", str(script), *map(str, arguments)])
        return adapter.main(), *capsys.readouterr()

    return run


def of_training(path: Path, **options: Any) -> Any:
    import torch

    settings = {"num_workers": 1, "device": torch.device("cpu"), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    dataset = adapter.create_dataset("", root=str(path), split="train", seed=7)
    training = adapter.create_loader(dataset, (3, 24, 24), BATCH, is_training=True, **settings | options)
    return dataset, training


@pytest.fixture
def labels(data: Path) -> list[list[int]]:
    """Of each whole batch of the epochs 0 and 1, as the script asks for them."""
    with loaders.build(data, batch_size=BATCH, seed=42, sampling=loaders.Sampling(last="drop")) as loader:
        return [batch.labels.tolist() for _ in range(2) for batch in loader]


def test_the_script_trains_on_our_batches_and_validates_on_each_picture(
    run: Run, data: Path, labels: list[list[int]]
) -> None:
    code, out, err = run(SCRIPT, data)
    assert code == 0, err
    epochs = [json.loads(line) for line in out.splitlines()]
    assert [seen[2] for epoch in epochs for seen in epoch["seen"]] == labels
    assert {tuple(seen[1]) for epoch in epochs for seen in epoch["seen"]} == {(BATCH, 3, 32, 32)}
    assert [epoch["validated"] for epoch in epochs] == [IMAGES - TRAINED] * 2


def test_mixup_of_the_script_mixes_until_it_is_turned_off(
    run: Run, data: Path, labels: list[list[int]]
) -> None:
    code, out, err = run(SCRIPT, data, "mixup_alpha=1.0", "re_prob=0.5", "re_mode='pixel'")
    assert code == 0, err
    first, second = ([seen[2] for seen in json.loads(line)["seen"]] for line in out.splitlines())
    assert any(sum(share > 0.1 for share in shares) > 1 for batch in first for shares in batch)
    for shares_of, expected in zip(second, labels[len(first) :], strict=True):
        assert [shares.index(max(shares)) for shares in shares_of] == expected
        assert all(max(shares) > 0.9 for shares in shares_of)


def test_a_run_that_goes_on_serves_the_epoch_that_it_names(data: Path) -> None:
    dataset, training = of_training(data)
    served = [[labels.tolist() for _, labels in training] for _ in range(3)]
    dataset, training = of_training(data)
    dataset.set_epoch(2)
    assert [labels.tolist() for _, labels in training] == served[2] != served[0]


def test_crops_flips_and_colours_are_those_of_its_arguments() -> None:
    made = adapter.make_augmentation(
        scale=[0.5, 1.0], ratio=[1.0, 1.0], hflip=0.0, color_jitter=(0.1, 0, 0, 0.2)
    )
    assert made == loaders.RandomAugmentation(
        scale=(0.5, 1.0), ratio=(1.0, 1.0), flip=0.0, brightness=0.1, contrast=0, saturation=0, hue=0.2
    )
    assert adapter.make_augmentation(color_jitter=None) == loaders.RandomAugmentation()


def test_pictures_are_normalised_with_the_figures_of_the_model_and_erased_where_asked(data: Path) -> None:
    _, plain = of_training(data, no_aug=True)
    _, other = of_training(data, no_aug=True, mean=(0.0,) * 3, std=(1.0,) * 3)
    for (images, _), (from_0_to_1, _) in zip(plain, other, strict=True):
        assert ((images + 1) / 2 - from_0_to_1).abs().max() < 1e-5
    _, erased = of_training(
        data, color_jitter=None, hflip=0.0, scale=(1.0, 1.0), ratio=(1.0, 1.0), re_prob=1.0
    )
    assert all((images == 0).all(dim=1).any() for images, _ in erased)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_augment": "rand-m9"}, "--aa 'rand-m9': is not there with these loaders"),
        ({"vflip": 0.5}, "--vflip 0.5"),
        ({"num_aug_splits": 3}, "--aug-splits 3"),
        ({"collate_fn": len}, "batches come whole"),
    ],
)
def test_what_is_not_there_is_refused(options: dict[str, Any], message: str, data: Path) -> None:
    with pytest.raises(SettingError, match=message):
        of_training(data, **options)


def test_an_odd_batch_is_not_mixed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BATCH", 7)
    with pytest.raises(SettingError, match="--batch-size 7 with MixUp"):
        of_training(data, collate_fn=adapter.FastCollateMixup())


def test_a_wrong_path_ends_in_one_line(run: Run, tmp_path: Path) -> None:
    code, _, err = run(SCRIPT, tmp_path / "none")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("timm_adapter: error: ")
    assert str(tmp_path / "none") in err
    code, _, err = run(tmp_path / "train.py")
    assert code == 2
    assert "train.py: no such file; give the path of timm's train.py" in err


@pytest.mark.slow
@pytest.mark.skipif("PRECACHE_TIMM_TRAIN" not in os.environ, reason="give the path of timm's train.py")
@pytest.mark.parametrize(
    "more", [(), ("--mixup", "0.2", "--mixup-off-epoch", "1"), ("--no-prefetcher", "--mixup", "0.2")]
)
def test_timms_own_train_py_trains(run: Run, more: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    settings = {
        "data-dir": data, "val-split": "val", "model": "resnet10t", "num-classes": CLASSES, "img-size": 32,
        "batch-size": BATCH, "epochs": 2, "warmup-epochs": 0, "workers": 1, "lr": 0.01, "output": tmp_path,
        "experiment": "run",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    code, _, err = run(Path(os.environ["PRECACHE_TIMM_TRAIN"]), *words, *more)
    assert code == 0, err
    assert len((tmp_path / "run/summary.csv").read_text().splitlines()) == 3
