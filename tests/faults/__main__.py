"""`python -m tests.faults`: run the long attacks, or those named, and print rows for tests/README.md.

A failing case prints the command that repeats it alone:

    python -m tests.faults folders --seed 4711 --count 1
"""

import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

import click

from tests.command import ROOT
from tests.faults import runner, shim
from tests.faults.runner import ATTACKS, FAILURES, NEED_THE_SHIM, Outcome


def long_count(name: str, folder: Path) -> int:
    """Count the cases of the long run of attack `name`, times FAULTS_SCALE.

    Args:
        folder: folder of the run; an attack that strikes each system call is prepared there.
    """
    count = ATTACKS[name][1]
    if not count:
        runner.run(name, 0, 0, folder)
        count = len(pickle.loads((folder / "setup.pickle").read_bytes()).points)
    return max(1, math.ceil(count * float(os.environ.get("FAULTS_SCALE", "1"))))


def row(name: str, outcomes: dict[int, Outcome], seconds: float) -> str:
    """Format a row of the table: attack, cases, failures of each kind, seconds, date, commit."""
    commit = subprocess.getoutput(f"git -C {ROOT} describe --always --dirty --exclude='*'")
    counts = Counter(outcome.kind for outcome in outcomes.values())
    cells = [name, *(f"{count:,}" for count in (counts.total(), *(counts[kind] for kind in FAILURES)))]
    return f"| {' | '.join([*cells, f'{seconds:.0f}', date.today().isoformat(), commit])} |"


@click.command()
@click.argument("names", metavar="[ATTACK]...", type=click.Choice(list(ATTACKS)), nargs=-1)
@click.option("--seed", default=0, help="Number of the first case.")
@click.option("--count", type=int, help="Cases.  [default: those of the long run]")
@click.option("--jobs", default=2 * (os.cpu_count() or 1), help="Cases at a time.")
@click.option("--folder", type=Path, help="Where to work.  [default: the system's temporary folder]")
def main(names: tuple[str, ...], seed: int, count: int | None, jobs: int, folder: Path | None) -> None:
    """Attack in ways named, or in all one after another; exit code 1 if an attack succeeds."""
    if reason := shim.why_unavailable():
        print(f"not run: {', '.join(NEED_THE_SHIM)}: {reason}", file=sys.stderr)
    failed = False
    for name in names or ATTACKS:
        if reason and name in NEED_THE_SHIM:
            continue
        start_s, work = time.monotonic(), Path(tempfile.mkdtemp(dir=folder, prefix="faults-"))
        try:
            cases = long_count(name, work) if count is None else count
            outcomes = runner.run(name, seed, cases, work, jobs=jobs)
        finally:
            if "FAULTS_KEEP" in os.environ:
                print(f"kept: {work}")
            else:
                shutil.rmtree(work, ignore_errors=True)
        failures = runner.failures(name, outcomes)
        print("\n".join([row(name, outcomes, time.monotonic() - start_s), *failures[:20]]), flush=True)
        failed = failed or bool(failures)
    sys.exit(int(failed))


if __name__ == "__main__":
    main(prog_name="python -m tests.faults")
