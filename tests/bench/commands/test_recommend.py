"""`bench recommend`: its turns, what it prints, and the command on a small tree. Never how fast."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.commands import recommend as command
from bench.measure import recommend as measuring
from bench.measure.recommend import Recommendation, choose
from bench.report.forecast import RISK, SLACK, Loaded
from bench.report.row import RAW_TREE
from precache.conversion.shard_writer import predict_bytes
from precache.errors import SettingError, WorkerError
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from tests.bench.given import Machine
from tests.bench.settings import quick


@pytest.fixture
def result(raw_tree: Path) -> Recommendation:
    formats = ("shards", "webdataset")
    return Machine().recommend(
        scan_tree(raw_tree), Recipe(format="shards", size=64), quick(), formats=formats
    )


def test_more_of_a_machine_changes_what_is_computed_and_not_what_was_measured(
    result: Recommendation, capsys: pytest.CaptureFixture[str]
) -> None:
    more = result.what_if(replace(result.inputs, **command.what_if(2, "h100", 4, 1000.0)))
    assert (more.inputs.gpus, more.inputs.trainer_images_per_s, more.inputs.cpus) == (2, 7158, 4)
    assert more.inputs.disk_bytes_per_s == 1e9
    assert more.profiles == result.profiles
    assert command.what_if(None, "1500x2", None, None) == {"trainer_images_per_s": 3000}
    for row, other in zip(result.rows, more.rows, strict=True):
        assert other.trainer is not None
        assert other.trainer.median == 2 * 7158
        assert other.loader.median >= row.loader.median
    for stored, risky in ((64, False), (48, True)):
        command.show(replace(result, settings={**result.settings, "stored_size": stored}))
        assert (RISK in " ".join(capsys.readouterr().out.split())) == risky
    command.show_rows(result.what_if(replace(result.inputs, images=10**9, cpus=1024, gpus=1024)))
    printed = capsys.readouterr().out
    assert "read from the disk in every epoch" in " ".join(printed.split())
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 100


def test_a_format_that_fails_is_skipped_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(path: Path, name: str, settings: object) -> Loaded:
        if name in failing:
            raise WorkerError(f"no space for {name}")
        return Loaded(1000.0, 2000.0, 900.0, 0.0)

    monkeypatch.setattr(measuring, "serve", serve)
    places: dict[str, Path] = {RAW_TREE: tmp_path, "shards": tmp_path}
    runs: dict[str, list[Loaded]] = {name: [] for name in places}
    skipped: dict[str, str] = {}
    failing = {"shards"}
    for _ in range(3):
        measuring.serve_all(places, quick(), runs, skipped)
    assert skipped == {"shards": "no space for shards"}
    assert {name: len(of) for name, of in runs.items()} == {RAW_TREE: 3, "shards": 0}
    failing = {RAW_TREE}
    with pytest.raises(WorkerError, match="no space for raw tree"):
        measuring.serve_all(places, quick(), runs, skipped)


def test_what_is_chosen_fits_and_nothing_better_does(raw_tree: Path) -> None:
    scan, names = scan_tree(raw_tree), ("shards", "webdataset")
    room, every = 1e9, []
    for _ in range(5):
        recipe, fitting = choose(scan, 96, names, room, "the disk")
        needs = [SLACK * predict_bytes(scan, replace(recipe, format=name), 100) for name in fitting]
        assert max(needs) <= room
        every.append((recipe.size, recipe.quality, fitting))
        room = max(needs) - 1
    rest = ((192, 95), (192, 90), (192, 75), (110, 75))
    assert every == [(192, 95, names), *((size, quality, names[1:]) for size, quality in rest)]
    with pytest.raises(SettingError, match="the smallest, webdataset of at most 110 px, JPEG quality 75"):
        choose(scan, 96, names, room, "the disk")
