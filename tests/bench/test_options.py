import inspect
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from bench.cli import COMMANDS, main
from bench.commands.options import SHARED, option, run_options
from bench.measure.spec import RunSettings
from precache.errors import SettingError
from tests.command import ROOT

OWN = {
    ("accuracy", "size"),
    ("loaders", "workers"),
    ("loaders", "repeats"),
    ("sweep", "batch_size"),
    ("sweep", "workers"),
    ("sweep", "amp"),
    ("sweep", "batches"),
    ("sweep", "repeats"),
    ("sweep", "html_path"),
    ("ddp", "batch_size"),
    ("ddp", "workers"),
    ("profile", "trainer"),
    ("profile", "batch_size"),
    ("quickstart", "batches"),
    ("quickstart", "repeats"),
    ("recommend", "batch_size"),
    ("recommend", "repeats"),
    ("convert", "size"),
    ("convert", "workers"),
    ("convert", "repeats"),
    ("hardware", "repeats"),
    ("simulate", "trainer"),
    ("simulate", "json_path"),
    ("compare", "json_path"),
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
        (command, name)
        for command in COMMANDS
        for name, one in options_of(command).items()
        if name in SHARED and told(one) != shared[name]
    }
    assert differing == OWN


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_all_that_it_takes(command: str) -> None:
    """No `**settings`: what is not named is not checked by anyone."""
    found = main.get_command(click.Context(main), command)
    assert found is not None
    function = inspect.unwrap(found.callback)  # type: ignore[arg-type]
    kinds = {one.kind for one in inspect.signature(function).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.parametrize("command", ["compare", "simulate"])
def test_a_command_that_only_computes_starts_without_torch(command: str) -> None:
    code = f"import sys, bench.commands.{command}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def made(*arguments: str) -> RunSettings:
    @click.command()
    @run_options("trainer", "trainer_rate", "warmup", "workers", "size", "device", size={"default": 32})
    def command(settings: RunSettings) -> RunSettings:
        return settings

    settings = command.main(["--device", "cpu", *arguments], standalone_mode=False)
    assert isinstance(settings, RunSettings)
    return settings


@pytest.mark.parametrize("command", ["loaders", "sweep", "profile", "ddp", "recommend", "quickstart"])
def test_a_rate_of_ones_own_is_an_option_wherever_a_trainer_is_fed(command: str) -> None:
    assert "trainer_rate" in options_of(command)


def test_a_rate_of_ones_own_is_an_emulated_trainer_and_no_second_one() -> None:
    assert made("--trainer-rate", "2500").trainer == "emulated:2500"
    assert made("--trainer-rate", "1e6").trainer == "emulated:1000000"
    with pytest.raises(SettingError, match="--trainer and --trainer-rate cannot be combined"):
        made("--trainer", "none", "--trainer-rate", "5")
    for bad in ("0", "-1", "nan", "inf"):
        with pytest.raises(SettingError, match="trainer_rate must be positive"):
            made("--trainer-rate", bad)


def test_options_make_settings_and_those_left_out_take_what_is_usual() -> None:
    settings = made("--trainer", "emulated:100", "--workers", "3")
    assert (settings.trainer, settings.workers, settings.device) == ("emulated:100", 3, torch.device("cpu"))
    assert (settings.size, settings.warmup) == (32, 4)
    assert (settings.batch_size, settings.batches) == (64, 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trainer", "resnet7"), "unknown trainer 'resnet7'"),
        (("--workers", "-1"), "workers must be 0 or more, got -1"),
        (("--size", "0"), "size must be an integer from 1 to 8,192, got 0"),
        (("--warmup", "-1"), "warmup must be an integer of at least 0, got -1"),
    ],
)
def test_a_bad_value_is_refused_where_settings_are_made(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        made(*arguments)


def test_settings_make_the_trial_of_each_loader() -> None:
    settings = made("--trainer", "none", "--workers", "2")
    trial = settings.trial(backend="shards", path=Path("data/shards"), trainer=settings.trainer, classes=5)
    same = ("batch_size", "workers", "size", "warmup", "batches", "device", "augment", "shuffle")
    for name in (*same, "amp", "compiled", "cache"):
        assert getattr(trial, name) == getattr(settings, name)
