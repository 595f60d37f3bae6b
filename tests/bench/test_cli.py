"""The command `bench`: what it lists and refuses, and the options that its commands share."""

import subprocess
import sys

import click
import pytest
import torch

from bench.cli import COMMANDS, FIRST
from bench.commands.options import run_options
from bench.measure.settings import Settings
from tests.bench.conftest import Bench
from tests.command import ROOT, check_bad_input


def test_the_help_shows_first_what_a_newcomer_needs(bench: Bench) -> None:
    shown = bench("--help")
    assert shown.returncode == 0
    first, others = shown.stdout.partition("Start here:\n")[2].split("More:\n")
    listed = [[line.split()[0] for line in part.splitlines() if line[:3].strip()] for part in (first, others)]
    assert listed == [list(FIRST), sorted(set(COMMANDS) - set(FIRST))]
    short, whole = (bench("loaders", flag).stdout for flag in ("--help", "--help-all"))
    assert "more: bench loaders --help-all" in short
    assert ("--repeats" in short, "--repeats" in whole) == (False, True)
    assert "--trainer-rate" in short


def test_torchrun_may_not_start_it_several_times(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_bad_input(bench("loaders"), "would measure one another", "'bench ddp --ranks 4' without torchrun")
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_bad_input(bench("loaders", "nowhere"), "nowhere: does not exist")


def test_commands_that_only_compute_start_without_torch() -> None:
    code = "import sys, bench.commands.compare, bench.commands.simulate; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_options_make_settings_and_those_left_out_take_what_is_usual() -> None:
    @click.command()
    @run_options("trainer", "trainer_rate", "warmup", "workers", "size", "device", size={"default": 32})
    def command(settings: Settings) -> Settings:
        return settings

    def made(*words: str) -> Settings:
        settings: Settings = command.main(["--device", "cpu", *words], standalone_mode=False)
        return settings

    usual = Settings(trainer="emulated:100", workers=3, size=32, device=torch.device("cpu"))
    assert made("--trainer", "emulated:100", "--workers", "3") == usual
    assert (usual.batch_size, usual.warmup, usual.batches) == (64, 4, 40)
    assert made("--trainer-rate", "2500").trainer == "emulated:2500"
    assert made("--trainer-rate", "1e6").trainer == "emulated:1000000"
