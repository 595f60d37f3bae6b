"""What one could do about a loader, of measurements made by hand over real folders."""

from pathlib import Path

import pytest

from bench.findings import changes
from bench.findings.changes import Arm
from bench.findings.stats import Estimate
from bench.findings.verdict import Measured

STAGES = {"read": 1_000.0, "decode": 100.0, "copy": 5_000.0}


def at(rate: float) -> Measured:
    return Measured(loader=Estimate(rate, rate, rate))


def test_converting_takes_as_long_as_reading_and_decoding_the_raw_tree(
    raw_tree: Path, converted: dict[str, Path]
) -> None:
    raw, shards = Arm("pytorch", raw_tree), Arm("shards", converted["shards"])
    found = changes.known(raw, {raw: at(90), shards: at(4_000)}, {raw: [STAGES]}, 2)
    (converting,) = (change for change in found if change.what == "Converting to shards")
    assert converting.measured
    assert converting.images_per_s.median == 4_000
    assert converting.seconds == pytest.approx(changes.samples(raw) * (1 / 1_000 + 1 / 100))
    assert converting.size_bytes > 0


def test_how_long_converting_takes_is_not_known_where_no_raw_tree_was_measured(
    converted: dict[str, Path],
) -> None:
    archive, shards = Arm("webdataset", converted["webdataset"]), Arm("shards", converted["shards"])
    for measured in ({archive: at(90), shards: at(4_000)}, {archive: at(90)}):
        found = changes.known(archive, measured, {archive: [STAGES]}, 2)
        (converting,) = (change for change in found if change.what == "Converting to shards")
        assert converting.seconds is None
