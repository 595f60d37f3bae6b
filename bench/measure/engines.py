"""The engines `local` and `ray` beside each other: images/s of a conversion, on this machine.

    python -m bench.measure.engines TREE [--repeats 5] [--workers 2] [--format shards] [--size 448]
        [--shard-bytes 64MiB] [--scratch FOLDER]

Starts a Ray cluster of so many CPUs, then converts TREE with each engine in turns, each time in a process of
its own. `steady` is between a quarter and three quarters of the pictures: without the start of processes, and
without the end, when some have nothing left to do. `whole` is the conversion from its start.
The first turn is not counted: it reads TREE into the page cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from precache import Recipe, convert
from precache.console.commandline import parse_bytes
from precache.errors import PrecacheError, SettingError
from precache.executors.ray_cluster import imported
from precache.pictures.codecs import made_by
from precache.recipe import DEFAULT_SIZE

FIGURES = ("steady", "whole")
_FROM, _TO = 0.25, 0.75


def one(
    engine: str, address: str | None, tree: Path, out: Path, recipe: Recipe, workers: int
) -> dict[str, float]:
    """Convert here, and return the figures in images/s."""
    steps: list[tuple[int, float]] = []
    total = 0

    def note(done: int, of: int) -> None:
        nonlocal total
        total = of
        if not steps or done > steps[-1][0]:
            steps.append((done, time.perf_counter()))

    start_s = time.perf_counter()
    result = convert(tree, out, recipe, workers=workers, engine=engine, address=address, on_progress=note)
    whole = result.converted / (time.perf_counter() - start_s)
    (done_0, from_s), (done_1, to_s) = (
        next(step for step in steps if step[0] >= share * total) for share in (_FROM, _TO)
    )
    if done_0 == done_1:
        raise SettingError(f"{tree}: {total:,} pictures are too few for a steady rate; name a larger tree")
    return {"steady": (done_1 - done_0) / (to_s - from_s), "whole": whole}


def measure(given: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The figures of each engine, turn by turn."""
    if not given.tree.is_dir():
        raise SettingError(f"{given.tree}: is no folder; name a tree of class folders")
    ray = imported()
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init("local", num_cpus=given.workers, **options)
    address = ray.get_runtime_context().gcs_address
    figures: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    try:
        for turn in range(given.repeats + 1):
            for engine, its in figures.items():
                with tempfile.TemporaryDirectory(dir=given.scratch, prefix="bench-engines-") as scratch:
                    command = [
                        sys.executable,
                        "-m",
                        "bench.measure.engines",
                        str(given.tree),
                        "--one",
                        engine,
                    ]
                    command += ["--address", address, "--scratch", scratch, "--format", given.format]
                    command += ["--workers", str(given.workers), "--size", str(given.size)]
                    command += ["--shard-bytes", given.shard_bytes]
                    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                if said.returncode:
                    raise SettingError(f"engine {engine}: ended with {said.returncode}; see above")
                if turn:
                    its.append(json.loads(said.stdout.splitlines()[-1]))
    finally:
        ray.shutdown()
    return figures


def main() -> None:
    """Measure what the command line names; bad input ends in one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m bench.measure.engines", description=__doc__)
    parser.add_argument("tree", type=Path)
    for name, default in (("repeats", 5), ("workers", 2), ("size", DEFAULT_SIZE)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--format", default="shards")
    parser.add_argument("--shard-bytes", default="64MiB")
    parser.add_argument("--scratch", type=Path, help="folder to convert into")
    parser.add_argument("--one", choices=("local", "ray"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    try:
        if given.one:
            shard_bytes = parse_bytes(given.shard_bytes)
            recipe = Recipe(format=given.format, size=given.size, shard_bytes=shard_bytes)
            address = given.address if given.one == "ray" else None
            out = given.scratch / "out"
            print(json.dumps(one(given.one, address, given.tree, out, recipe, given.workers)))
        else:
            _print(given, measure(given))
    except PrecacheError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _print(given: argparse.Namespace, figures: dict[str, list[dict[str, float]]]) -> None:
    import ray

    print(f"{'images/s':9}{'local':>24}{'ray':>24}{'ray / local':>24}")
    for name in FIGURES:
        local, on_ray = ([figure[name] for figure in figures[engine]] for engine in ("local", "ray"))
        ratios = [ours / theirs for ours, theirs in zip(on_ray, local, strict=True)]
        print(f"{name:9}{_spread(local, '{:,.0f}')}{_spread(on_ray, '{:,.0f}')}{_spread(ratios, '{:.2f}')}")
    libraries = ", ".join(f"{name} {version}" for name, version in made_by().items())
    print(
        f"medians and ranges of {given.repeats} turns; {given.tree.name}, {given.format} of at most "
        f"{given.size} px; {given.workers} workers, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, page cache warm; "
        f"ray {ray.__version__}, {libraries}, python {sys.version.split()[0]}"
    )


def _spread(values: list[float], form: str) -> str:
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{f'{middle} ({low} to {high})':>24}"


if __name__ == "__main__":
    main()
