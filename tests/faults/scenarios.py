"""The conversions that are attacked: what is asked for, and what lies at DST before."""

import json
import os
import random
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import precache.cli.main
from precache.cli import commandline
from tests.faults import shim
from tests.faults.attempts import Attempt, attempt
from tests.faults.shim import Shim, Strike
from tests.faults.tally import RIGHT, Outcome
from tests.faults.worlds import FORMATS, SIZE, Belongings, arguments, contents, difference, make_tree

OTHER_SIZE = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """One conversion.

    Attributes:
        before: at DST lies `nothing`; `old`, a finished dataset of other settings; `unfinished`, an
            interrupted run of the same command; `unfinished old`, one of other settings; `link`, a link
            to `old`.
    """

    name: str
    format: str = "shards"
    workers: int = 0
    before: str = "nothing"

    @property
    def overwrite(self) -> bool:
        return self.before in ("old", "unfinished old", "link")

    def command(self, world: Path, out: Path) -> list[str]:
        extra = ["--overwrite"] if self.overwrite else []
        return [*arguments(world / "src", out, self.format, workers=self.workers), *extra]

    def lay_out(self, world: Path, out: Path) -> None:
        """Put at `out` what lies there before."""
        out.parent.mkdir(parents=True, exist_ok=True)
        if self.before == "link":
            shutil.copytree(world / "old", out.with_name("target"))
            out.symlink_to("target")
        elif self.before != "nothing":
            shutil.copytree(world / self.before, out)


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("fresh"),
        Scenario("fresh, webdataset", "webdataset"),
        Scenario("fresh, dali", "dali"),
        Scenario("fresh, 2 workers", workers=2),
        Scenario("resumed", before="unfinished"),
        Scenario("overwrite", before="old"),
        Scenario("overwrite, 2 workers", workers=2, before="old"),
        Scenario("overwrite an unfinished one", before="unfinished old"),
        Scenario("overwrite through a link", before="link"),
    )
}


