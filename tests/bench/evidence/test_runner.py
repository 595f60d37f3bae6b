import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.evidence.runner import Outcome, Run, forget, run_limited, run_steps
from bench.evidence.steps import SMOKE, Step
from bench.measure.fresh_process import environment

MACHINE = {"date": "2026-11-22", "accelerator": "none", "torch": "2.15.0"}
WRITES = f"""
import json, sys
with open(sys.argv[1] + "/runs", "a") as file:
    file.write(sys.argv[3] + " ")
with open(sys.argv[2], "w") as file:
    json.dump({{"machine": {MACHINE!r}, "step": sys.argv[3]}}, file)
"""
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
RAISES = "print('some words'); raise ValueError('no such picture')"


def step(name: str, program: str = WRITES, limit_s: int = 30) -> Step:
    code = program.replace("{", "{{").replace("}", "}}")  # nothing to fill in there
    return Step(name, f"{name}?", limit_s, ("-c", code, "{data}", "{result}", name))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(
        data=tmp_path / "data",
        results=tmp_path / "results",
        prefix="gpu-test",
        machine=MACHINE,
        scale=SMOKE,
        until_s=time.monotonic() + 600,
    )


def outcomes(run: Run, *steps: Step) -> dict[str, Outcome]:
    return {done.name: outcome for done, outcome in run_steps(run, step("prepare"), steps)}


def runs(run: Run) -> list[str]:
    """The steps that ran so far, in order."""
    return (run.data / "runs").read_text().split()


def test_a_step_that_has_its_result_is_not_run_again(run: Run) -> None:
    found = outcomes(run, step("one"), step("two"))
    assert [found[name].content["step"] for name in ("one", "two")] == ["one", "two"]
    assert outcomes(run, step("one"), step("two"))["one"].content == found["one"].content
    assert runs(run) == ["prepare", "one", "two"]
    forget(run, step("one"))
    outcomes(run, step("one"), step("two"))
    run.result(step("two")).unlink()
    outcomes(run, step("one"), step("two"))
    assert runs(run)[3:] == ["prepare", "one", "prepare", "two"]


def test_a_step_that_raises_leaves_no_result_and_the_others_go_on(run: Run) -> None:
    found = outcomes(run, step("bad", RAISES), step("good"))
    assert found["bad"].content is None
    assert found["bad"].note.startswith("failed: ValueError: no such picture; see ")
    assert "some words" in run.log(step("bad")).read_text()
    assert found["good"].content is not None
    assert [path.name for path in run.results.iterdir()] == ["gpu-test-good.json"]


def test_a_step_that_hangs_is_killed_with_its_children_and_the_others_go_on(run: Run) -> None:
    found = outcomes(run, step("hangs", HANGS, limit_s=2), step("good"))
    assert found["hangs"] == Outcome(None, f"killed after 2 s, its limit; see {run.log(step('hangs'))}")
    child = int(run.log(step("hangs")).read_text())
    assert not _lives(child)
    assert found["good"].content is not None


@pytest.mark.parametrize("content", ["", '{"machine": {"date"', "[]", '{"rows": []}', "\0\0"])
def test_a_damaged_result_is_measured_again(run: Run, content: str) -> None:
    outcomes(run, step("one"))
    run.result(step("one")).write_text(content)
    assert outcomes(run, step("one"))["one"].content is not None
    assert runs(run).count("one") == 2


def test_a_result_of_another_machine_or_version_is_measured_again(run: Run) -> None:
    outcomes(run, step("one"))
    path = run.result(step("one"))
    for name, text in (("torch", "2.6.0"), ("accelerator", "NVIDIA H200")):
        path.write_text(json.dumps({"machine": {**MACHINE, name: text}}))
        notes = [outcome.note for _, outcome in run_steps(run, step("prepare"), [step("one")])]
        assert notes[0] == f"measured with {name} {text}, here {MACHINE[name]}"
        assert json.loads(path.read_text())["machine"] == MACHINE
    path.write_text(json.dumps({"machine": {**MACHINE, "date": "2020-01-01"}}))
    assert outcomes(run, step("one"))["one"].note == "measured on 2020-01-01, kept"


@pytest.mark.parametrize("program", ["pass", "import sys; open(sys.argv[2], 'w').write('{')"])
def test_a_step_that_ends_without_a_result_has_failed(run: Run, program: str) -> None:
    found = outcomes(run, step("one", program))["one"]
    assert found.content is None
    assert found.note.startswith("failed: it left no result (")


def test_a_step_for_which_no_time_is_left_is_not_begun(run: Run, tmp_path: Path) -> None:
    late = Run(
        data=run.data,
        results=run.results,
        prefix=run.prefix,
        machine=MACHINE,
        scale=SMOKE,
        until_s=time.monotonic() + 20,
    )
    found = outcomes(late, step("long", limit_s=90), step("short", limit_s=30))
    assert found["long"].note == "no time left for it (30 s are planned); run the same command again"
    assert found["short"].content is not None


def test_what_a_step_left_unfinished_is_there_when_it_runs_again(run: Run) -> None:
    program = (
        "import sys, os; open(os.path.join(os.path.dirname(sys.argv[2]), 'trials'), 'a').close(); exit(3)"
    )
    first = Step("one", "?", 30, ("-c", program, "{data}", "{result}"))
    assert outcomes(run, first)["one"].note.startswith("failed: exit code 3; see ")
    assert (run.scratch(first) / "trials").exists()
    outcomes(run, step("one"))
    assert not run.scratch(first).exists()


def test_a_step_that_is_to_be_measured_anew_begins_anew(run: Run) -> None:
    bad = step("one", RAISES)
    outcomes(run, bad)
    (run.scratch(bad) / "trials").touch()
    forget(run, bad)
    assert not run.scratch(bad).exists()


def test_what_a_failed_step_wrote_is_no_result_of_the_next_run(run: Run) -> None:
    assert outcomes(run, step("one", f"{WRITES}exit(3)"))["one"].content is None
    assert outcomes(run, step("one", "pass"))["one"].content is None


def test_a_process_that_a_step_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    )
    assert run_limited(["-c", program], 30, tmp_path / "log") == 0
    left = int((tmp_path / "log").read_text())
    _wait_for(lambda: not _lives(left))


def test_steps_die_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """Else the next run would measure beside them."""
    log = tmp_path / "log"
    program = (
        f"from bench.evidence.runner import run_limited; run_limited(['-c', {HANGS!r}], 600, {str(log)!r})"
    )
    command = subprocess.Popen([sys.executable, "-c", program], env=environment())
    hanging: list[psutil.Process] = []
    _wait_for(lambda: log.exists() and log.read_text().strip() != "")
    hanging = [
        p for p in psutil.Process(command.pid).children(recursive=True) if p.pid != int(log.read_text())
    ]
    assert len(hanging) == 2  # the guard and the step
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    _, alive = psutil.wait_procs(hanging, timeout=20)
    os.kill(int(log.read_text()), signal.SIGKILL)  # the child that left the group of its own accord
    assert not alive


def test_the_exit_code_of_a_step_is_that_of_its_program(tmp_path: Path) -> None:
    assert run_limited(["-c", "exit(7)"], 30, tmp_path / "log") == 7
    assert run_limited(["-c", "import os; os.abort()"], 30, tmp_path / "log") == 128 + signal.SIGABRT


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
