"""Attacks on `precache convert`: kills, errors of the system, damaged journals, races for a lock.

In each of them files of the user's lie in and beside DST; they stay as they are.
"""

import errno
import fcntl
import os
import pickle
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

from precache.conversion.journal import JOURNAL_NAME
from precache.errors import DatasetError
from precache.storage.locks import hold_lock, lock_path
from tests.faults import conversions, mutations, shim
from tests.faults.conversions import SCENARIOS, Attempt, Siege, World, attempt, warm_host
from tests.faults.runner import CLEAN, RIGHT, Attack, Bad, Outcome, forked, outcome_of
from tests.faults.shim import DST, SRC, Strike

# SIGKILL at every system call that changes something at DST, and at random times, up to four times in a
# row: the same command has to end with the bytes of an undisturbed run.

_RANDOM_SHARE = 4  # one case in so many kills at random times
_RUN_S = 0.25


def _prepare_kills(folder: Path) -> World:
    world = conversions.prepare(folder)
    world.points = conversions.calls(folder, DST, SCENARIOS, changes=True)
    random.Random(0).shuffle(world.points)
    return world


def _kill(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    number, at_random = divmod(seed, _RANDOM_SHARE)
    name, first = draw.choice(list(SCENARIOS)), 0
    if at_random:
        name, first = world.points[(number * (_RANDOM_SHARE - 1) + at_random - 1) % len(world.points)]
    siege = Siege(world, SCENARIOS[name], folder)
    siege.put_beside(draw, world)
    for _ in range(1 if first else draw.choice((1, 1, 2, 4))):
        if first:
            action = draw.choice((shim.KILL_GROUP,) * 6 + (shim.KILL_SELF, shim.TORN, shim.SHORT))
            killed = siege.attempt(strike=Strike(action, first))
            how = ("", "killed", "killed alone", "", "cut short", "torn")[action]
            struck = siege.shim.struck
            siege.did(f"{how} at {struck}" if struck else f"ended before, with {killed.code}")
        else:
            after_s, alone = draw.uniform(0, _RUN_S), draw.random() < 0.3
            killed = siege.attempt(kill_after_s=after_s, spare_workers=alone)
            siege.did(f"killed{' alone' * alone} after {after_s:.3f} s")
        if killed.code != -signal.SIGKILL:
            siege.check(killed)
    if draw.random() < 0.15 and siege.out.is_dir():
        siege.put(siege.out / "mine-12345.jpg")
        siege.did("mine-12345.jpg put into DST")
    siege.settle()
    if SCENARIOS[name].before == "link" and not siege.out.is_symlink():
        raise Bad("loss", "the user's link is gone")
    return RIGHT


# Errors of the system at every call on DST and on SRC, once and from then on. The run ends with one line
# and exit code 2, or with the bytes of an undisturbed one; the same command then ends with those.

_ERRNOS = (
    "EIO", "ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS", "EMFILE", "ENFILE", "ENOMEM", "EINTR", "EAGAIN",
    "ESTALE", "ETIMEDOUT", "EBUSY", "ENOENT", "EEXIST", "ENOTSUP", "EINVAL", "ELOOP", "ENAMETOOLONG",
)  # fmt: skip
_LASTING = ("EIO", "ENOSPC", "EROFS", "EACCES")  # a disk that is full, gone, or closed, stays so


def _prepare_errnos(folder: Path) -> World:
    """Its points are every error at every call: (scenario, error, strike)."""
    world = conversions.prepare(folder)
    for scope, names in ((DST, ("fresh", "resumed", "overwrite")), (SRC, ("fresh",))):
        for name, number in conversions.calls(folder, scope, names, changes=False):
            # what waits and tries again takes its time: not all of SRC
            lasting = _LASTING if scope == DST or number % 8 == 0 else ()
            for error, for_good in [*product(_ERRNOS, [False]), *product(lasting, [True])]:
                strike = Strike(shim.FAIL, number, scope, getattr(errno, error), for_good)
                world.points.append((name, error, strike))
    random.Random(0).shuffle(world.points)
    return world


def _fail(world: World, seed: int, folder: Path) -> Outcome:
    name, error, strike = world.points[seed % len(world.points)]
    siege = Siege(world, SCENARIOS[name], folder)
    siege.put_beside(random.Random(seed), world)
    struck = siege.attempt(strike=strike)
    where = "DST" if strike.scope == DST else "SRC"
    siege.did(f"{error}{' for good' * strike.for_good} on {where} at {siege.shim.struck}")
    siege.check(struck)
    siege.settle()
    return CLEAN if struck.code else RIGHT


# An interrupted conversion whose journal is damaged, or in whose folder lie other files. The same command
# ends with the bytes of an undisturbed run, or with one line. Where the journal still says what is being
# made, or is empty, and nothing else lies in the folder, the same command with --overwrite, at the latest,
# ends with those bytes.

_STRAYS = (
    "mine-12345.jpg", "mine-00000.safetensors", "notes.txt", "train-00000.safetensors.bak",
    "mine-00001.jpg.partial", "folder/thesis.txt", "journal.jsonl.bak", "train-00099.tar",
)  # fmt: skip


def _resume(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    siege = Siege(world, SCENARIOS["resumed"], folder)
    path = siege.out / JOURNAL_NAME
    header = path.read_bytes().splitlines(keepends=True)[0]
    whole = draw.random() < 0.1
    if not whole:
        siege.did(_spoil(siege, path, draw, folder / "elsewhere"))
    if draw.random() < 0.3:
        victim = draw.choice(sorted(set(siege.out.iterdir()) - {path}))
        victim.write_bytes(mutations.spoil(victim.read_bytes(), draw, b""))
        siege.did(f"{victim.name} changed")
    strays = draw.sample(_STRAYS, draw.choice((1, 2))) if whole or draw.random() < 0.4 else []
    for name in strays:
        siege.put(siege.out / name)
        siege.did(f"{name} put into DST")
    overwrites = draw.random() < 0.3
    siege.did("--overwrite" if overwrites else "resumed")
    first = siege.attempt(*["--overwrite"] * overwrites)
    siege.check(first)
    if first.code == 0:
        return RIGHT
    journal = path.read_bytes() if path.is_file() and not path.is_symlink() else b"another file"
    if strays or (journal and not journal.startswith(header)):
        return CLEAN  # whose the files are is not known any more: the user is told
    siege.did("then --overwrite")
    last = siege.attempt("--overwrite")
    siege.check(last)
    if last.code != 0:
        raise Bad("loss", f"neither resumed ({first.text[-200:]}) nor replaced: {last.text[-200:]}")
    return CLEAN


def _spoil(siege: Siege, journal: Path, draw: random.Random, elsewhere: Path) -> str:
    """Damage the journal, or what it names; how."""
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    way = draw.choice(("bytes", "bytes", "bytes", "json", "json", "lines", "name", "file"))
    if way == "bytes":
        journal.write_bytes(mutations.spoil(content, draw, lines[-1]))
    elif way == "json":
        journal.write_bytes(mutations.spoil_json(content, draw, lines[-1]))
    elif way == "lines":
        changed = lines
        while changed == lines:
            changed = draw.choices(lines, k=draw.randrange(len(lines) + 3))
        journal.write_bytes(b"".join(changed))
    elif way == "name":  # of a file that is not ours
        victim = journal.parent.parent / "victim.safetensors"
        siege.put(victim)
        names = (b"../victim.safetensors", str(victim).encode(), b"..", b".", b"")
        named = draw.choice((b"train-00000.safetensors", b"train-00000"))
        journal.write_bytes(content.replace(named, draw.choice(names)))
    else:
        elsewhere.mkdir()
        if draw.random() < 0.3:
            siege.put(elsewhere / "victim")
            journal.unlink()
            journal.symlink_to(elsewhere / "victim")
            return "the journal is a link to a file of the user's"
        return f"the journal {mutations.replace_file(journal, draw, elsewhere)}"
    return f"the journal's {way} changed"


# Several processes want one DST at once, from every state in which its lock may have been left. One at a
# time gets it, each gets it in the end, and a holder that is killed holds it no longer. Of whole
# conversions that start together, one converts, and the others say so in one line or find the result.

_GIVE_UP_S = 5.0
_BEFORE = ("none", "none", "stale", "stale", "empty", "torn", "doubled", "dangling", "text of the user's")


def _race(world: World, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    siege, before = Siege(world, SCENARIOS["fresh"], folder), draw.choice(_BEFORE)
    processes, converts = draw.choice((2, 4)), seed % 10 == 0
    _leave_behind(siege, before)
    if draw.random() < 0.2:
        siege.put(siege.out.with_name("out.lock"))
    siege.did(f"{processes} processes, lock before: {before}")
    seeds = [draw.randrange(1 << 30) for _ in range(processes)]
    start_s = time.monotonic() + 0.01  # all at once

    def act(number: int) -> Outcome:
        if not converts:
            return _want(siege.out, random.Random(seeds[number]), start_s, folder)
        done = attempt(siege.command, folder / f"log-{number}")
        done.check()
        return CLEAN if done.code else RIGHT

    ends = _at_once(act, processes, folder)
    for end in ends:
        if end.failed:
            return end
    refused = [end.detail for end in ends if end.kind == CLEAN.kind]
    may_refuse = before in ("dangling", "text of the user's") and len(refused) == len(ends)
    if converts and not may_refuse:
        if RIGHT in ends:
            siege.check(Attempt(0))
        siege.settle()
    elif refused and not may_refuse:
        raise Bad("loss", f"refused for {_GIVE_UP_S:.0f} s: {refused[0]}")
    siege.check_mine()
    return RIGHT


def _leave_behind(siege: Siege, before: str) -> None:
    lock = lock_path(siege.out)
    if before == "dangling":
        lock.symlink_to("nowhere")
    elif before == "text of the user's":
        siege.put(lock)
    elif before != "none":
        os.waitpid(forked(partial(_die_with_it, siege.out)), 0)
        stale = lock.read_bytes()
        torn = stale[: len(stale) * 2 // 3]
        lock.write_bytes({"stale": stale, "empty": b"", "torn": torn, "doubled": 2 * stale}[before])


def _die_with_it(out: Path) -> None:
    with hold_lock(out):
        os.kill(os.getpid(), signal.SIGKILL)


def _at_once(act: Callable[[int], Outcome], processes: int, folder: Path) -> list[Outcome]:
    """How it ends in each of so many processes, but those that were killed."""

    def note(number: int) -> None:
        (folder / f"end-{number}").write_bytes(pickle.dumps(outcome_of(partial(act, number))))

    children = [forked(partial(note, number)) for number in range(processes)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if -signal.SIGALRM in codes:
        return [Outcome("hang", "waited for ever")]
    return [pickle.loads(end.read_bytes()) for end in folder.glob("end-*")]


def _want(out: Path, draw: random.Random, start_s: float, folder: Path) -> Outcome:
    """Take the lock twice, and once in a while die with it."""
    signal.setitimer(signal.ITIMER_REAL, _GIVE_UP_S + 2)  # by default it kills
    while time.monotonic() < start_s:
        pass
    inside = open(folder / "inside", "w")  # noqa: SIM115 (until this process ends)
    for _ in range(2):
        give_up_s = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                with hold_lock(out):
                    try:  # a lock of the other kind, which ends first where a process is killed
                        fcntl.lockf(inside, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError as error:
                        raise Bad("wrong", "two held it at once") from error
                    time.sleep(draw.choice((0, 0, 0.0005, 0.002)))
                    if draw.random() < 0.1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    fcntl.lockf(inside, fcntl.LOCK_UN)
                break
            except DatasetError as error:
                if "\n" in str(error):
                    raise Bad("traceback", f"an error of several lines: {error}") from error
                if time.monotonic() > give_up_s:
                    return Outcome(CLEAN.kind, str(error))
                time.sleep(draw.uniform(0, 0.002))
    return RIGHT


# several runs, each of which is watched, take their time
_of = partial(Attack, warm_host=warm_host)
ATTACKS = {
    "kills": _of(_prepare_kills, _kill, case_s=90),
    "errnos": _of(_prepare_errnos, _fail, case_s=60),
    "journals": _of(conversions.prepare, _resume, case_s=45),
    "locks": _of(conversions.prepare, _race, case_s=40),
}
