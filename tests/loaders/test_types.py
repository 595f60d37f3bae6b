"""What type checkers say of calls, and that what settings may be called is what there is."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from loaders.augment import NAMED
from loaders.read import BACKENDS
from loaders.settings import AugmentName, Backend
from tests.command import ROOT

CALLS = Path(__file__).with_name("typed_calls.py")


def test_a_type_checker_finds_what_is_wrong_and_nothing_else() -> None:
    command = [sys.executable, "-m", "mypy", str(CALLS.relative_to(ROOT))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = {int(line) for line in re.findall(r"typed_calls\.py:(\d+): error", ended.stdout)}
    lines = enumerate(CALLS.read_text().splitlines(), 1)
    assert found == {number for number, line in lines if line.endswith("  # wrong")}, ended.stdout


def test_every_name_of_a_backend_and_an_augmentation_is_there() -> None:
    assert {*BACKENDS, "auto"} == set(get_args(Backend))
    assert NAMED.keys() == set(get_args(AugmentName))
