"""`python -m tests.faults`: the long attacks one after another, or those named; rows for tests/README.md.

A failure prints the command that repeats its case alone:

    python -m tests.faults folders --seed 4711 --count 1
"""

import argparse
import importlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from tests.faults import nursery, shim
from tests.faults.tally import FAILURES, Tally

# name -> (module, cases of the long run)
ATTACKS = {
    "kills": ("kills", 1_000),
    "errnos": ("errnos", 0),  # as many as there are calls and errors
    "journals": ("journals", 2_000),
    "locks": ("locks", 2_000),
    "pictures": ("pictures", 10_000),
    "folders": ("folders", 10_000),
    "loaders": ("loading", 10_000),
}
NEED_THE_SHIM = ("kills", "errnos", "journals", "locks")


def module_of(name: str) -> Any:
    """The module of the attack `name`."""
    return importlib.import_module(f"tests.faults.{ATTACKS[name][0]}")


def long_count(name: str, folder: Path) -> int:
    """Cases of the long run of `name`, times FAULTS_SCALE; `folder` is that of the run."""
    module, count = module_of(name), ATTACKS[name][1]
    if hasattr(module, "full_count"):
        count = max(count, module.full_count(nursery.prepare(module, folder)))
    return max(1, math.ceil(count * float(os.environ.get("FAULTS_SCALE", "1"))))


def row(name: str, tally: Tally, seconds: float, commit: str) -> str:
    """A line of the table."""
    cells = [name, f"{tally.count:,}", *(f"{tally.counts[kind]:,}" for kind in FAILURES)]
    return f"| {' | '.join([*cells, f'{seconds:.0f}', date.today().isoformat(), commit])} |"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()

    # what is attacked, not the tests
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../../precache", "../../loaders")
    return git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    """A folder to work in; removed at the end, unless FAULTS_KEEP is set."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="faults-"))
    try:
        yield folder
    finally:
        if "FAULTS_KEEP" in os.environ:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


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
    names = [n for n in given.names or ATTACKS if not (reason and n in NEED_THE_SHIM)]
    failed = False
    for name in names:
        with _folder(given.folder) as folder:
            start_s = time.monotonic()
            count = given.count if given.count is not None else long_count(name, folder)
            tally = nursery.run(module_of(name), given.seed, count, folder, jobs=given.jobs)
        line = row(name, tally, time.monotonic() - start_s, _commit())
        print("\n".join([line, *tally.lines(name)]), flush=True)
        failed = failed or bool(tally.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
