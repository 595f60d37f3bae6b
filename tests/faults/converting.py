"""Attacks on `precache convert`: kills, errors of the system, damaged sidecars, races for a lock.

In each of them files of the user's lie in DST and beside it, and must stay as they are.
"""

import errno
import fcntl
import json
import os
import pickle
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
import xxhash

from precache.dataset.unfinished import CONVERSION_NAME
from precache.errors import DatasetError
from precache.storage.locks import hold_lock, lock_path
from tests.faults import conversions, mutations, shim
from tests.faults.conversions import (
    SCENARIOS,
    AttackedConversion,
    ConversionSetup,
    ConvertResult,
    prepare_host,
    run_convert,
)
from tests.faults.runner import CLEAN, RIGHT, Attack, CaseFailure, Outcome, fork, run_case
from tests.faults.shim import DST, SRC, Strike

# Attack `kills`: SIGKILL at every system call that changes something at DST, and at random times, up to four
# times in a row. The same command then has to end with the bytes of an undisturbed run.

_RANDOM_SHARE = 4  # one case in so many kills at a random time
_RUN_S = 0.25  # duration of a run


def _prepare_kills(folder: Path) -> ConversionSetup:
    setup = conversions.prepare(folder)
    setup.points = conversions.list_calls(folder, DST, SCENARIOS, changes=True)
    random.Random(0).shuffle(setup.points)
    return setup


