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
from bench.commands.evidence import (
    LONGEST_S,
    Campaign,
    Step,
    make_pictures,
    make_steps,
    publish,
)
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
    return Campaign(
        data=tmp_path / "data",
        results=tmp_path / "results",
        prefix="gpu-test",
        machine=MACHINE,
        until_s=time.monotonic() + 600,
    )


def params(program: tuple[str, ...]) -> dict[str, Any]:
    """The options of a step's program, as its command understands them."""
    flag, module, name, *words = program
    assert flag == "-m"
    if module == "precache":
        found = precache.get_command(None, name)  # type: ignore[arg-type]
        assert found is not None
        return found.make_context(name, words).params
    return dict(import_module(COMMANDS[name]).command.make_context(name, words).params)


@pytest.mark.parametrize("smoke", [False, True], ids=["full", "smoke"])
def test_every_program_is_a_command_with_options_that_it_takes(tmp_path: Path, smoke: bool) -> None:
    for made in (*make_pictures(tmp_path, smoke).values(), *make_steps(tmp_path, smoke)):
        if "pytest" not in made.program:
            # a GPU that is asked for and not there would be refused
            assert params(tuple(word.replace("=cuda", "=cpu") for word in made.program))


def test_every_backend_and_cache_feeds_resnet50_within_25_minutes() -> None:
    steps = make_steps(Path("data"), False)
    of_loaders = [s.program for s in steps if "loaders" in s.program]
    resnet50 = [program for program in of_loaders if "resnet50" in program]
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
    campaign.result(step()).unlink()
    assert campaign.finished(step()) == (None, "not measured yet")
    assert not list((campaign.data / "steps").iterdir())


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise ValueError('no such picture')", "failed: ValueError: no such picture; see "),
        ("exit(3)", "failed: exit code 3; see "),
        (f"{WRITES}; exit(3)", "failed: exit code 3; see "),
        ("pass", "failed: it left no result ("),
        ("open('found.json', 'w').write('{')", "failed: it left no result ("),
    ],
)
def test_a_step_that_does_not_end_well_has_no_result(campaign: Campaign, program: str, why: str) -> None:
    found, said = campaign.measure(step(program))
    assert found is None
    assert said.startswith(why)
    assert not list(campaign.results.iterdir())
    assert campaign.measure(step("pass"))[0] is None  # what it wrote is no result of the next run


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((text, "cannot be used") for text in ("", '{"machine": {"date"', "[]", '{"rows": []}', "\0\0")),
        *(
            (json.dumps({"machine": {**MACHINE, name: text}}), text)
            for name, text in (("torch", "2.6.0"), ("accelerator", "NVIDIA H200"))
        ),
    ],
)
def test_a_result_that_is_damaged_or_of_another_machine_is_none(
    campaign: Campaign, content: str, why: str
) -> None:
    campaign.result(step()).write_text(content)
    found, said = campaign.finished(step())
    assert found is None
    assert why in said


def test_what_a_step_left_unfinished_is_there_when_it_runs_again(campaign: Campaign) -> None:
    lines = "file = open('found.jsonl', 'a'); file.write('{\"trial\": 1}\\n')"
    of_lines = Step("one", 30, "?", ("-c", f"{lines}; file.close(); exit(3)", "found.jsonl"))
    assert campaign.measure(of_lines)[0] is None
    again, _ = campaign.measure(Step("one", 30, "?", ("-c", lines, "found.jsonl")))
    assert again is not None
    assert again["lines"] == [{"trial": 1}, {"trial": 1}]


def test_a_step_that_hangs_is_killed_with_its_children(campaign: Campaign) -> None:
    found, said = campaign.measure(step(HANGS, limit_s=2))
    assert (found, said.partition(";")[0]) == (None, "killed after 2 s, its limit")
    child = int((campaign.data / "steps/one/printed").read_text())
    wait_for(lambda: not lives(child))


def test_a_step_for_which_no_time_is_left_is_not_begun(campaign: Campaign) -> None:
    late = replace(campaign, until_s=time.monotonic() + 20)
    found, said = late.measure(step(limit_s=90))
    assert (found, "no time left" in said) == (None, True)
    assert late.measure(step(limit_s=30))[0] is not None


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


def test_the_page_has_answers_links_and_what_is_wrong_or_missing(campaign: Campaign) -> None:
    steps = [step(), step(f"{WRITES}; print('<2 failed>'); exit(1)", name="tests"), step(name="two")]
    found = {s.name: campaign.measure(s)[0] for s in steps[:2]}
    found["two"] = None
    publish(campaign, steps, found, {"two": "not measured yet"})
    page = (campaign.results / "gpu-evidence.html").read_text()
    for part in ("an answer", "&lt;2 failed&gt;", "Something is wrong", "Not measured: not measured yet"):
        assert part in page
    assert 'href="gpu-test-one.json"' in page


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_smoke_run_that_is_killed_goes_on_and_ends_with_every_step(tmp_path: Path) -> None:
    names = [s.name for s in make_steps(tmp_path, True)]
    results = tmp_path / "data/evidence-smoke/results"
    first = results / f"smoke-{names[0]}.json"
    killed = start(tmp_path)
    wait_for(first.exists, seconds=300)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    written_ns = first.stat().st_mtime_ns
    whole = start(tmp_path)
    output, _ = whole.communicate()
    assert whole.returncode == 0, output
    assert first.stat().st_mtime_ns == written_ns
    for name in names:
        found = json.loads((results / f"smoke-{name}.json").read_text())
        assert found["machine"]["accelerator"] == "none"
        assert found["printed"]
    assert "no figure here says anything about a GPU" in (results / "gpu-evidence.html").read_text()


def start(folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench", "evidence", "--smoke"]
    return subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
