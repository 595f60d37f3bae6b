"""Errors of the system at every call on DST and on SRC, once and from then on, during `precache convert`.

The run ends with one line and exit code 2, or with the bytes of an undisturbed one; the same command then
ends with those, and the user's files are as they were.
"""

import errno
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults import scenarios, shim
from tests.faults.scenarios import SCENARIOS, Siege, World
from tests.faults.shim import Strike
from tests.faults.tally import RIGHT, Outcome

PRELOAD, CASE_S = True, 60.0
ERRNOS = (
    "EIO", "ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS", "EMFILE", "ENFILE", "ENOMEM", "EINTR", "EAGAIN",
    "ESTALE", "ETIMEDOUT", "EBUSY", "ENOENT", "EEXIST", "ENOTSUP", "EINVAL", "ELOOP", "ENAMETOOLONG",
)  # fmt: skip
LASTING = ("EIO", "ENOSPC", "EROFS", "EACCES")  # a disk that is full, gone, or closed, stays so
_NAMES = {shim.DST: ("fresh", "resumed", "overwrite"), shim.SRC: ("fresh",)}


@dataclass(frozen=True, slots=True)
class Point:
    scenario: str
    scope: int
    number: int  # of the call
    error: str
    for_good: bool


def prepare(world: Path) -> None:
    scenarios.prepare(world)
    for scope, names in _NAMES.items():
        scenarios.count_calls(world, scope, changes=False, names=names)


def load(world: Path) -> World:
    return scenarios.load(world, _points(world))


def full_count(world: Path) -> int:
    """Cases that have every error at every call once."""
    return len(list(_points(world)))


def _points(world: Path) -> Iterator[Point]:
    for scope in _NAMES:
        for name, number in scenarios.calls(world, scope):
            yield from (Point(name, scope, number, error, False) for error in ERRNOS)
            # what waits and tries again takes its time: not all of SRC
            if scope == shim.DST or number % 8 == 0:
                yield from (Point(name, scope, number, error, True) for error in LASTING)


def case(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    point = world.points[seed % len(world.points)]
    siege = Siege(world, SCENARIOS[point.scenario], folder)
    siege.belongings.put_beside(siege.out, draw, world.folder / "truth/shards")
    error = getattr(errno, point.error)
    strike = Strike(shim.FAIL, point.number, scope=point.scope, error=error, for_good=point.for_good)
    struck = siege.attempt(strike=strike)
    where = {shim.DST: "DST", shim.SRC: "SRC"}[point.scope]
    siege.did.append(f"{point.error}{' for good' * point.for_good} on {where} at {siege.shim.struck}")
    bad = siege.judge(struck) or siege.settle()
    return siege.outcome(bad, RIGHT if struck.code == 0 else Outcome("clean"))
