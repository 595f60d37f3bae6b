"""First and later epochs, for each check, as the program prints them."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.measure.epochs import epochs


@pytest.mark.slow
def test_each_check_has_its_rates(converted: dict[str, Path]) -> None:
    result = CliRunner().invoke(epochs, [str(converted["shards"]), "--repeats", "1", "--batch-size", "16"])
    assert result.exit_code == 0, result.output
    rates = dict(re.findall(r"^(\S+) +later epochs ([\d,]+) ", result.output, re.M))
    assert list(rates) == ["never", "first-read", "always"]
    assert all(int(rate.replace(",", "")) > 100 for rate in rates.values())
    assert "never       later" in result.output
    assert re.search(r"^never .* 1.00 \(1.00 to 1.00\) of 'never'", result.output, re.M)
