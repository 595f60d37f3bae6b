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


LOADERS = {
    "--backend dalli": ["unknown backend 'dalli'", "all, dali, imagefolder, nvjpeg, pytorch, shards"],
    "--trainer resnet51": ["unknown trainer 'resnet51'", "h100"],
    "--trainer emulated:fast": ["unknown rate 'fast'", "images/s"],
    "--trainer vit_s_16 --size 64": ["trainer vit_s_16 takes pictures of 224", "64"],
    "--trainer none --trainer-rate 5": ["--trainer and --trainer-rate cannot be combined"],
    "--trainer none --compile": ["compile is for trainers that compute, got 'none'"],
    "--trainer resnet18 --amp half": ["unknown amp 'half'", "auto, bf16, fp16, off"],
    "--cache disk": ["unknown cache 'disk'", "device, none, ram"],
    "--cache ram --cold": ["cache 'ram' is full before anything is timed", "--cold"],
    "--device tpu": ["unknown device 'tpu'", "auto, cpu, cuda"],
    "--against fcv --device cpu": ["unknown peer 'fcv'", "ffcv-raw"],
    "--against npy --peer-python nowhere --device cpu": ["nowhere: cannot be run"],
    "data/shards --against imagefolder --device cpu": ["peer imagefolder reads raw"],
    "nowhere": ["nowhere: does not exist"],
    "data/shards --backend webdataset": ["data/shards holds shards", "--backend all"],
    "--json data": ["data: is a folder", "a file in it"],
}
OTHERS = {
    "convert --json data": ["data: is a folder", "a file in it"],
    "report nowhere.json": ["nowhere.json: cannot be read"],
    "report data/shards/dataset.json": ["data/shards/dataset.json: not a result of 'bench loaders'"],
    "report data/raw --gpu-price 0": ["--gpu-price"],
}


@pytest.mark.parametrize(
    ("typed", "mentions"), [*((f"loaders {typed}", said) for typed, said in LOADERS.items()), *OTHERS.items()]
)
def test_bad_input_is_one_line_and_exit_code_2(typed: str, mentions: list[str], bench: Bench) -> None:
    check_bad_input(bench(*typed.split()), *mentions)
