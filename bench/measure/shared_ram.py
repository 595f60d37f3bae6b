"""`cache="ram"` of several ranks on one host: one copy for all of them, beside a copy each and no cache.

    python -m bench.measure.shared_ram FOLDER [--before CHECKOUT]

FOLDER is what `loaders.build` takes. CHECKOUT is this project at version 0.3.0, where each rank kept a copy
of its own (`git worktree add`). Prints images/s of all ranks together, in the first epoch, the second and
those behind it, and the memory that the ranks have in the end: median and range of runs that take turns.
Shared pages are counted once (PSS). The page cache is warm.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from bench.machine.hardware import describe_machine
from precache.errors import DatasetError, PrecacheError, check_range

_EPOCHS = 4
# Also of older versions: it takes the public names alone.
_RANK = """
import json, sys, time
import loaders

path, settings, reading = json.loads(sys.argv[1])
try:
    loader = loaders.build(path, reading=loaders.Reading(**reading), **settings)
except Exception as error:
    sys.exit(f"error: {error}")
print("ready", flush=True)
for line in sys.stdin:
    start_s = time.perf_counter()
    served = sum(len(labels) for _, labels in loader)
    print(json.dumps([served, time.perf_counter() - start_s]), flush=True)
"""


class Run(NamedTuple):
    """Of one arm: images/s of all ranks, epoch by epoch, and bytes of memory in the end."""

    images_per_s: list[float]
    memory_bytes: int


def run_ranks(
    ranks: int, checkout: Path, path: Path, settings: dict[str, Any], reading: dict[str, Any]
) -> Run:
    """Serve `_EPOCHS` epochs by that many processes, which begin each together.

    Raises:
        DatasetError: a rank has ended; it has said why.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "LOCAL_WORLD_SIZE": str(ranks)}
    with ExitStack() as at_end:
        processes = []
        for rank in range(ranks):
            told = json.dumps([str(path), {**settings, "rank": rank, "world_size": ranks}, reading])
            process = subprocess.Popen(
                [sys.executable, "-c", _RANK, told],
                env=environment,
                cwd=checkout,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            at_end.callback(_end, process)
            processes.append(process)
        for process in processes:
            _hear(process)
        figures = []
        for _ in range(_EPOCHS):
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            served = [json.loads(_hear(process)) for process in processes]
            figures.append(sum(samples for samples, _ in served) / max(s for _, s in served))
        return Run(figures, sum(_memory_bytes(process.pid) for process in processes))


def _hear(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise DatasetError("a rank has ended before its time; see what it says above")
    return line


def _memory_bytes(pid: int) -> int:
    process = psutil.Process(pid)
    return sum(int(p.memory_full_info().pss) for p in (process, *process.children(recursive=True)))


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def main() -> None:
    """Measure what the command line names; bad input ends in one line and exit code 2."""
    try:
        _main()
    except PrecacheError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.measure.shared_ram", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path)
    defaults = {"ranks": 2, "workers": 1, "batch-size": 64, "repeats": 3, "size": 224}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--augment", choices=("eval", "crop", "train"), default="eval")
    given = parser.parse_args()
    for name in ("ranks", "repeats"):
        check_range(name, getattr(given, name), 1)
    path, here = given.folder.resolve(), Path(__file__).resolve().parents[2]
    settings = {"batch_size": given.batch_size, "size": given.size, "augment": given.augment}
    arms = {"no cache": (here, "none"), "one copy": (here, "ram")}
    if given.before is not None:
        if not (given.before / "loaders" / "__init__.py").is_file():
            raise DatasetError(f"{given.before}: is no checkout of this project (it has no loaders)")
        arms["a copy each"] = (given.before.resolve(), "ram")
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for _ in range(given.repeats):
        for name, (checkout, cache) in arms.items():
            reading = {"workers": given.workers, "threads": given.workers, "cache": cache}
            runs[name].append(run_ranks(given.ranks, checkout, path, settings, reading))
    _print(runs, given)


def _print(runs: dict[str, list[Run]], given: argparse.Namespace) -> None:
    print(f"{given.folder}: {given.ranks} ranks, batches of {given.batch_size}, size {given.size}, augment "
          f"{given.augment}, {given.workers} workers each, {given.repeats} runs in turns")  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in describe_machine(torch.device("cpu")).items()))
    print("| ranks have | first epoch, images/s | second | later | to no cache | memory, MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    columns = {
        name: [
            [run.images_per_s[0] for run in of],
            [run.images_per_s[1] for run in of],
            [statistics.median(run.images_per_s[2:]) for run in of],
            [run.memory_bytes / 2**20 for run in of],
        ]
        for name, of in runs.items()
    }
    plain = statistics.median(columns["no cache"][2])
    for name, (first, second, later, memory) in columns.items():
        ratio = f"{statistics.median(later) / plain:.2f}x"
        print(f"| {name} | {' | '.join(map(_range, (first, second, later)))} | {ratio} | {_range(memory)} |")


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


if __name__ == "__main__":
    main()
