"""How long a batch is waited for, as the program prints it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.measure.waits import WAYS, Waits, table, waits


def test_the_table_has_a_line_for_each_way_with_its_spread() -> None:
    found = {way.name: [Waits((0.001, 0.001, 0.004), (0.0,), rate) for rate in (50.0, 100.0)] for way in WAYS}
    found["nap"] = [Waits((0.0001, 0.0001, 0.0002), (0.0001,), rate) for rate in (48.0, 102.0)]
    head, *lines = table(found)
    assert head.split("  ")[0] == ""
    assert [line.split("  ")[0] for line in lines] == [way.name for way in WAYS]
    first, second, _ = (" ".join(line.split()) for line in lines)
    assert first.startswith("nap 0.10 (0.10-0.10) 0.20 (0.20-0.20) 0.10 (0.10-0.10) 75 (48-102)")
    assert first.endswith("0.99 (0.96-1.02)")
    assert "1.00 (1.00-1.00) 4.00 (4.00-4.00)" in second


@pytest.mark.slow
def test_it_measures_each_way(converted: dict[str, Path]) -> None:
    settings = ["--batch-size", "16", "--repeats", "1", "--batches", "5", "--step-ms", "5"]
    result = CliRunner().invoke(waits, [str(converted["shards"]), *settings])
    assert result.exit_code == 0, result.output
    assert "step 5 ms, 1 runs of 5 batches each" in result.output
    assert all(f"\n{way.name}  " in result.output for way in WAYS)
