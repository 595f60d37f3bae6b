"""The steps at full scale cannot run here: that their programs exist and take these options can be seen."""

from importlib import import_module
from pathlib import Path

import click
import pytest
import torch

from bench import cli
from bench.evidence.steps import FULL, LONGEST_S, PREPARE, SMOKE, STEPS, Scale, Step, arguments
from bench.measure.device import choose_warmup
from bench.measure.spec import RunSettings
from loaders import BACKENDS
from tests.command import ROOT

EVERY = (PREPARE, *STEPS)
PLACES = {"data": Path("d"), "result": Path("r"), "scratch": Path("s")}


def parsed(step: Step, scale: Scale) -> click.Context:
    """The options of the program of `step`, as its command understands them."""
    flag, module, *words = arguments(step, scale, PLACES)
    assert flag == "-m"
    command: click.Command
    if module == "bench":
        name, *words = words
        command = import_module(cli.COMMANDS[name]).command
    else:
        command = getattr(import_module(module), module.rpartition(".")[2])
    return command.make_context(step.name, words)


@pytest.mark.parametrize("scale", [FULL, SMOKE], ids=["full", "smoke"])
@pytest.mark.parametrize("step", EVERY, ids=lambda step: step.name)
def test_a_program_takes_the_options_of_its_step(step: Step, scale: Scale) -> None:
    words = arguments(step, scale, PLACES)
    assert "r" in words  # it writes its result
    assert not any("{" in word or word.endswith("=") or word == "" for word in words)
    assert parsed(step, scale).params


@pytest.mark.parametrize("step", [s for s in STEPS if "loaders" in s.program], ids=lambda step: step.name)
def test_a_comparison_of_loaders_at_full_scale_has_settings_that_bench_loaders_takes(step: Step) -> None:
    given = parsed(step, FULL).params
    assert set(given["backend"].split(",")) <= set(BACKENDS)
    names = ("batch_size", "size", "batches", "repeats", "amp", "compiled", "cache")
    device = torch.device("cuda")
    spec = RunSettings(
        trainers=(given["trainer"],),
        workers=1,
        warmup=choose_warmup(given["warmup"], device),
        device=device,
        **{name: given[name] for name in names},
    )
    assert FULL.photos % spec.batch_size == 0
    assert spec.compiled == ("compiled" in step.name)
    assert (spec.cache == "device") == ("device" in step.name)


@pytest.mark.parametrize("scale", [FULL, SMOKE], ids=["full", "smoke"])
def test_the_sweep_over_workers_takes_its_options(scale: Scale) -> None:
    (workers,) = (s for s in STEPS if s.name == "workers")
    options = parsed(workers, scale).params["options"]
    sweep = import_module(cli.COMMANDS["sweep"]).command.make_context("sweep", list(options))
    assert "," not in sweep.params["amp"] or scale is SMOKE  # one line of the grid, but where it is dropped
    assert sweep.params["device"] == scale.device


def test_every_backend_and_cache_feeds_resnet50() -> None:
    given = [parsed(s, FULL).params for s in STEPS if "loaders" in s.program]
    resnet50 = [params for params in given if params["trainer"] == "resnet50"]
    assert {name for params in resnet50 for name in params["backend"].split(",")} == set(BACKENDS)
    assert {params["cache"] for params in resnet50} == {"none", "ram", "device"}
    assert {params["trainer"] for params in given} == {"resnet50", "vit_s_16"}


def test_no_step_is_longer_than_eight_minutes_and_all_are_planned_for_25() -> None:
    assert max(s.limit_s for s in EVERY) <= LONGEST_S == 480
    assert sum(s.planned_s for s in EVERY) <= 25 * 60
    assert len({s.name for s in EVERY}) == len(EVERY)
    assert all(s.answers.endswith("?") for s in STEPS)


def test_the_guide_names_every_step() -> None:
    text = (ROOT / "bench/README.md").read_text()
    assert all(f"`{s.name}`" in text for s in STEPS)
