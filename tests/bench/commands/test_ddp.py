"""`bench ddp`: real ranks under torchrun with gloo, and what is said of hand-made rates."""

import json
from pathlib import Path

import psutil
import pytest

from bench.cli import main
from bench.commands.ddp import sentences
from bench.measure.ranks import launch, summarise
from precache.cli import commandline
from precache.errors import WorkerError
from tests.bench.settings import quick

QUICK = (
    *("--batch-size", 4, "--size", 32, "--batches", 2, "--warmup", 1, "--workers", 1),
    *("--repeats", 1, "--device", "cpu"),
)


def test_two_ranks_are_measured_alone_at_their_own_pace_and_in_step(
    converted: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out/ddp.json"
    words = ("--ranks", 2, "--backend", "shards", "--trainer", "emulated:200", *QUICK, "--json", path)
    assert commandline.run(main, "bench", ["ddp", str(converted["shards"]), *map(str, words)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Together: "), "the answer comes first"
    table = shown.partition("\n\n")[2]
    assert [line.split()[0] for line in table.splitlines()[:3]] == ["rank", "0", "1"]
    result = json.loads(path.read_text())
    assert len(result["own"]) == len(result["together"]) == 2
    total = sum(rank["median"] for rank in result["together"])
    assert result["total"]["median"] == pytest.approx(total)
    assert result["ratio"]["median"] == pytest.approx(total / result["one"]["median"])
    for rate in (result["one"], *result["own"], *result["together"]):
        assert 0 < rate["median"] <= 200, "an emulated accelerator is never faster than it is told to be"


def test_the_slowest_rank_is_named_unless_that_is_noise() -> None:
    quick = {
        "one": [1000.0] * 3,
        "own": [990.0, 1000, 1010],
        "together": [600.0, 610, 620],
        "data_wait": [0.1] * 3,
    }
    for own, distinct in (([620.0, 640, 660], True), ([880.0, 900, 1020], False), ([985.0, 986, 987], False)):
        summary = summarise([quick, {**quick, "own": own}, quick])
        assert (summary.slowest, summary.distinct, summary.total.median) == (1, distinct, 1830)
        assert (summary.ratio.low, summary.ratio.median, summary.ratio.high) == (1.8, 1.83, 1.86)
        assert ("within noise" in sentences(summary)[1]) != distinct


def ranks_running() -> dict[int, psutil.Process]:
    """The processes of the ranks that this one started."""
    children = psutil.Process().children(recursive=True)
    return {int(p.environ()["RANK"]): p for p in children if "bench.measure.ranks" in p.cmdline()[:5]}


@pytest.mark.slow  # starts ranks twice more
def test_a_rank_that_dies_is_named_and_an_interrupt_leaves_none_behind(raw_tree: Path) -> None:
    endless = quick(batch_size=4, workers=0, warmup=0, batches=1, repeats=10**6).of("auto", raw_tree, 5)
    started: list[psutil.Process] = []

    def kill(done: int, total: int) -> None:
        if done == 1:
            ranks_running()[1].kill()

    def interrupt(done: int, total: int) -> None:
        started.extend(ranks_running().values())
        raise KeyboardInterrupt

    with pytest.raises(WorkerError, match=r"^2 ranks: rank 1 ended with exit code -9; try fewer ranks"):
        launch(endless, 2, kill)
    with pytest.raises(KeyboardInterrupt):
        launch(endless, 2, interrupt)
    assert len(started) == 2
    assert psutil.wait_procs(started, timeout=10)[1] == []
