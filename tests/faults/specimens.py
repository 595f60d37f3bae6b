"""Cases that end badly in every way, for the test of those who count them."""

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.faults.tally import RIGHT, Outcome

CASE_S, CHUNK = 1.0, 3


def prepare(world: Path) -> None:
    (world / "made").touch()


def load(world: Path) -> bool:
    return (world / "made").exists()


def case(world: bool, seed: int, folder: Path) -> Outcome:
    assert world
    if seed == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif seed == 2:
        time.sleep(60)
    elif seed == 3:
        raise RuntimeError("two\nlines")
    elif seed == 4:
        subprocess.Popen(["sleep", "67"])  # is ended with the case
    elif seed == 5:
        os._exit(7)
    return RIGHT
