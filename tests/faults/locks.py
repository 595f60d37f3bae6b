"""Several processes want one DST at once, from every state in which its lock may have been left.

One at a time gets it, each gets it in the end, and a holder that is killed holds it no longer. Of whole
conversions that start together, one converts, and the others say so in one line or find the result.
"""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from precache.errors import DatasetError
from precache.storage.locks import hold_lock
from tests.faults import nursery, scenarios
from tests.faults.attempts import attempt
from tests.faults.scenarios import SCENARIOS, Siege, prepare
from tests.faults.tally import Outcome
from tests.faults.worlds import Belongings, contents, difference

__all__ = ["case", "load", "prepare"]
PRELOAD, CASE_S = True, 40.0
_GIVE_UP_S = 5.0
_BEFORE = ("none", "none", "stale", "stale", "empty", "torn", "doubled", "dangling", "text of the user's")
_REFUSED, _BOTH, _WAITED, _ERROR = 11, 12, 13, 14  # exit codes of those who want it


@dataclass(frozen=True, slots=True)
class World:
    conversions: scenarios.World
    name: str  # of the lock file of a DST `out`
    stale: bytes  # what a holder that was killed left in it


def load(world: Path) -> World:
    conversions = scenarios.load(world)
    place = world / f"names-{os.getpid()}"
    holder = os.fork()
    if holder == 0:
        with hold_lock(place / "out"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(holder, 0)
    (lock,) = (path for path in place.iterdir() if path.is_file())
    return World(conversions, lock.name, lock.read_bytes())


def case(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    siege, before = Siege(world.conversions, SCENARIOS["fresh"], folder), draw.choice(_BEFORE)
    _leave_behind(siege.out.parent / world.name, before, world, siege.belongings)
    if world.name != "out.lock" and draw.random() < 0.2:
        siege.belongings.put(siege.out.with_name("out.lock"), b"mine")
    processes, refusable = draw.choice((2, 4)), before in ("dangling", "text of the user's")
    siege.did = [f"{processes} processes, lock before: {before}"]
    nursery.say(siege.did[0])
    if seed % 10 == 0:
        bad = _convert_at_once(siege, processes, refusable, folder)
    else:
        bad = _race(siege.out, processes, refusable, draw, folder)
    if bad is None and (lost := siege.belongings.lost()):
        bad = Outcome("loss", lost)
    return siege.outcome(bad)


def _leave_behind(lock: Path, before: str, world: World, belongings: Belongings) -> None:
    stale = world.stale
    contents = {"stale": stale, "empty": b"", "torn": stale[: len(stale) * 2 // 3], "doubled": 2 * stale}
    if before in contents:
        lock.write_bytes(contents[before])
    elif before == "dangling":
        lock.symlink_to("nowhere")
    elif before == "text of the user's":
        belongings.put(lock, b"mine")


def _race(out: Path, processes: int, refusable: bool, draw: random.Random, folder: Path) -> Outcome | None:
    """Each wants the lock a few times; one that has it may be killed.

    Args:
        refusable: a file of the user's at its name, or a link: a refusal is an answer.
    """
    start_s = time.monotonic() + 0.01  # all at once
    children = []
    for _ in range(processes):
        seed = draw.randrange(1 << 30)
        child = os.fork()
        if child == 0:
            os._exit(_want(out, seed, start_s, folder / "inside"))
        children.append(child)
    # whoever ends first first: one that was killed is no process any more
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in children]
    if _BOTH in codes:
        return Outcome("wrong", f"two held it at once ({codes})")
    if _ERROR in codes:
        return Outcome("traceback", _said(folder / "inside.error"))
    if _WAITED in codes:
        return Outcome("hang", f"waited for ever ({codes})")
    if _REFUSED in codes and not (refusable and codes.count(_REFUSED) == len(codes)):
        return Outcome("loss", f"refused for {_GIVE_UP_S:.0f} s ({codes}): {_said(folder / 'inside.error')}")
    return None


def _want(out: Path, seed: int, start_s: float, inside: Path) -> int:
    """Take the lock twice, and once in a while die with it; the exit code."""
    draw = random.Random(seed)
    signal.setitimer(signal.ITIMER_REAL, _GIVE_UP_S + 2)  # by default it kills
    signal.signal(signal.SIGALRM, lambda *_: os._exit(_WAITED))
    while time.monotonic() < start_s:
        pass
    for _ in range(2):
        give_up_s = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                with hold_lock(out):
                    mine = inside.with_name(f"{inside.name}-{os.getpid()}")
                    mine.touch()
                    time.sleep(draw.choice((0, 0, 0.0005, 0.002)))
                    others = [p for p in inside.parent.glob("inside-*") if p != mine]
                    if any(_lives(int(p.name.rpartition("-")[2])) for p in others):
                        return _BOTH
                    if draw.random() < 0.1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    mine.unlink()
            except DatasetError as error:
                if "\n" in str(error):
                    inside.with_suffix(".error").write_text(repr(str(error)))
                    return _ERROR
                if time.monotonic() > give_up_s:
                    inside.with_suffix(".error").write_text(str(error))
                    return _REFUSED
                time.sleep(draw.uniform(0, 0.002))
                continue
            except BaseException as error:
                inside.with_suffix(".error").write_text(nursery.describe(error))
                return _ERROR
            break
    return 0


def _lives(pid: int) -> bool:
    """Whether it runs; not one that was killed and not waited for yet."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _said(path: Path) -> str:
    return path.read_text()[:250] if path.exists() else ""


def _convert_at_once(siege: Siege, processes: int, refusable: bool, folder: Path) -> Outcome | None:
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            done = attempt(siege.command, folder / f"log-{number}")
            fault = done.fault()
            end = f"{fault.kind}: {fault.detail}" if fault else str(done.code)
            (folder / f"end-{number}").write_text(end)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    ends = [(folder / f"end-{number}").read_text() for number in range(processes)]
    for end in ends:
        if end not in ("0", "2"):
            kind, _, detail = end.partition(": ")
            return Outcome(kind, detail)
    if "0" in ends and (differs := difference(contents(siege.out), siege.expected)):
        return Outcome("wrong", differs)
    return None if refusable and "0" not in ends else siege.settle()
