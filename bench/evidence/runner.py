"""Runs steps one after the other, each in processes of its own, and keeps what they found.

RESULTS/gpu-h200-16cpu-races.json   what it found: there whole, or not at all
DATA/logs/races.log                 what the step printed, of its last run
DATA/steps/races/                   what an unfinished step left, to go on from
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.evidence.steps import LONGEST_S, Scale, Step, arguments
from bench.measure.fresh import environment
from precache.storage import atomic_write

_CHANGES_DAILY = "date"

Content = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Where a run keeps what, and what it runs on.

    Attributes:
        data: folder of the pictures, logs and unfinished steps.
        results: folder of the result files.
        prefix: of their names; says which machine they are of.
        machine: as `bench.machine.hardware.describe_machine` gives it.
        until_s: on the monotonic clock: no step goes on after that.
    """

    data: Path
    results: Path
    prefix: str
    machine: dict[str, str]
    scale: Scale
    until_s: float

    def result(self, step: Step) -> Path:
        """The file of what `step` found."""
        return self.results / f"{self.prefix}-{step.name}.json"

    def log(self, step: Step) -> Path:
        """The file of what `step` printed."""
        return self.data / "logs" / f"{step.name}.log"

    def scratch(self, step: Step) -> Path:
        """The folder that `step` may leave things in until it is done."""
        return self.data / "steps" / step.name


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step.

    Attributes:
        content: of its result file; None if there is none.
        note: how it went, in words.
    """

    content: Content | None
    note: str


NOT_YET = Outcome(None, "not measured yet")


def finished(run: Run, step: Step) -> Outcome:
    """What an earlier run found, if it holds for this machine; the note says why it does not."""
    path = run.result(step)
    try:
        content = _read(path)
    except FileNotFoundError:
        return NOT_YET
    except (OSError, ValueError) as error:
        return Outcome(None, f"{path}: cannot be used ({error})")
    found = content["machine"]
    for name, here in run.machine.items():
        if name != _CHANGES_DAILY and found.get(name) != here:
            return Outcome(None, f"measured with {name} {found.get(name, 'unknown')}, here {here}")
    return Outcome(content, f"measured on {found.get(_CHANGES_DAILY, 'an unknown day')}, kept")


def forget(run: Run, step: Step) -> None:
    """Remove the result of `step` and what an unfinished run of it left."""
    run.result(step).unlink(missing_ok=True)
    shutil.rmtree(run.scratch(step), ignore_errors=True)


def run_steps(run: Run, prepare: Step, steps: Sequence[Step]) -> Iterator[tuple[Step, Outcome]]:
    """What earlier runs found; then measure the missing steps, after `prepare` if there are any."""
    missing = []
    for step in steps:
        outcome = finished(run, step)
        if outcome.content is None:
            missing.append(step)
        yield step, outcome
    if missing:
        # it finds out itself what is there
        yield prepare, measure(run, prepare, run.scratch(prepare) / "result.json")
    for step in missing:
        yield step, Outcome(None, f"begun; at most {step.limit_s} s")
        yield step, measure(run, step, run.result(step))


def measure(run: Run, step: Step, result: Path) -> Outcome:
    """Run the program of `step`; its result appears at `result` if it ends well and in time."""
    left_s = run.until_s - time.monotonic()
    if left_s < step.planned_s:
        return Outcome(
            None, f"no time left for it ({step.planned_s:.0f} s are planned); run the same command again"
        )
    scratch, log = run.scratch(step), run.log(step)
    for folder in (scratch, log.parent, result.parent):
        folder.mkdir(parents=True, exist_ok=True)
    written = scratch / "written.json"
    written.unlink(missing_ok=True)
    command = arguments(step, run.scale, {"data": run.data, "result": written, "scratch": scratch})
    limit_s = min(step.limit_s, LONGEST_S, left_s)
    start_s = time.monotonic()
    code = run_limited(command, limit_s, log)
    if code is None:
        return Outcome(None, f"killed after {limit_s:.0f} s, its limit; see {log}")
    if code != 0:
        return Outcome(None, f"failed: {_last_line(log) or f'exit code {code}'}; see {log}")
    try:
        content = _read(written)
    except (OSError, ValueError) as error:
        return Outcome(None, f"failed: it left no result ({error}); see {log}")
    with atomic_write(result) as file:
        file.write(written.read_bytes())
    if result.parent != scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    return Outcome(content, f"measured in {time.monotonic() - start_s:.0f} s")


def run_limited(program: Sequence[str], limit_s: float, log: Path) -> int | None:
    """The exit code of `python PROGRAM`; None if it took too long and was killed, with its children."""
    command = [sys.executable, "-m", "bench.evidence.guard", *program]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # see bench.evidence.guard: it ends with this process
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_all(process)


def _kill_all(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a process group, and descendants that have left it."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _read(path: Path) -> Content:
    """ValueError unless the file holds a result with its machine."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("machine"), dict):
        raise ValueError("no result with its machine")
    return content


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
