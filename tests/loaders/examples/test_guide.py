"""The guide names each example, and what it and the examples tell people to type is taken."""

import re
from importlib import import_module

import pytest

from tests.command import ROOT
from tests.loaders.examples.test_same_training import LIBRARIES

EXAMPLES = ("train", *(f"train_{name}" for name in LIBRARIES))


def test_the_guide_has_a_row_for_each_example() -> None:
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(examples/(\w+).py\)", (ROOT / "loaders/README.md").read_text(), re.MULTILINE
    )
    assert {name for name, _ in rows} == {file for _, file in rows} >= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_options_that_an_example_names_are_those_that_it_takes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name != "train":
        pytest.importorskip(LIBRARIES[name.removeprefix("train_")])
    module = import_module(f"loaders.examples.{name}")
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    taken = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    commands = re.findall(rf"-m loaders.examples.{name} (.*)", module.__doc__ or "")
    assert len(commands) == 2
    assert {option for command in commands for option in re.findall(r"--[a-z0-9-]+", command)} <= taken
