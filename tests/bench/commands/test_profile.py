"""The profiler over real loaders, on the CPU and where there is one on a GPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cli import main
from bench.commands.profile import STEP, WAIT
from precache.cli import commandline
from tests.bench.slowed import make_tree

QUICK = ("--batch-size", 4, "--size", 32, "--workers", 1, "--warmup", 1, "--steps", 3)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
    ),
]


def command(*arguments: object) -> int:
    return commandline.run(main, "bench", ["profile", *map(str, arguments)])


def spans(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The host's complete events of that name."""
    return [
        event
        for event in trace["traceEvents"]
        if event.get("name") == name and event.get("ph") == "X" and event["cat"] == "user_annotation"
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_the_trace_and_the_summary_show_stages_and_operators(
    converted: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    out = tmp_path / "deep/out"
    arguments = ("--trainer", "resnet50", "--device", device, "--out", out, *QUICK)
    assert command(converted["shards"], *arguments) == 0
    trace = json.loads((out / "trace.json").read_text())
    assert len(spans(trace, WAIT)) == len(spans(trace, STEP)) == 3
    summary = json.loads((out / "profile.json").read_text())
    assert summary["shares"].keys() == {WAIT, STEP}
    assert sum(summary["shares"].values()) == pytest.approx(1)
    traced_s = sum(span["dur"] for span in spans(trace, STEP)) / 1e6
    assert summary["stage_s"][STEP] == pytest.approx(traced_s, rel=0.1)
    times = [one["device_s" if device == "cuda" else "host_s"] for one in summary["operators"]]
    assert times == sorted(times, reverse=True)
    printed = capsys.readouterr().out.splitlines()
    assert re.match(r"Training waits \d+% of the time for batches: ", printed[0]), "the answer comes first"
    assert any("convolution" in line or "conv" in line for line in printed), "torch's own table"


def test_on_a_cpu_the_trainer_computes_and_the_batch_is_no_larger_than_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = make_tree(tmp_path / "tree")
    for path in list(tree.rglob("*.jpg"))[5:]:
        path.unlink()
    few = ("--device", "cpu", "--size", 32, "--workers", 1, "--warmup", 0, "--steps", 1)
    assert command(tree, *few, "--out", tmp_path / "out") == 0
    assert "trainer resnet18, batch 5 of 32x32, 1 worker, 1 step after 0" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/profile.json").read_text())["operators"]
