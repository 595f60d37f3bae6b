"""The command `bench evidence`: its steps, and how they are run, kept and gone on with."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.commands.evidence import Campaign, Step, make_pictures, make_steps
from bench.measure.fresh import environment
from tests.test_guides import command_of

MACHINE = {"date": "2026-11-22", "cpu": "a CPU", "memory": "1 GiB", "accelerator": "none", "torch": "2.15.0"}
WRITES = "import json; json.dump({'of': 'one'}, open('found.json', 'w')); print('an answer')"
HANGS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def step(program: str = WRITES, limit_s: int = 30) -> Step:
    return Step("one", limit_s, "one?", ("-c", program, "found.json"))


def test_the_programs_of_all_steps_are_commands_and_take_25_minutes(tmp_path: Path) -> None:
    steps = make_steps(tmp_path, smoke=False)
    for made in (*make_pictures(tmp_path, smoke=False).values(), *steps):
        if "pytest" not in made.program:
            # a GPU that is asked for and not there would be refused
            _, module, name, *words = (word.replace("=cuda", "=cpu") for word in made.program)
            command_of(module, name).make_context(name, words)
    assert sum(s.limit_s / 3 for s in steps) <= 25 * 60


def test_only_a_step_that_ended_well_on_this_machine_has_a_result_and_none_goes_on_past_its_limit(
    tmp_path: Path,
) -> None:
    folders = {"data": tmp_path / "data", "results": tmp_path / "results"}
    folders["results"].mkdir()
    campaign = Campaign(**folders, prefix="gpu-test", machine=MACHINE, until_s=time.monotonic() + 600)
    content, _ = campaign.measure(step())
    assert content == {"of": "one", "printed": "an answer\n", "machine": MACHINE, "exit_code": 0}
    assert campaign.finished(step()) == (content, "measured on 2026-11-22, kept")
    for damaged in ("", "[]", json.dumps({"machine": {**MACHINE, "torch": "2.6.0"}})):
        campaign.result(step()).write_text(damaged)
        assert campaign.finished(step())[0] is None
    campaign.result(step()).unlink()
    for program, limit_s, why in (
        ("raise ValueError('no such picture')", 30, "failed: ValueError: no such picture; see "),
        ("pass", 30, "failed: it left no result ("),  # what another run wrote is none of this one
        (HANGS, 2, "killed after 2 s, its limit"),
    ):
        found, said = campaign.measure(step(program, limit_s))
        assert found is None
        assert said.startswith(why)
        assert not list(campaign.results.iterdir())
    child = (campaign.data / "steps/one/printed").read_text()
    wait_for(lambda: child == "" or not psutil.pid_exists(int(child)))  # none yet on a very busy machine


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_smoke_run_that_is_killed_goes_on_and_ends_with_every_step(tmp_path: Path) -> None:
    names = [s.name for s in make_steps(tmp_path, True)]
    results = tmp_path / "data/evidence-smoke/results"
    first = results / f"smoke-{names[0]}.json"
    command = [sys.executable, "-m", "bench", "evidence", "--smoke"]
    killed = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    wait_for(first.exists, seconds=300)
    wait_for(lambda: len(psutil.Process(killed.pid).children(recursive=True)) > 1)  # the next step runs
    steps = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.wait()
    assert not psutil.wait_procs(steps, timeout=20)[1], "else the next run would measure beside them"
    written_ns = first.stat().st_mtime_ns
    subprocess.run(command, cwd=tmp_path, env=environment(), check=True)
    assert first.stat().st_mtime_ns == written_ns
    assert all(json.loads((results / f"smoke-{name}.json").read_text())["printed"] for name in names)
    assert "no figure here says anything about a GPU" in (results / "gpu-evidence.html").read_text()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
