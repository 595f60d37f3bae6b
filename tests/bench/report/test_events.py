"""`--tensorboard`: what is written is read back with TensorBoard's own reader."""

import json
import sys
from pathlib import Path

import pytest

from bench.report import events
from precache.errors import MissingDependencyError
from tests.bench.rich_result import BATCH_SIZE, rich_result
from tests.command import run_here


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="run: pip install tensorboard"
    )
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]
    }


def test_every_batch_and_sample_is_an_event(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="run: pip install tensorboard")
    result = rich_result()
    assert events.write_events(result, tmp_path) == ["pytorch_on_raw_tree"]
    assert events.write_events(result, tmp_path) == ["pytorch_on_raw_tree"]  # supersedes the first
    scalars = read(tmp_path / "pytorch_on_raw_tree")
    row = result.rows[0]
    assert row.monitor is not None
    assert [step for step, _ in scalars["batch/wait_s"]] == list(range(len(row.batches.wait_s)))
    assert [value for _, value in scalars["batch/step_s"]] == pytest.approx(row.batches.step_s)
    rates = [BATCH_SIZE / seconds for seconds in row.batches.batch_s]
    assert [value for _, value in scalars["batch/images_per_s"]] == pytest.approx(rates)
    assert [value for _, value in scalars["monitor/cpu_share"]] == pytest.approx(
        row.monitor.series["cpu_share"]
    )
    assert not {name for name in scalars if "flags" in name or "time_s" in name}


def test_report_writes_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="run: pip install tensorboard")
    (tmp_path / "r.json").write_text(json.dumps(rich_result().to_json()))
    result = run_here("bench", "report", "r.json", "--tensorboard", "events", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "wrote events: pytorch_on_raw_tree" in result.stdout
    assert "batch/wait_s" in read(tmp_path / "events/pytorch_on_raw_tree")


def test_without_tensorboard_the_command_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(MissingDependencyError, match="pip install tensorboard"):
        events.writer_class()
