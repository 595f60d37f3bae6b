"""`bench simulate` against closed forms and a stored result."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.commands.simulate import LINK, LOADER, STEP, STORAGE, Prediction, predict
from precache.cli import commandline
from tests.command import ROOT

RESULT = min((ROOT / "bench/results").glob("quickstart-*.json"))


def test_the_slowest_stage_decides() -> None:
    """All GPUs share the storage, those of a node its link, and all wait for the fullest node."""
    usual = {"loader_images_per_s": 1e5, "trainer_images_per_s": 1000.0, "image_bytes": 100_000.0}
    cases: list[tuple[dict[str, float], str, Callable[[int, int], float]]] = [
        ({}, STEP, lambda gpus, _: 1000 * gpus),
        ({"loader_images_per_s": 500.0}, LOADER, lambda gpus, _: 500 * gpus),
        ({"storage_mbps": 50.0}, STORAGE, lambda *_: 500),
        ({"node_mbps": 20.0, "storage_mbps": 1e6}, LINK, lambda gpus, node: 200 * gpus / min(gpus, node)),
    ]
    for (changed, binds, rate), gpus, per_node in itertools.product(cases, (1, 3, 8, 64), (1, 4)):
        found = predict(gpus, per_node, **{**usual, **changed})
        expected = rate(gpus, per_node)
        assert found.images_per_s == pytest.approx(expected)
        assert found.nodes == -(-gpus // per_node)
        assert found.binds == binds
        assert found.wait_share == pytest.approx(1 - found.images_per_s / (1000 * gpus))
        assert found.needed_mbps == pytest.approx(100 * gpus)


def predicted(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], Prediction]:
    """The rates, and the last prediction, of `--json -`."""
    words = ["simulate", *map(str, arguments), "--json", "-"]
    assert commandline.run(main, "bench", words) == 0
    found = json.loads(capsys.readouterr().out)
    return found["rates"], Prediction(**found["predictions"][-1])


def test_rates_come_from_a_result_and_options_replace_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = json.loads(RESULT.read_text())
    for row in content["rows"]:
        row["image_bytes"] = 20_000.0
    row = next(row for row in content["rows"] if row["backend"] == "webdataset")
    stored = tmp_path / "r.json"
    stored.write_text(json.dumps(content))
    arguments = ("--result", stored, "--backend", "webdataset", "--gpus", "1,16")
    taken, many = predicted(capsys, *arguments)
    assert taken["loader_images_per_s"] == row["loader"]["median"]
    assert taken["trainer_images_per_s"] == row["trainer"]["median"]
    assert (many.gpus, many.nodes) == (16, 2)
    assert many.binds == LOADER, "the storage is no bottleneck unless its rate is given"
    assert many.needed_mbps == pytest.approx(16 * row["trainer"]["median"] * 20_000 / 1e6)
    assert predicted(capsys, *arguments, "--loader-rate", 1e6)[1].binds == STEP
    assert predicted(capsys, *arguments, "--storage-mbps", 100)[1].binds == STORAGE
    larger = predicted(capsys, *arguments, "--image-bytes", 40_000)[1]
    assert larger.needed_mbps == pytest.approx(2 * many.needed_mbps)
