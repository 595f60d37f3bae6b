"""SIGKILL during `precache convert`: at every system call that changes something at DST, and at random times.

After it, or after several in a row, the same command has to end with the bytes of an undisturbed run, and the
user's files in and beside DST are as they were.
"""

import random
from pathlib import Path

from tests.faults import scenarios, shim
from tests.faults.scenarios import SCENARIOS, Siege, World
from tests.faults.shim import Strike
from tests.faults.tally import Outcome

PRELOAD, CASE_S = True, 90.0  # several runs, each of which is watched
RANDOM_SHARE = 4  # one case in so many kills at random times
_RUN_S = 0.25


def prepare(world: Path) -> None:
    scenarios.prepare(world)
    scenarios.count_calls(world, shim.DST, changes=True, names=SCENARIOS)


def load(world: Path) -> World:
    return scenarios.load(world, scenarios.calls(world, shim.DST))


def full_count(world: Path) -> int:
    """Cases that strike every call once, and the random ones between."""
    points = len(list(scenarios.calls(world, shim.DST)))
    return points * RANDOM_SHARE // (RANDOM_SHARE - 1) + RANDOM_SHARE


def case(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    number, at_random = divmod(seed, RANDOM_SHARE)
    if at_random == 0:
        scenario, first = SCENARIOS[draw.choice(list(SCENARIOS))], 0
    else:
        place = number * (RANDOM_SHARE - 1) + at_random - 1
        name, first = world.points[place % len(world.points)]
        scenario = SCENARIOS[name]
    siege = Siege(world, scenario, folder)
    siege.belongings.put_beside(siege.out, draw, world.folder / "truth/shards")
    for _ in range(1 if first else draw.choice((1, 1, 2, 4))):
        if first:
            action = draw.choice((shim.KILL_GROUP,) * 6 + (shim.KILL_SELF, shim.TORN, shim.SHORT))
            killed = siege.attempt(strike=Strike(action, first))
            how = ("", "killed", "killed alone", "", "cut short", "torn")[action]
            struck = siege.shim.struck
            siege.did.append(f"{how} at {struck}" if struck else f"ended before, with {killed.code}")
        else:
            after_s, alone = draw.uniform(0, _RUN_S), draw.random() < 0.3
            killed = siege.attempt(kill_after_s=after_s, spare_workers=alone)
            siege.did.append(f"killed{' alone' * alone} after {after_s:.3f} s")
        if killed.code != -9 and (bad := siege.judge(killed)):
            return siege.outcome(bad)
    if draw.random() < 0.15 and siege.out.is_dir():
        siege.belongings.put(siege.out / "mine-12345.jpg", b"mine")
        siege.did.append("mine-12345.jpg put into DST")
    bad = siege.settle()
    if scenario.before == "link" and not siege.out.is_symlink():
        bad = bad or Outcome("loss", "the user's link is gone")
    return siege.outcome(bad)
