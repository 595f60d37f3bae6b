"""The stages of planning a conversion, in this process; `bench.measure.plan` reads what it prints.

    python -m bench.measure.plan_stages stages TREE WORKERS SIZE DST START_S

A line of JSON per stage: name, seconds, CPU seconds of this process and of those that it started and that
have ended, and the peak of this process's memory so far, in bytes. The mode
`stages` scans, hashes and plans; `first` converts until the first shard would begin, `whole` to the end.
START_S is when the process was started, as `time.time()` has it.
"""

import hashlib
import json
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import precache
from precache.plan import plan_conversion
from precache.recipe import Recipe
from precache.sources import Scanning, open_source

_SHARD_SAMPLES = 1000


def recipe_of(size: int) -> Recipe:
    """Shards of 1,000 pictures, in train and val."""
    recipe = Recipe(format="shards", size=size)
    return replace(recipe, shard_bytes=_SHARD_SAMPLES * recipe.picture_bytes)


def peak_bytes() -> int:
    """The most memory that this process has held so far."""
    try:  # `getrusage` counts what the parent held before this program began
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def now() -> tuple[float, float]:
    """The time, and the CPU seconds so far."""
    return time.time(), sum(os.times()[:4])


def tell(stage: str, since: tuple[float, float]) -> tuple[float, float]:
    """Print a stage that ends now; when that is."""
    ended = now()
    seconds = {"seconds": ended[0] - since[0], "cpu_s": ended[1] - since[1]}
    print(json.dumps({"stage": stage, **seconds, "peak_bytes": peak_bytes()}), flush=True)
    return ended


def stages(tree: str, workers: int, recipe: Recipe, start: tuple[float, float]) -> None:
    """Scan, hash again, plan and make the first tasks."""
    since = tell("start", start)
    scan = open_source(tree, how=Scanning(workers)).scan()
    since = tell("scan", since)
    digest, samples = hashlib.sha256(), scan.samples
    for row in range(len(samples)):  # as the definition says, to compare it with what the scan says
        ref = samples[row]
        digest.update(os.fsencode(ref.path) + b"\0%d\0" % ref.bytes)
    assert digest.hexdigest() == scan.digest
    since = tell("digest, one by one", since)
    plan = plan_conversion(samples, recipe)
    since = tell("plan", since)
    for shard in plan.shards[:100]:
        tuple(samples[row] for row in shard.rows)
    tell("100 tasks", since)


class _BegunError(Exception):
    """The first shard would begin."""


def _stop(done: int, total: int) -> None:
    raise _BegunError


def main(mode: str, tree: str, workers: int, size: int, destination: str, start_s: float) -> None:
    """See the module."""
    recipe = recipe_of(size)
    if mode == "stages":
        stages(tree, workers, recipe, (start_s, 0.0))
        return
    if mode == "whole":
        precache.convert(tree, destination, recipe, workers=workers)
        tell("whole conversion", (start_s, 0.0))
    else:
        try:
            precache.convert(tree, destination, recipe, workers=workers, on_progress=_stop)
        except _BegunError:
            tell("first shard begins", (start_s, 0.0))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], float(sys.argv[6]))
