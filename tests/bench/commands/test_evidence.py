"""The command `bench evidence`: its steps, and how they are run, kept and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.cli import COMMANDS
from bench.commands.evidence import LONGEST_S, Campaign, Step, make_pictures, make_steps
from bench.measure.fresh import environment
from loaders import BACKENDS
from precache.cli.main import main as precache
from tests.command import ROOT

MACHINE = {"date": "2026-11-22", "cpu": "a CPU", "memory": "1 GiB", "accelerator": "none", "torch": "2.15.0"}
WRITES = "import json; json.dump({'of': 'one'}, open('found.json', 'w')); print('an answer')"
HANGS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def step(program: str = WRITES, limit_s: int = 30, name: str = "one") -> Step:
    return Step(name, limit_s, f"{name}?", ("-c", program, "found.json"))


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    (tmp_path / "results").mkdir()
    folders = {"data": tmp_path / "data", "results": tmp_path / "results"}
    return Campaign(**folders, prefix="gpu-test", machine=MACHINE, until_s=time.monotonic() + 600)


def params(program: tuple[str, ...]) -> dict[str, Any]:
    """The options of a step's program, as its command understands them."""
    flag, module, name, *words = program
    assert flag == "-m"
    if module == "precache":
        found = precache.get_command(None, name)  # type: ignore[arg-type]
        assert found is not None
        return found.make_context(name, words).params
    return dict(import_module(COMMANDS[name]).command.make_context(name, words).params)


def test_programs_are_commands_and_every_backend_and_cache_feeds_resnet50_within_25_minutes(
    tmp_path: Path,
) -> None:
    for smoke in (False, True):
        for made in (*make_pictures(tmp_path, smoke).values(), *make_steps(tmp_path, smoke)):
            if "pytest" not in made.program:
                # a GPU that is asked for and not there would be refused
                assert params(tuple(word.replace("=cuda", "=cpu") for word in made.program))
    steps = make_steps(Path("data"), False)
    resnet50 = [s.program for s in steps if {"loaders", "resnet50"} <= set(s.program)]
    fed = {name for program in resnet50 for name in program[program.index("--backend") + 1].split(",")}
    assert fed == set(BACKENDS)
    assert {p[p.index("--cache") + 1] for p in resnet50 if "--cache" in p} == {"ram", "device"}
    assert max(s.limit_s for s in steps) <= LONGEST_S == 480
    assert sum(s.limit_s / 3 for s in steps) <= 25 * 60
    text = (ROOT / "bench/README.md").read_text()
    assert all(f"`{s.name}`" in text for s in steps)


def test_a_step_that_has_its_result_is_kept_until_it_is_removed(campaign: Campaign) -> None:
    content, _ = campaign.measure(step())
    assert content == {"of": "one", "printed": "an answer\n", "machine": MACHINE, "exit_code": 0}
    assert campaign.finished(step()) == (content, "measured on 2026-11-22, kept")
    for damaged, why in (
        *((text, "cannot be used") for text in ("", '{"machine": {"date"', "[]", '{"rows": []}', "\0\0")),
        (json.dumps({"machine": {**MACHINE, "torch": "2.6.0"}}), "2.6.0"),
    ):
        campaign.result(step()).write_text(damaged)
        found, said = campaign.finished(step())
        assert found is None
        assert why in said
    campaign.result(step()).unlink()
    assert campaign.finished(step()) == (None, "not measured yet")
    assert not list((campaign.data / "steps").iterdir())


def test_a_step_that_does_not_end_well_has_no_result(campaign: Campaign) -> None:
    for program, why in (
        ("raise ValueError('no such picture')", "failed: ValueError: no such picture; see "),
        (f"{WRITES}; exit(3)", "failed: exit code 3; see "),
        ("pass", "failed: it left no result ("),  # what another run wrote is none of this one
        ("open('found.json', 'w').write('{')", "failed: it left no result ("),
    ):
        found, said = campaign.measure(step(program))
        assert found is None
        assert said.startswith(why)
        assert not list(campaign.results.iterdir())
    late = replace(campaign, until_s=time.monotonic() + 20)
    found, said = late.measure(step(limit_s=90))
    assert (found, "no time left" in said) == (None, True)


def test_a_step_that_hangs_is_killed_with_its_children(campaign: Campaign) -> None:
    found, said = campaign.measure(step(HANGS, limit_s=2))
    assert (found, said.partition(";")[0]) == (None, "killed after 2 s, its limit")
    child = (campaign.data / "steps/one/printed").read_text()
    wait_for(lambda: child == "" or not psutil.pid_exists(int(child)))  # none yet on a very busy machine


def test_steps_die_with_a_command_that_is_killed(campaign: Campaign, tmp_path: Path) -> None:
    """Else the next run would measure beside them."""
    program = (
        "import time; from pathlib import Path; from bench.commands.evidence import Campaign, Step; "
        f"here = Path({str(tmp_path)!r}); until_s = time.monotonic() + 600; "
        "run = Campaign(data=here, results=here, prefix='x', machine={}, until_s=until_s); "
        f"run.run(Step('one', 480, '', ('-c', {HANGS!r})))"
    )
    command = subprocess.Popen([sys.executable, "-c", program], env=environment())
    printed = tmp_path / "steps/one/printed"
    wait_for(lambda: printed.exists() and printed.read_text().strip() != "")
    hanging = psutil.Process(command.pid).children(recursive=True)
    assert len(hanging) == 3  # the guard, the step and its child
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    assert not psutil.wait_procs(hanging, timeout=20)[1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_smoke_run_that_is_killed_goes_on_and_ends_with_every_step(tmp_path: Path) -> None:
    names = [s.name for s in make_steps(tmp_path, True)]
    results = tmp_path / "data/evidence-smoke/results"
    first = results / f"smoke-{names[0]}.json"
    command = [sys.executable, "-m", "bench", "evidence", "--smoke"]
    killed = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    wait_for(first.exists, seconds=300)
    killed.kill()
    killed.wait()
    written_ns = first.stat().st_mtime_ns
    subprocess.run(command, cwd=tmp_path, env=environment(), check=True)
    assert first.stat().st_mtime_ns == written_ns
    for name in names:
        found = json.loads((results / f"smoke-{name}.json").read_text())
        assert found["machine"]["accelerator"] == "none"
        assert found["printed"]
    assert "no figure here says anything about a GPU" in (results / "gpu-evidence.html").read_text()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
