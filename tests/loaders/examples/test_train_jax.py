"""The training in JAX learns, goes on where it was ended, and takes batches without a copy."""

import re
from pathlib import Path

import pytest
import torch

import loaders
from tests.loaders.examples import served

pytest.importorskip("jax", reason="pip install 'precache[frameworks]'")
train_jax = pytest.importorskip("loaders.examples.train_jax")
SMALL = ("--size", "24", "--batch-size", "8", "--epochs", "4")


def run(data: Path, out: Path, *more: str) -> int:
    code: int = train_jax.main([str(data), "--out", str(out), *SMALL, *more])
    return code


def test_it_learns_and_says_how_well_at_each_epoch(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, tmp_path, "--epochs", "6") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch {n}" for n in range(1, 7)]
    (share,) = re.findall(r"validation accuracy ([0-9.]+)%", lines[-1])
    assert float(share) > 60  # of three classes


def test_what_goes_on_ends_as_what_was_never_ended(data: Path, tmp_path: Path) -> None:
    with served.writing_down(tmp_path / "whole.jsonl"):
        assert run(data, tmp_path / "whole") == 0
    for name in ("first.jsonl", "second.jsonl"):
        with served.writing_down(tmp_path / name), pytest.MonkeyPatch.context() as patch:
            if name == "first.jsonl":
                patch.setattr(train_jax.common, "report", ended_in_epoch_1)
                with pytest.raises(KeyboardInterrupt):
                    run(data, tmp_path / "ended")
            else:
                assert run(data, tmp_path / "ended", "--resume") == 0
    assert served.read(tmp_path / "first.jsonl") + served.read(tmp_path / "second.jsonl") == served.read(
        tmp_path / "whole.jsonl"
    )
    whole, ended = (saved(tmp_path / name) for name in ("whole", "ended"))
    assert whole == ended


def ended_in_epoch_1(epoch: int, figures: dict[str, float]) -> None:
    if epoch == 1:
        raise KeyboardInterrupt


def saved(folder: Path) -> list[bytes]:
    arrays = torch.load(folder / "checkpoint.pt", weights_only=True)["arrays"]
    return [array.numpy().tobytes() for array in arrays]


def test_images_are_not_copied_on_their_way_to_jax(data: Path) -> None:
    with loaders.build(data, batch_size=8, size=24, dtype="float32") as loader:
        for batch in loader:
            images, labels = train_jax.as_jax(batch)
            assert images.unsafe_buffer_pointer() == batch.images.data_ptr()
            assert images.tolist() == batch.images.permute(0, 2, 3, 1).tolist()
            assert labels.tolist() == batch.labels.tolist()


def test_what_fills_the_last_batch_is_not_counted(data: Path) -> None:
    with loaders.build(data, split="val", batch_size=8, size=24, dtype="float32", last="pad") as loader:
        assert any(batch.padding.any() for batch in loader)
        right = train_jax.find_accuracy(train_jax.make_parameters(3, 0), loader)  # all logits 0: class 0
        targets = loader.dataset.targets
        assert right == targets.count(0) / len(targets)


@pytest.mark.parametrize("option", [("--model", "resnet34"), ("--bf16",)])
def test_an_option_that_it_has_no_use_for_is_refused(
    option: tuple[str, ...], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(data, tmp_path, *option)
    assert f"{option[0]}: this example has a network of its own" in capsys.readouterr().err


def test_a_run_that_is_there_is_not_overwritten(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint.pt").write_text("mine")
    assert run(data, tmp_path) == 2
    assert "checkpoint.pt: is there already; add --resume to go on" in capsys.readouterr().err
    assert run(data, tmp_path, "--resume") == 2
    assert "checkpoint.pt: damaged, or no checkpoint" in capsys.readouterr().err
    assert (tmp_path / "checkpoint.pt").read_text() == "mine"
