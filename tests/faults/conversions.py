"""Conversions for attacks: scenarios, a run of the command, and the checks of its result."""

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

import psutil  # noqa: F401 (imported here, so that no forked process has to load it)

import precache.cli.main
from precache.cli import commandline
from tests.faults import shim
from tests.faults.runner import HANG_S, CaseFailure, announce, end_children, fork
from tests.faults.shim import Shim, Strike
from tests.faults.trees import FORMATS, SIZE, make_tree

OTHER_SIZE = 8
_ERROR = re.compile(r"precache( convert)?: error: ")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A conversion, and the state of DST before it.

    Attributes:
        before: what DST is: `nothing`; `old`, a finished dataset of other settings; `unfinished`, an
            interrupted run of the same command; `unfinished old`, one of other settings; `link`, a link
            to `old`.
    """

    name: str
    format: str = "shards"
    workers: int = 0
    before: str = "nothing"

    def command(self, folder: Path, out: Path) -> list[str]:
        """Arguments of `precache` for the conversion."""
        arguments = _arguments(folder / "src", out, self.format, self.workers)
        if self.before in ("old", "unfinished old", "link"):
            arguments.append("--overwrite")
        return arguments

    def lay_out(self, folder: Path, out: Path) -> None:
        """Put at `out` what is there before the conversion."""
        out.parent.mkdir(parents=True, exist_ok=True)
        if self.before == "link":
            shutil.copytree(folder / "old", out.with_name("target"))
            out.symlink_to("target")
        elif self.before != "nothing":
            shutil.copytree(folder / self.before, out)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
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
    """Arguments of `precache` that convert the tree to shards of 3 pictures, in two splits."""
    return [
        "convert", str(source), str(out), "--format", name, "--size", str(size), "--fit", "crop",
        "--shard-bytes", str(3 * size * size * 3), "--splits", "train=0.7,val=0.3",
        "--workers", str(workers), "--max-rejects", "0.5",
    ]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes | None]:
    """Read all files below a folder: path -> bytes, None if it is no regular file; empty without a folder."""
    files: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if path.is_symlink() or not path.is_dir():
            regular = path.is_file() and not path.is_symlink()
            files[str(path.relative_to(folder))] = path.read_bytes() if regular else None
    return files


@dataclass(slots=True)
class ConversionSetup:
    """Data of the attacks on conversions.

    Attributes:
        truth: the files that an undisturbed run writes, by format; see `contents`.
        points: places to strike at, each once.
    """

    folder: Path
    truth: dict[str, dict[str, bytes | None]]
    points: list[Any] = field(default_factory=list)


def prepare(folder: Path) -> ConversionSetup:
    """Make the tree, undisturbed conversions of it, and unfinished ones."""
    source, log = folder / "src", folder / "log"
    make_tree(source, pictures=7)  # few, since each error is tried at each system call
    for name in FORMATS:
        done = run_convert(_arguments(source, folder / "truth" / name, name), log)
        assert done.code == 0, done.text
    assert run_convert(_arguments(source, folder / "old", "shards", size=OTHER_SIZE), log).code == 0
    library = Shim(folder, source)
    for name, size in (("unfinished", SIZE), ("unfinished old", OTHER_SIZE)):
        command = _arguments(source, folder / name, "shards", size=size)
        run_convert(command, log, shim=library, strike=Strike(shim.COUNT, changes=True))
        shutil.rmtree(folder / name)
        strike = Strike(shim.KILL_GROUP, library.count * 3 // 5)
        assert run_convert(command, log, shim=library, strike=strike).code == -9
        assert any((folder / name).iterdir())
    return ConversionSetup(folder, {name: contents(folder / "truth" / name) for name in FORMATS})


def prepare_host(setup: ConversionSetup) -> None:
    """Run a conversion in this process, so that forked processes need not import its modules."""
    out = setup.folder / f"warm-{os.getpid()}/out"
    commandline.run(precache.cli.main.main, "precache", _arguments(setup.folder / "src", out, "shards"))
    shutil.rmtree(out.parent)


def list_calls(folder: Path, scope: int, names: Iterable[str], *, changes: bool) -> list[tuple[str, int]]:
    """List the system calls of undisturbed runs of scenarios: (scenario, number of the call)."""
    calls = []
    for name in names:
        place = folder / "counting"
        SCENARIOS[name].lay_out(folder, place / "d/out")
        library, strike = Shim(place / "d", folder / "src"), Strike(shim.COUNT, scope=scope, changes=changes)
        command = SCENARIOS[name].command(folder, place / "d/out")
        done = run_convert(command, folder / "log", shim=library, strike=strike)
        assert done.code == 0, done.text
        calls += [(name, number + 1) for number in range(library.count)]
        shutil.rmtree(place)
    return calls


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """Result of a run of `precache convert`.

    Attributes:
        code: its exit code, or the negative number of the signal that ended it; None: it hung.
        text: its stderr.
    """

    code: int | None
    text: str = ""

    def check(self) -> None:
        """Fail the case if the run hung, died by itself, or ended with anything but one line of error."""
        lines = self.text.splitlines()
        last = " | ".join(lines[-3:])[:300]
        if self.code is None:
            raise CaseFailure(
                "hang", " | ".join(line.strip() for line in lines if "/precache/" in line)[:300]
            )
        if self.code < 0:
            raise CaseFailure("crash", f"{signal.Signals(-self.code).name} {last}")
        errors = [line for line in lines if _ERROR.match(line)]
        if self.code not in (0, 2) or "Traceback" in self.text or (self.code == 2 and errors != lines[-1:]):
            raise CaseFailure("traceback", f"exit code {self.code}, {len(errors)} lines of errors: {last}")


def run_convert(
    command: Sequence[str],
    log: Path,
    *,
    shim: Shim | None = None,
    strike: Strike | None = None,
    kill_after_s: float | None = None,
    spare_workers: bool = False,
) -> ConvertResult:
    """Run `precache COMMAND` in a forked process, in a group of its own, and wait for it and its workers.

    Args:
        kill_after_s: kill it and its workers after so many seconds.
        spare_workers: kill it alone, and do not wait for its workers.
    """

    def run() -> int:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
        if shim is not None and strike is not None:
            shim.activate(strike)
        return commandline.run(precache.cli.main.main, "precache", command)

    if shim is not None:
        shim.reset()
    log.write_text("")
    child = fork(run)
    with suppress(OSError):  # the child does the same; one of the two is first
        os.setpgid(child, 0)
    code = _wait(child, HANG_S if kill_after_s is None else kill_after_s)
    if code is None and kill_after_s is not None:
        if spare_workers:
            os.kill(child, signal.SIGKILL)
        else:
            os.killpg(child, signal.SIGKILL)
        code = _wait(child, HANG_S)
    if code is None:
        os.kill(child, signal.SIGUSR1)  # faulthandler prints the stacks
        time.sleep(0.2)
    if not spare_workers:
        end_children()
    return ConvertResult(code, log.read_text(errors="replace"))


def _wait(child: int, seconds: float) -> int | None:
    """Wait for a process; return its exit code, None if it still runs after `seconds`."""
    process = os.pidfd_open(child)
    try:
        ended = select.select([process], [], [], seconds)[0]
        if not ended:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(process)


class AttackedConversion:
    """A conversion under attack.

    Attributes:
        user_files: content of the user's files in DST and beside it, which must stay as they are.
        command: arguments of `precache`.
        expected: files of an undisturbed run at `out`.
    """

    def __init__(self, setup: ConversionSetup, scenario: Scenario, folder: Path) -> None:
        self.out, self.log, self.user_files = folder / "d/out", folder / "log", dict[Path, bytes]()
        self.shim = Shim(self.out.parent, setup.folder / "src")
        scenario.lay_out(setup.folder, self.out)
        self.command, self.expected = scenario.command(setup.folder, self.out), setup.truth[scenario.format]
        self._actions, self._stderr = [scenario.name], ""

    def record(self, action: str) -> None:
        """Record what was done to the conversion, for the outcome."""
        self._actions.append(action)
        announce("; ".join(self._actions))

    def add_user_file(self, path: Path, content: bytes = b"mine") -> None:
        """Write a file of the user's."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.user_files[path] = content

    def add_files_beside(self, draw: random.Random, setup: ConversionSetup) -> None:
        """Write files as people have them beside a dataset: copies, notes, names that programs might want."""
        if draw.random() < 0.6:
            return
        for name in draw.sample((".old/thesis.txt", ".bak/thesis.txt", ".txt", ".partial", "-1/notes.md"), 2):
            self.add_user_file(self.out.parent / (self.out.name + name))
        self.add_user_file(self.out.with_name(f".{self.out.name}"))
        if draw.random() < 0.3:
            for name, content in setup.truth["shards"].items():
                self.add_user_file(self.out.with_name(f"{self.out.name}.new") / name, content or b"")

    def run(self, *more: str, **options: Any) -> ConvertResult:
        """Run the command with options of `run_convert`; with the shim if one is a strike."""
        shim = self.shim if "strike" in options else None
        result = run_convert([*self.command, *more], self.log, shim=shim, **options)
        self._stderr += result.text
        return result

    def check_user_files(self) -> None:
        """Fail the case if a file of the user's is not as it was."""
        for path, content in self.user_files.items():
            if not path.is_file() or path.read_bytes() != content:
                raise CaseFailure(
                    "loss", f"the user's {path.parent.name}/{path.name} is gone, or was changed"
                )

    def check(self, result: ConvertResult) -> None:
        """Fail the case if a run lost a file of the user's, ended badly, or succeeded with other bytes."""
        self.check_user_files()
        written = {
            name: content
            for name, content in contents(self.out).items()
            if self.out / name not in self.user_files
        }
        names = {
            name for name in written | self.expected if written.get(name, 0) != self.expected.get(name, 0)
        }
        if result.code == 0 and names:
            raise CaseFailure("wrong", f"missing, more or with other bytes: {', '.join(sorted(names))[:200]}")
        result.check()

    def check_rerun(self) -> None:
        """Run the command again, not attacked: it has to write `expected`, and to leave nothing beside it.

        If files of the user's lie in DST it may refuse; without them it may not.
        """
        self.record("the same again")
        self.check(last := self.run())
        if last.code == 2 and (inside := [path for path in self.user_files if path.is_relative_to(self.out)]):
            for path in inside:
                del self.user_files[path]
                path.unlink()
            self.check(last := self.run())
        if last.code != 0:
            raise CaseFailure("loss", f"refused: {last.text[-200:]}")
        known = {
            "target",
            *(path.relative_to(self.out.parent).parts[0] for path in [self.out, *self.user_files]),
        }
        for path in self.out.parent.iterdir():
            is_lock_file = path.name.startswith(".") and path.is_file() and path.stat().st_size < 4096
            # A name in the messages is of a file that could not be removed, which the user has been told.
            if path.name not in known and path.name not in self._stderr and not is_lock_file:
                raise CaseFailure("loss", f"{path.name} is left behind")
