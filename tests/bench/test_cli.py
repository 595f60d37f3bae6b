"""The command `bench`: what it lists, what it refuses, its exit codes."""

import pytest

from bench.cli import COMMANDS, FIRST
from tests.bench.conftest import Bench
from tests.command import check_bad_input


def test_the_help_shows_first_what_a_newcomer_needs(bench: Bench) -> None:
    shown = bench("--help")
    assert shown.returncode == 0
    first, others = shown.stdout.partition("Start here:\n")[2].split("More:\n")
    listed = [[line.split()[0] for line in part.splitlines() if line[:3].strip()] for part in (first, others)]
    assert listed == [list(FIRST), sorted(set(COMMANDS) - set(FIRST))]


@pytest.mark.parametrize(
    ("command", "option"), [("loaders", "--repeats"), ("recommend", "--stored-size"), ("sweep", "--repeats")]
)
def test_the_rest_of_many_options_is_behind_help_all(command: str, option: str, bench: Bench) -> None:
    short, whole = (bench(command, flag).stdout for flag in ("--help", "--help-all"))
    assert f"more: bench {command} --help-all" in short
    assert option not in short
    assert option in whole
    for mention in ("--trainer-rate", "emulated:h100 ", "Options:"):
        assert mention in short
        assert mention in whole


def test_torchrun_may_not_start_it_several_times(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_bad_input(bench("loaders"), "would measure one another", "'bench ddp --ranks 4' without torchrun")
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_bad_input(bench("loaders", "nowhere"), "nowhere: does not exist")
