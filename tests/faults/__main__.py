"""`python -m tests.faults`: the long attacks one after another, or those named; rows for tests/README.md.

A failure prints the command that repeats its case alone:

    python -m tests.faults folders --seed 4711 --count 1
"""

import argparse
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

from tests.command import ROOT
from tests.faults import nursery, shim
from tests.faults.nursery import ATTACKS, FAILURES, NEED_THE_SHIM, Outcome


def long_count(name: str, folder: Path) -> int:
    """Cases of the long run of `name`, times FAULTS_SCALE; `folder` is that of the run."""
    count = ATTACKS[name][1]
    if not count:
        nursery.run(name, 0, 0, folder)
        count = len(pickle.loads((folder / "world.pickle").read_bytes()).points)
    return max(1, math.ceil(count * float(os.environ.get("FAULTS_SCALE", "1"))))


def row(name: str, outcomes: dict[int, Outcome], seconds: float) -> str:
    """A line of the table."""
    commit = subprocess.getoutput(f"git -C {ROOT} describe --always --dirty --exclude='*'")
    counts = Counter(outcome.kind for outcome in outcomes.values())
    cells = [name, *(f"{count:,}" for count in (counts.total(), *(counts[kind] for kind in FAILURES)))]
    return f"| {' | '.join([*cells, f'{seconds:.0f}', date.today().isoformat(), commit])} |"


def main() -> int:
    """Exit code 0 if no attack succeeds, 1 if one does."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ATTACK", help=f"of: {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--count", type=int, help="cases (default: those of the long run)")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="cases at a time")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    given = parser.parse_args()
    if unknown := set(given.names) - ATTACKS.keys():
        parser.error(f"unknown attack {min(unknown)!r}; choose from: {', '.join(ATTACKS)}")
    if reason := shim.missing():
        print(f"not run: {', '.join(NEED_THE_SHIM)}: {reason}", file=sys.stderr)
    failed = False
    for name in given.names or ATTACKS:
        if reason and name in NEED_THE_SHIM:
            continue
        start_s, folder = time.monotonic(), Path(tempfile.mkdtemp(dir=given.folder, prefix="faults-"))
        try:
            count = given.count if given.count is not None else long_count(name, folder)
            outcomes = nursery.run(name, given.seed, count, folder, jobs=given.jobs)
        finally:
            if "FAULTS_KEEP" in os.environ:
                print(f"kept: {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
        failures = nursery.failures(name, outcomes)
        print("\n".join([row(name, outcomes, time.monotonic() - start_s), *failures[:20]]), flush=True)
        failed = failed or bool(failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
