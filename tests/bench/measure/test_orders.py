import pytest
from click.testing import CliRunner

from bench.measure.orders import main


def test_both_versions_of_both_orders_are_measured_and_printed() -> None:
    small = ["--samples=3000", "--shards=7", "--batch-size=8", "--ranks=4", "--nodes=2", "--repeats=2"]
    done = CliRunner().invoke(main, small)
    assert done.exit_code == 0, done.output
    rows = [line.split()[:2] for line in done.output.splitlines()[1:5]]
    assert rows == [["full", "1"], ["full", "2"], ["window", "1"], ["window", "2"]]
    alone = CliRunner().invoke(main, [*small, "--most-listed=2000", "--batches=2"])
    assert [line.split()[:2] for line in alone.output.splitlines()[1:3]] == [["full", "2"], ["window", "2"]]


@pytest.mark.parametrize(
    "wrong", [["--ranks=5", "--nodes=2"], ["--samples=5"], ["--repeats=0"], ["--batches=0"]]
)
def test_sizes_that_do_not_fit_end_with_code_2(wrong: list[str]) -> None:
    done = CliRunner().invoke(main, wrong)
    assert done.exit_code == 2
    assert "must be" in done.output