def _kill(setup: ConversionSetup, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    number, at_random = divmod(seed, _RANDOM_SHARE)
    name, first = draw.choice(list(SCENARIOS)), 0
    if at_random:
        name, first = setup.points[(number * (_RANDOM_SHARE - 1) + at_random - 1) % len(setup.points)]
    conversion = AttackedConversion(setup, SCENARIOS[name], folder)
    conversion.add_files_beside(draw, setup)
    for _ in range(1 if first else draw.choice((1, 1, 2, 4))):
        if first:
            action = draw.choice((shim.KILL_GROUP,) * 6 + (shim.KILL_SELF, shim.TORN, shim.SHORT))
            result = conversion.run(strike=Strike(action, first))
            verb = {
                shim.KILL_GROUP: "killed",
                shim.KILL_SELF: "killed alone",
                shim.SHORT: "cut short",
                shim.TORN: "torn",
            }[action]
            call = conversion.shim.struck_call
            conversion.record(f"{verb} at {call}" if call else f"ended before, with {result.code}")
        else:
            after_s, alone = draw.uniform(0, _RUN_S), draw.random() < 0.3
            result = conversion.run(kill_after_s=after_s, spare_workers=alone)
            conversion.record(f"{'killed alone' if alone else 'killed'} after {after_s:.3f} s")
        if result.code != -signal.SIGKILL:
            conversion.check(result)
    if draw.random() < 0.15 and conversion.out.is_dir():
        conversion.add_user_file(conversion.out / "mine-12345.jpg")
        conversion.record("mine-12345.jpg put into DST")
    conversion.check_rerun()
    if SCENARIOS[name].before == "link" and not conversion.out.is_symlink():
        raise CaseFailure("loss", "the user's link is gone")
    return RIGHT


# Attack `errnos`: errors of the system at every call on DST and on SRC, at that call alone or from it on. The
# run has to end with one line and exit code 2, or with the bytes of an undisturbed run; the same command then
# has to end with those bytes.

_ERRNOS = (
    "EIO", "ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS", "EMFILE", "ENFILE", "ENOMEM", "EINTR", "EAGAIN",
    "ESTALE", "ETIMEDOUT", "EBUSY", "ENOENT", "EEXIST", "ENOTSUP", "EINVAL", "ELOOP", "ENAMETOOLONG",
)  # fmt: skip
_LASTING = ("EIO", "ENOSPC", "EROFS", "EACCES")  # of a disk that stays full, gone, or read-only


def _prepare_errnos(folder: Path) -> ConversionSetup:
    """Prepare a setup whose points are every error at every call: (scenario, error, strike)."""
    setup = conversions.prepare(folder)
    for scope, names in ((DST, ("fresh", "resumed", "overwrite")), (SRC, ("fresh",))):
        for name, number in conversions.list_calls(folder, scope, names, changes=False):
            # Fewer on SRC, where lasting errors are retried, which takes its time.
            lasting = _LASTING if scope == DST or number % 8 == 0 else ()
            for error, for_good in [*product(_ERRNOS, [False]), *product(lasting, [True])]:
                strike = Strike(shim.FAIL, number, scope, getattr(errno, error), for_good)
                setup.points.append((name, error, strike))
    random.Random(0).shuffle(setup.points)
    return setup


def _fail(setup: ConversionSetup, seed: int, folder: Path) -> Outcome:
    name, error, strike = setup.points[seed % len(setup.points)]
    conversion = AttackedConversion(setup, SCENARIOS[name], folder)
    conversion.add_files_beside(random.Random(seed), setup)
    result = conversion.run(strike=strike)
    folder_name = "DST" if strike.scope == DST else "SRC"
    duration = " for good" if strike.for_good else ""
    conversion.record(f"{error}{duration} on {folder_name} at {conversion.shim.struck_call}")
    conversion.check(result)
    conversion.check_rerun()
    return CLEAN if result.code else RIGHT


# Attack `sidecars`: `conversion.json` or a sidecar of an interrupted conversion is damaged, or other files
# lie in its folder. The same command has to end with the bytes of an undisturbed run, or with one line. If
# `conversion.json` is as it was, nothing else lies in the folder, and no folder has the name of a file, it
# has to end with those bytes.

_STRAYS = (
    "mine-12345.jpg", "mine-00000.safetensors", "notes.txt", "train-00000.safetensors.bak",
    "mine-00001.jpg.partial", "folder/thesis.txt", "conversion.json.bak", "train-00099.tar",
)  # fmt: skip


def _resume(setup: ConversionSetup, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    conversion = AttackedConversion(setup, SCENARIOS["resumed"], folder)
    description = conversion.out / CONVERSION_NAME
    before = description.read_bytes()
    victim = draw.choice([description, *conversion.out.glob("*-*.json")])
    spares_json = draw.random() < 0.1
    if not spares_json:
        conversion.record(_spoil(conversion, victim, draw, folder / "elsewhere"))
    if draw.random() < 0.3:
        other = draw.choice(sorted(set(conversion.out.iterdir()) - {description, victim}))
        other.write_bytes(mutations.spoil(other.read_bytes(), draw, b""))
        conversion.record(f"{other.name} changed")
    strays = draw.sample(_STRAYS, draw.choice((1, 2))) if spares_json or draw.random() < 0.4 else []
    for name in strays:
        conversion.add_user_file(conversion.out / name)
        conversion.record(f"{name} put into DST")
    is_as_before = description.is_file() and not description.is_symlink() and victim != description
    if is_as_before:
        is_as_before = description.read_bytes() == before and not victim.is_dir()
    overwrite = ["--overwrite"] if draw.random() < 0.3 else []
    conversion.record("--overwrite" if overwrite else "resumed")
    result = conversion.run(*overwrite)
    conversion.check(result)
    if result.code == 0:
        return RIGHT
    if is_as_before and not strays:
        raise CaseFailure("loss", f"not resumed: {result.text[-200:]}")
    return CLEAN  # nothing says any more whose files these are, so that the user has to decide


def _spoil(conversion: AttackedConversion, victim: Path, draw: random.Random, elsewhere: Path) -> str:
    """Damage `conversion.json` or a sidecar; return a description."""
    content = victim.read_bytes()
    way = draw.choice(("bytes", "bytes", "bytes", "json", "json", "name", "file", "file"))
    if way == "bytes":
        victim.write_bytes(mutations.spoil(content, draw, content))
    elif way == "json":
        victim.write_bytes(mutations.spoil_json(content, draw, content))
    elif way == "name":  # it names a file of the user's
        outside = victim.parent.parent / "victim-00000.safetensors"
        conversion.add_user_file(outside)
        names = (b"../victim", str(outside.with_name("victim")).encode(), b"..", b".", b"")
        victim.write_bytes(_with_checksum(content.replace(b"train", draw.choice(names))))
    else:
        elsewhere.mkdir()
        if draw.random() < 0.3:
            conversion.add_user_file(elsewhere / "victim")
            victim.unlink()
            victim.symlink_to(elsewhere / "victim")
            return f"{victim.name} is a link to a file of the user's"
        return f"{victim.name} {mutations.replace_file(victim, draw, elsewhere)}"
    return f"{victim.name}: {way} changed"


def _with_checksum(content: bytes) -> bytes:
    """Give a changed file a checksum that fits, as a forger would."""
    rest = msgspec.json.encode({**json.loads(content), "checksum": ""}) + b"\n"
    checksum = f"{xxhash.xxh3_64_intdigest(rest):016x}"
    return msgspec.json.encode({**json.loads(content), "checksum": checksum})


# Attack `locks`: several processes want one DST at once, from every state in which its lock may have been
# left. One at a time gets it, each gets it in the end, and a holder that is killed loses it. Of whole
# conversions that start together one converts; the others end with one line, or with the result.

_GIVE_UP_S = 5.0
_BEFORE = ("none", "stale", "dangling", "text of the user's")


def _race(setup: ConversionSetup, seed: int, folder: Path) -> Outcome:
    draw = random.Random(seed)
    conversion, before = AttackedConversion(setup, SCENARIOS["fresh"], folder), draw.choice(_BEFORE)
    processes, converts = draw.choice((2, 4)), seed % 10 == 0
    _leave_lock(conversion, before)
    if draw.random() < 0.2:
        conversion.add_user_file(conversion.out.with_name("out.lock"))
    conversion.record(f"{processes} processes, lock before: {before}")
    seeds = [draw.randrange(1 << 30) for _ in range(processes)]
    start_s = time.monotonic() + 0.01  # for all processes

    def act(number: int) -> Outcome:
        if not converts:
            return _take_lock_twice(conversion.out, random.Random(seeds[number]), start_s, folder)
        result = run_convert(conversion.command, folder / f"log-{number}")
        result.check()
        return CLEAN if result.code else RIGHT

    outcomes = _run_at_once(act, processes, folder)
    for outcome in outcomes:
        if outcome.failed:
            return outcome
    refusals = [outcome.detail for outcome in outcomes if outcome.kind == CLEAN.kind]
    may_refuse = before == "dangling" and len(refusals) == len(outcomes)
    if converts and not may_refuse:
        if RIGHT in outcomes:
            conversion.check(ConvertResult(0))
        conversion.check_rerun()
    elif refusals and not may_refuse:
        raise CaseFailure("loss", f"refused for {_GIVE_UP_S:.0f} s: {refusals[0]}")
    conversion.check_user_files()
    return RIGHT


def _leave_lock(conversion: AttackedConversion, before: str) -> None:
    """Leave the lock of DST in a state of `_BEFORE`."""
    lock = lock_path(conversion.out)
    if before == "dangling":
        lock.symlink_to("nowhere")
    elif before == "text of the user's":
        conversion.add_user_file(lock)
    elif before == "stale":
        os.waitpid(fork(partial(_die_with_lock, conversion.out)), 0)


def _die_with_lock(out: Path) -> None:
    with hold_lock(out):
        os.kill(os.getpid(), signal.SIGKILL)


def _run_at_once(act: Callable[[int], Outcome], processes: int, folder: Path) -> list[Outcome]:
    """Run `act(number)` in so many processes at once; return the outcomes of those that were not killed."""

    def run_and_save(number: int) -> None:
        (folder / f"end-{number}").write_bytes(pickle.dumps(run_case(partial(act, number))))

    children = [fork(partial(run_and_save, number)) for number in range(processes)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if -signal.SIGALRM in codes:
        return [Outcome("hang", "waited for ever")]
    return [pickle.loads(end.read_bytes()) for end in folder.glob("end-*")]


def _take_lock_twice(out: Path, draw: random.Random, start_s: float, folder: Path) -> Outcome:
    """Take the lock twice; now and then die while holding it."""
    signal.setitimer(signal.ITIMER_REAL, _GIVE_UP_S + 2)  # SIGALRM ends a process that waits for ever
    while time.monotonic() < start_s:
        pass
    witness = open(folder / "inside", "w")  # noqa: SIM115 (until this process ends)
    for _ in range(2):
        give_up_s = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                with hold_lock(out):
                    # A lock of another kind, which the system releases first when a process is killed.
                    try:
                        fcntl.lockf(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError as error:
                        raise CaseFailure("wrong", "two held it at once") from error
                    time.sleep(draw.choice((0, 0, 0.0005, 0.002)))
                    if draw.random() < 0.1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    fcntl.lockf(witness, fcntl.LOCK_UN)
                break
            except DatasetError as error:
                if "\n" in str(error):
                    raise CaseFailure("traceback", f"an error of several lines: {error}") from error
                if time.monotonic() > give_up_s:
                    return Outcome(CLEAN.kind, str(error))
                time.sleep(draw.uniform(0, 0.002))
    return RIGHT


# A case is several runs, each of which may take HANG_S.
_attack = partial(Attack, prepare_host=prepare_host)
ATTACKS = {
    "kills": _attack(_prepare_kills, _kill, case_s=90),
    "errnos": _attack(_prepare_errnos, _fail, case_s=60),
    "sidecars": _attack(conversions.prepare, _resume, case_s=45),
    "locks": _attack(conversions.prepare, _race, case_s=40),
}
