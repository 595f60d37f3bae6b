import subprocess
import sys

import click
import pytest
import torch

from bench.cli import COMMANDS, main
from bench.commands.options import SHARED, option, run_options
from bench.measure.settings import Settings
from precache.errors import SettingError
from tests.command import ROOT

OWN = {
    "accuracy": {"size"},
    "compare": {"json_path"},
    "convert": {"size", "workers", "repeats"},
    "ddp": {"batch_size", "workers"},
    "hardware": {"repeats"},
    "loaders": {"workers", "repeats"},
    "profile": {"trainer", "batch_size"},
    "quickstart": {"batches", "repeats"},
    "recommend": {"batch_size", "workers"},
    "simulate": {"json_path"},
    "sweep": {"batch_size", "workers", "batches", "repeats", "html_path"},
    "watch": {"batches"},
}
"""Commands whose option of that name has another default or help, as it means something else there."""


def options_of(command: str) -> dict[str, click.Option]:
    found = main.get_command(click.Context(main), command)
    assert found is not None
    return {str(one.name): one for one in found.params if isinstance(one, click.Option)}


def told(one: click.Option) -> tuple[object, ...]:
    return one.opts, one.type.to_info_dict(), one.default, one.help, one.is_flag, one.show_default


def test_a_shared_option_has_one_default_and_one_help() -> None:
    """Except where OWN says so, and no longer than it says so."""

    @click.command()
    def plain() -> None: ...

    for name in SHARED:
        plain = option(name)(plain)
    shared = {str(one.name): told(one) for one in plain.params if isinstance(one, click.Option)}
    assert set(shared) == set(SHARED)
    differing = {
        command: {
            name for name, one in options_of(command).items() if told(one) != shared.get(name, told(one))
        }
        for command in COMMANDS
    }
    assert {command: names for command, names in differing.items() if names} == OWN


@pytest.mark.parametrize("command", ["compare", "simulate"])
def test_a_command_that_only_computes_starts_without_torch(command: str) -> None:
    code = f"import sys, bench.commands.{command}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def made(*words: str) -> Settings:
    @click.command()
    @run_options("trainer", "trainer_rate", "warmup", "workers", "size", "device", size={"default": 32})
    def command(settings: Settings) -> Settings:
        return settings

    settings = command.main(["--device", "cpu", *words], standalone_mode=False)
    assert isinstance(settings, Settings)
    return settings


def test_a_rate_of_ones_own_is_an_emulated_trainer_and_no_second_one() -> None:
    for command in ("loaders", "sweep", "profile", "ddp", "recommend", "quickstart"):
        assert "trainer_rate" in options_of(command)
    assert made("--trainer-rate", "2500").trainer == "emulated:2500"
    assert made("--trainer-rate", "1e6").trainer == "emulated:1000000"
    with pytest.raises(SettingError, match="--trainer and --trainer-rate cannot be combined"):
        made("--trainer", "none", "--trainer-rate", "5")
    for bad in ("0", "-1", "nan", "inf"):
        with pytest.raises(SettingError, match="trainer_rate must be positive"):
            made("--trainer-rate", bad)


def test_options_make_settings_and_those_left_out_take_what_is_usual() -> None:
    settings = made("--trainer", "emulated:100", "--workers", "3")
    usual = Settings(trainer="emulated:100", workers=3, size=32, device=torch.device("cpu"))
    assert settings == usual
    assert (usual.batch_size, usual.warmup, usual.batches) == (64, 4, 40)