def prepare(world: Path) -> None:
    """Make the tree, what undisturbed runs make of it, and unfinished conversions."""
    source, log = world / "src", world / "log"
    make_tree(source, pictures=7)  # each call more is one that each error is tried at
    for name in FORMATS:
        out = world / "truth" / name
        done = attempt(arguments(source, out, name), log)
        assert done.code == 0, done.text
        for stray in out.parent.glob(".*"):
            stray.unlink()
    assert attempt(arguments(source, world / "old", "shards", size=OTHER_SIZE), log).code == 0
    library = Shim(world, source)
    for name, size in (("unfinished", SIZE), ("unfinished old", OTHER_SIZE)):
        command = arguments(source, world / name, "shards", size=size)
        attempt(command, log, shim=library, strike=Strike(shim.COUNT, changes=True))
        total = library.count
        shutil.rmtree(world / name)
        strike = Strike(shim.KILL_GROUP, total * 3 // 5)
        assert attempt(command, log, shim=library, strike=strike).code == -9
        assert any((world / name).iterdir())
    for stray in world.glob("*.lock"):
        stray.unlink()
    for stray in [*world.glob(".*")]:
        stray.unlink() if stray.is_file() else shutil.rmtree(stray)


@dataclass(frozen=True, slots=True)
class World:
    """`truth`: format -> what an undisturbed run writes; `points`: where to strike, each once, shuffled."""

    folder: Path
    truth: dict[str, dict[str, bytes | None]]
    points: list[Any]


def load(world: Path, points: Iterable[Any] = ()) -> World:
    shuffled = list(points)
    random.Random(0).shuffle(shuffled)
    _warm_up(world)
    return World(world, {name: contents(world / "truth" / name) for name in FORMATS}, shuffled)


class Siege:
    """One conversion under attack.

    Attributes:
        belongings: of the user, in DST and beside it.
        command, expected: what is run, and what an undisturbed run leaves at `out`.
        did: what was done to it so far.
        said: all that its runs wrote.
    """

    def __init__(self, world: World, scenario: Scenario, folder: Path) -> None:
        self.out, self.log, self.belongings = folder / "d/out", folder / "log", Belongings()
        self.shim = Shim(self.out.parent, world.folder / "src")
        scenario.lay_out(world.folder, self.out)
        self.command, self.expected = scenario.command(world.folder, self.out), world.truth[scenario.format]
        self.did, self.said = [scenario.name], ""

    def attempt(self, *more: str, **how: Any) -> Attempt:
        """Run the command, with arguments of `attempt`; under the shim where there is a strike."""
        shim = self.shim if "strike" in how else None
        done = attempt([*self.command, *more], self.log, shim=shim, **how)
        self.said += done.text
        return done

    def judge(self, done: Attempt) -> Outcome | None:
        """What no run may do: lose a file of the user's, end badly, or end well with other bytes."""
        if lost := self.belongings.lost():
            return Outcome("loss", lost)
        mine = self.belongings.names_in(self.out)
        found = {name: content for name, content in contents(self.out).items() if name not in mine}
        if done.code == 0 and (differs := difference(found, self.expected)):
            return Outcome("wrong", differs)
        return done.fault()

    def settle(self) -> Outcome | None:
        """The same command, not attacked: it has to end with `expected`; None if all is well.

        Where files of the user's lie in DST it may refuse instead; without them it may not.
        """
        last = self.attempt()
        if last.code == 2 and (inside := self.belongings.names_in(self.out)):
            if lost := self.belongings.lost():
                return Outcome("loss", lost)
            for name in inside:
                self.belongings.forget(self.out / name)
            last = self.attempt()
        bad = self.judge(last)
        if bad is None and last.code != 0:
            bad = Outcome("loss", f"refused: {last.error}")
        if bad is None and (strays := self.belongings.strays(self.out, self.said)):
            bad = Outcome("loss", strays)
        return bad and Outcome(bad.kind, f"the run after: {bad.detail}")

    def outcome(self, bad: Outcome | None, fine: Outcome = RIGHT) -> Outcome:
        """`fine`, or what is bad, with what was done."""
        return fine if bad is None else Outcome(bad.kind, f"{'; '.join(self.did)}: {bad.detail}")


def _warm_up(world: Path) -> None:
    """Run a conversion in this process: what it imports is there for those that are forked."""
    out = world / f"warm-{os.getpid()}/out"
    nowhere, before = os.open(os.devnull, os.O_WRONLY), [os.dup(1), os.dup(2)]
    # not sys.stderr: logging keeps the one that it finds
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    commandline.run(precache.cli.main.main, "precache", arguments(world / "src", out, "shards"))
    sys.stdout.flush()
    for number, descriptor in enumerate(before, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.close(nowhere)
    shutil.rmtree(out.parent)


def count_calls(world: Path, scope: int, *, changes: bool, names: Iterable[str]) -> None:
    """Write down how many calls an undisturbed run of each scenario makes."""
    counts = {}
    for name in names:
        place = world / "counting"
        out = place / "d/out"
        SCENARIOS[name].lay_out(world, out)
        library = Shim(out.parent, world / "src")
        strike = Strike(shim.COUNT, scope=scope, changes=changes)
        done = attempt(SCENARIOS[name].command(world, out), world / "log", shim=library, strike=strike)
        assert done.code == 0, done.text
        counts[name] = library.count
        shutil.rmtree(place)
    (world / f"calls-{scope}.json").write_text(json.dumps(counts))


def calls(world: Path, scope: int) -> Iterator[tuple[str, int]]:
    """Each of them: scenario, and its number in that."""
    counts: dict[str, int] = json.loads((world / f"calls-{scope}.json").read_text())
    return ((name, number) for name in sorted(counts) for number in range(1, counts[name] + 1))
