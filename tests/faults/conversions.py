"""The conversions that are attacked: what is asked for, what lies at DST before, and how a run ends."""

import os
import random
import re
import select
import shutil
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # noqa: F401 (commands load it; now, so that this costs no run)

import precache.cli.main
from precache.cli import commandline
from tests.faults import shim
from tests.faults.runner import HANG_S, Bad, end_children, forked, say
from tests.faults.shim import Shim, Strike
from tests.faults.trees import FORMATS, SIZE, make_tree

OTHER_SIZE = 8
_ERROR = re.compile(r"precache( convert)?: error: ")


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

    def command(self, folder: Path, out: Path) -> list[str]:
        overwrites = self.before in ("old", "unfinished old", "link")
        return [*_arguments(folder / "src", out, self.format, self.workers), *["--overwrite"] * overwrites]

    def lay_out(self, folder: Path, out: Path) -> None:
        """Put at `out` what lies there before."""
        out.parent.mkdir(parents=True, exist_ok=True)
        if self.before == "link":
            shutil.copytree(folder / "old", out.with_name("target"))
            out.symlink_to("target")
        elif self.before != "nothing":
            shutil.copytree(folder / self.before, out)


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


def _arguments(source: Path, out: Path, name: str, workers: int = 0, size: int = SIZE) -> list[str]:
    """The command line of `precache` that converts the tree: shards of 3 pictures in two splits."""
    return [
        "convert", str(source), str(out), "--format", name, "--size", str(size), "--fit", "crop",
        "--shard-bytes", str(3 * size * size * 3), "--splits", "train=0.7,val=0.3",
        "--workers", str(workers), "--max-rejects", "0.5",
    ]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes | None]:
    """Path below the folder -> bytes; None for what is no regular file. Empty if there is no folder."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if path.is_symlink() or not path.is_dir():
            regular = path.is_file() and not path.is_symlink()
            found[str(path.relative_to(folder))] = path.read_bytes() if regular else None
    return found


@dataclass(slots=True)
class World:
    """`truth`: format -> what an undisturbed run writes; `points`: where to strike, each once."""

    folder: Path
    truth: dict[str, dict[str, bytes | None]]
    points: list[Any] = field(default_factory=list)


def prepare(folder: Path) -> World:
    """Make the tree, what undisturbed runs make of it, and unfinished conversions."""
    source, log = folder / "src", folder / "log"
    make_tree(source, pictures=7)  # each call more is one that each error is tried at
    for name in FORMATS:
        done = attempt(_arguments(source, folder / "truth" / name, name), log)
        assert done.code == 0, done.text
    assert attempt(_arguments(source, folder / "old", "shards", size=OTHER_SIZE), log).code == 0
    library = Shim(folder, source)
    for name, size in (("unfinished", SIZE), ("unfinished old", OTHER_SIZE)):
        command = _arguments(source, folder / name, "shards", size=size)
        attempt(command, log, shim=library, strike=Strike(shim.COUNT, changes=True))
        shutil.rmtree(folder / name)
        strike = Strike(shim.KILL_GROUP, library.count * 3 // 5)
        assert attempt(command, log, shim=library, strike=strike).code == -9
        assert any((folder / name).iterdir())
    return World(folder, {name: contents(folder / "truth" / name) for name in FORMATS})


def warm_host(world: World) -> None:
    """Run a conversion in this process: what it imports is there for those that are forked."""
    out = world.folder / f"warm-{os.getpid()}/out"
    commandline.run(precache.cli.main.main, "precache", _arguments(world.folder / "src", out, "shards"))
    shutil.rmtree(out.parent)


def calls(folder: Path, scope: int, names: Iterable[str], *, changes: bool) -> list[tuple[str, int]]:
    """(scenario, number) of each call that an undisturbed run of each scenario makes."""
    found = []
    for name in names:
        place = folder / "counting"
        SCENARIOS[name].lay_out(folder, place / "d/out")
        library, strike = Shim(place / "d", folder / "src"), Strike(shim.COUNT, scope=scope, changes=changes)
        command = SCENARIOS[name].command(folder, place / "d/out")
        done = attempt(command, folder / "log", shim=library, strike=strike)
        assert done.code == 0, done.text
        found += [(name, number + 1) for number in range(library.count)]
        shutil.rmtree(place)
    return found


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a run of the command ended.

    Attributes:
        code: its exit code, or the negative number of the signal that ended it; None: it hung.
        text: what it wrote to stderr.
    """

    code: int | None
    text: str = ""

    def check(self) -> None:
        """What no run may do: hang, die by itself, end in a traceback, say nothing or more than a line."""
        lines = self.text.splitlines()
        last = " | ".join(lines[-3:])[:300]
        if self.code is None:
            raise Bad("hang", " | ".join(line.strip() for line in lines if "/precache/" in line)[:300])
        if self.code < 0:
            raise Bad("crash", f"{signal.Signals(-self.code).name} {last}")
        errors = [line for line in lines if _ERROR.match(line)]
        if self.code not in (0, 2) or "Traceback" in self.text or (self.code == 2 and errors != lines[-1:]):
            raise Bad("traceback", f"exit code {self.code}, {len(errors)} lines of errors: {last}")


