"""SIGKILL during `precache convert`: at every system call that changes something at DST, and at random times.

After it, or after several in a row, the same command has to end with the bytes of an undisturbed run, and the
user's files in and beside DST are as they were.
"""

import random
from pathlib import Path

from tests.faults import scenarios, shim
from tests.faults.attempts import attempt, settle
from tests.faults.scenarios import SCENARIOS, World
from tests.faults.shim import Shim, Strike
from tests.faults.tally import RIGHT, Outcome
from tests.faults.worlds import Belongings, contents, difference

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
    out, belongings = folder / "d/out", Belongings()
    scenario.lay_out(world.folder, out)
    belongings.put_beside(out, draw, world.folder / "truth/shards")
    command, expected = scenario.command(world.folder, out), world.truth[scenario.format]
    library, log, did = Shim(out.parent, world.folder / "src"), folder / "log", [scenario.name]
    said = ""
    for _ in range(1 if first else draw.choice((1, 1, 2, 4))):
        if first:
            action = draw.choice((shim.KILL_GROUP,) * 6 + (shim.KILL_SELF, shim.TORN, shim.SHORT))
            killed = attempt(command, log, shim=library, strike=Strike(action, first))
            how = ("", "killed", "killed alone", "", "cut short", "torn")[action]
            did.append(
                f"{how} at {library.struck}" if library.struck else f"ended before, with {killed.code}"
            )
        else:
            after_s, alone = draw.uniform(0, _RUN_S), draw.random() < 0.3
            killed = attempt(command, log, kill_after_s=after_s, spare_workers=alone)
            did.append(f"killed{' alone' * alone} after {after_s:.3f} s")
        said += killed.text
        if killed.code != -9 and (fault := killed.fault()):
            return Outcome(fault.kind, f"{'; '.join(did)}: {fault.detail}")
        if killed.code == 0 and (differs := difference(_of(out, belongings), expected)):
            return Outcome("wrong", f"{'; '.join(did)}: {differs}")
    if draw.random() < 0.15 and out.is_dir():
        belongings.put(out / "mine-12345.jpg", b"mine")
        did.append("mine-12345.jpg put into DST")
    bad = settle(command, out, expected, belongings, log, said)
    if scenario.before == "link" and not out.is_symlink():
        bad = bad or Outcome("loss", "the user's link is gone")
    return RIGHT if bad is None else Outcome(bad.kind, f"{'; '.join(did)}: {bad.detail}")


def _of(out: Path, belongings: Belongings) -> dict[str, bytes | None]:
    mine = belongings.names_in(out)
    return {name: content for name, content in contents(out).items() if name not in mine}
