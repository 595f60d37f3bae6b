"""`python -m bench.measure.engines`: the engines beside each other."""

from pathlib import Path

import pytest

from precache.example_data.sample_tree import make_sample
from tests.command import check_bad_input, run


def test_a_tree_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    check_bad_input(run("bench.measure.engines", "nowhere", cwd=tmp_path), "nowhere", "is no folder")


@pytest.mark.slow
def test_the_table_has_both_engines_and_their_ratio(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    make_sample(tmp_path / "tree", images=300, classes=3, seed=1, workers=0)
    command = ["tree", "--repeats", "1", "--size", "64", "--shard-bytes", "100kB", "--scratch", "."]
    result = run("bench.measure.engines", *command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    head, steady, whole, conditions = result.stdout.splitlines()
    assert head.split() == ["images/s", "local", "ray", "ray", "/", "local"]
    assert steady.startswith("steady ")
    assert whole.startswith("whole ")
    assert "ray " in conditions
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]