def attempt(
    command: Sequence[str],
    log: Path,
    *,
    shim: Shim | None = None,
    strike: Strike | None = None,
    kill_after_s: float | None = None,
    spare_workers: bool = False,
) -> Attempt:
    """Run `precache COMMAND` in a forked process, in a group of its own, and wait for it and its workers.

    Args:
        kill_after_s: kill it and its workers then; with `spare_workers` it alone, and do not wait for them.
    """

    def run() -> int:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
        if shim is not None and strike is not None:
            shim.arm(strike)
        return commandline.run(precache.cli.main.main, "precache", command)

    if shim is not None:
        shim.reset()
    log.write_text("")
    child = forked(run)
    with suppress(OSError):  # it does the same: whoever comes first
        os.setpgid(child, 0)
    code = _wait(child, HANG_S if kill_after_s is None else kill_after_s)
    if code is None and kill_after_s is not None:
        (os.kill if spare_workers else os.killpg)(child, signal.SIGKILL)
        code = _wait(child, HANG_S)
    if code is None:
        os.kill(child, signal.SIGUSR1)  # says where it stands
        time.sleep(0.2)
    if not spare_workers:
        end_children()
    return Attempt(code, log.read_text(errors="replace"))


def _wait(child: int, seconds: float) -> int | None:
    """The exit code; None if it still runs after `seconds`."""
    process = os.pidfd_open(child)
    try:
        ended = select.select([process], [], [], seconds)[0]
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if ended else None
    finally:
        os.close(process)


class Siege:
    """One conversion under attack.

    Attributes:
        mine: files of the user's, in DST and beside it; whatever happens, they stay as they are.
        command, expected: what is run, and what an undisturbed run leaves at `out`.
    """

    def __init__(self, world: World, scenario: Scenario, folder: Path) -> None:
        self.out, self.log, self.mine = folder / "d/out", folder / "log", dict[Path, bytes]()
        self.shim = Shim(self.out.parent, world.folder / "src")
        scenario.lay_out(world.folder, self.out)
        self.command, self.expected = scenario.command(world.folder, self.out), world.truth[scenario.format]
        self._did, self._said = [scenario.name], ""

    def did(self, what: str) -> None:
        """Note what was done to it."""
        self._did.append(what)
        say("; ".join(self._did))

    def put(self, path: Path, content: bytes = b"mine") -> None:
        """Give the user a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.mine[path] = content

    def put_beside(self, draw: random.Random, world: World) -> None:
        """What people have beside a dataset: copies, notes, and names that a program might want."""
        if draw.random() < 0.6:
            return
        for name in draw.sample((".old/thesis.txt", ".bak/thesis.txt", ".txt", ".partial", "-1/notes.md"), 2):
            self.put(self.out.parent / (self.out.name + name))
        self.put(self.out.with_name(f".{self.out.name}"))
        if draw.random() < 0.3:
            for name, content in world.truth["shards"].items():
                self.put(self.out.with_name(f"{self.out.name}.new") / name, content or b"")

    def attempt(self, *more: str, **how: Any) -> Attempt:
        """Run the command, with arguments of `attempt`; under the shim where there is a strike."""
        done = attempt([*self.command, *more], self.log, shim=self.shim if "strike" in how else None, **how)
        self._said += done.text
        return done

    def check_mine(self) -> None:
        for path, content in self.mine.items():
            if not path.is_file() or path.read_bytes() != content:
                raise Bad("loss", f"the user's {path.parent.name}/{path.name} is gone, or was changed")

    def check(self, done: Attempt) -> None:
        """What no run may do: lose a file of the user's, end badly, or end well with other bytes."""
        self.check_mine()
        found = {
            name: content for name, content in contents(self.out).items() if self.out / name not in self.mine
        }
        names = {name for name in found | self.expected if found.get(name, 0) != self.expected.get(name, 0)}
        if done.code == 0 and names:
            raise Bad("wrong", f"missing, more or with other bytes: {', '.join(sorted(names))[:200]}")
        done.check()

    def settle(self) -> None:
        """The same command, not attacked, has to end with `expected`, and leave nothing beside it.

        Where files of the user's lie in DST it may refuse instead; without them it may not.
        """
        self.did("the same again")
        self.check(last := self.attempt())
        if last.code == 2 and (inside := [path for path in self.mine if path.is_relative_to(self.out)]):
            for path in inside:
                del self.mine[path]
                path.unlink()
            self.check(last := self.attempt())
        if last.code != 0:
            raise Bad("loss", f"refused: {last.text[-200:]}")
        known = {"target", *(path.relative_to(self.out.parent).parts[0] for path in [self.out, *self.mine])}
        for path in self.out.parent.iterdir():
            small = (
                path.name.startswith(".") and path.is_file() and path.stat().st_size < 4096
            )  # as a lock file
            # what the user was told of could not be removed
            if path.name not in known and path.name not in self._said and not small:
                raise Bad("loss", f"{path.name} is left behind")
